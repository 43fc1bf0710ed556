"""Read single weights of a training checkpoint, without a model, a process group or the optimizer.

torch's distributed checkpoint describes whole tensors and where each saved part of them lies. Here a tensor, or a range
of experts of a stack, is put together from those parts; other tensors are not touched.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import Layout, Slot

_MODEL = "model."
"""What `policy.training_state` puts before every name of the model."""


class SavedWeights:
    """Weights of the `policy` folder of a training checkpoint.

    Attributes:
        state: {AutoModel name: tensor on the meta device}, shapes and dtypes as saved.
        files: names of the data files that hold them (the optimizer's tensors lie in the same files).
    """

    def __init__(self, folder: Path) -> None:
        """Read the metadata only.

        Raises:
            UserError: `folder` holds no readable training checkpoint.
        """
        self.folder = Path(folder)
        self._reader = FileSystemReader(self.folder)
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError as error:
            raise UserError(f"{folder} holds no training checkpoint (no .metadata file)") from error
        except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise UserError(f"{folder}/.metadata cannot be read ({error}); take another step's checkpoint") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._saved = {
            key.removeprefix(_MODEL): saved
            for key, saved in metadata.state_dict_metadata.items()
            if key.startswith(_MODEL) and isinstance(saved, TensorStorageMetadata)
        }
        if not self._saved:
            raise UserError(f"{folder} holds no model weights, only {sorted(metadata.state_dict_metadata)[:3]}")
        self.state = {
            key: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
            for key, saved in self._saved.items()
        }
        places: dict[MetadataIndex, Any] = metadata.storage_data
        self.files = sorted({place.relative_path for index, place in places.items() if index.fqn.startswith(_MODEL)})

    def read(self, key: str, experts: tuple[int, int] | None = None) -> torch.Tensor:
        """Read a tensor, or experts [first, last) of a stack, in the saved dtype.

        Raises:
            UserError: a part is missing or cannot be read.
        """
        saved = self._saved[key]
        offsets, sizes = [0] * len(saved.size), list(saved.size)
        if experts is not None:
            offsets[0], sizes[0] = experts[0], experts[1] - experts[0]
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(_MODEL + key, saved, [wanted])
        found = sum(torch.Size(item.lengths).numel() for item in items)
        target = torch.empty(sizes, dtype=saved.properties.dtype)
        if found != target.numel():
            raise UserError(
                f"{self.folder}: {key!r} has {found} of {target.numel()} elements; the checkpoint is damaged"
            )
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()  # pyright: ignore[reportArgumentType]
        except (OSError, EOFError, RuntimeError, KeyError, AssertionError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{self.folder}: {key!r} cannot be read ({reason}); the checkpoint is damaged") from error
        return target

    def stored_together(self, key: str, expert: int) -> tuple[int, int]:
        """Experts [first, last) of a stack that a rank saved in one piece with `expert`."""
        starts = sorted({chunk.offsets[0] for chunk in self._saved[key].chunks})
        first = max((start for start in starts if start <= expert), default=0)
        return first, min((start for start in starts if start > expert), default=self._saved[key].size[0])


@dataclass
class _Into:
    """The planner's side of a read: where a part goes."""

    target: torch.Tensor

    def resolve_tensor(self, item: Any) -> torch.Tensor:
        """View that a part is copied into."""
        view = self.target
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the view was written through."""


class OfficialValues:
    """Values of official tensors [out, in] from saved weights; experts that were saved together are read together.

    At most one piece of each expert stack of one layer is in memory.
    """

    def __init__(self, saved: SavedWeights, layout: Layout) -> None:
        self._saved, self._layout = saved, layout
        self._pieces: dict[str, tuple[int, int, torch.Tensor]] = {}

    def read(self, slot: Slot) -> torch.Tensor:
        """Read the tensor at a slot, in official orientation."""
        if slot.expert is None:
            self._pieces.clear()
            return self._saved.read(slot.key)
        first, last, stack = self._pieces.get(slot.key, (0, 0, torch.empty(0)))
        if not first <= slot.expert < last:
            first, last = self._saved.stored_together(slot.key, slot.expert)
            layer = slot.key.partition(".experts.")[0] + "."
            del stack
            self._pieces = {k: p for k, p in self._pieces.items() if k.startswith(layer) and k != slot.key}
            stack = self._saved.read(slot.key, (first, last))
            self._pieces[slot.key] = (first, last, stack)
        return self._layout.view(stack, Slot(slot.key, slot.expert - first, slot.part))
