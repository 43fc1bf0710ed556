"""Training state of all ranks on disk: torch's distributed checkpoint of model, optimizer and schedule, and each rank's
random state.

    .metadata, __<rank>_<n>.distcp    torch's distributed checkpoint
    rng_rank_<rank>.json              Python, numpy, torch and GPU generators of one rank

Names are AutoModel's, and the metadata describes whole tensors however they are sharded: a checkpoint can be read at
any number of ranks.
"""

from __future__ import annotations

import json
import logging
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.file_digest import sha256_of
from nemo_rl_dsv4.utils.random_state import restore_rng_state, rng_state, seed_all

log = logging.getLogger(__name__)
# One process needs no group; torch says so at every save and load.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class TrainingStateWriter:
    """Writes one rank's share of training states, one after another, while the rank trains on.

    Every rank makes the same calls in the same order. Ranks meet in a process group of the writer's own, so that its
    collectives never mix with those of training.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._group: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._rank = dist.get_rank()
            self._group = dist.new_group(backend="gloo")
            # A group's first collective enters torch's flight recorder without a lock: not from the writer's thread.
            dist.barrier(group=self._group)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training-state")
        self._pending: Future[dict[str, str]] | None = None

    def start(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, folder: str
    ) -> None:
        """Copy the state to host memory and begin to write it into `folder`; the state may change after this returns.

        A state that is still being written is waited for first.

        Raises:
            UserError: the state before this one could not be written.
        """
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.wait()
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        state = DefaultStager(options).stage(_training_state(model, optimizer, scheduler))
        self._pending = self._thread.submit(self._write, state, json.dumps(rng_state()), Path(folder))

    def done(self) -> bool:
        """Whether nothing is being written."""
        return self._pending is None or self._pending.done()

    def wait(self) -> dict[str, str]:
        """Wait until this rank's files are complete on the disk.

        Returns:
            SHA-256 of each file that this rank wrote, by name; empty if there was nothing to wait for.

        Raises:
            UserError: they could not be written.
        """
        pending, self._pending = self._pending, None
        return {} if pending is None else pending.result()

    def _write(self, state: Any, random_state: str, folder: Path) -> dict[str, str]:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        try:
            save(state, checkpoint_id=folder, process_group=self._group)
            name = rng_file(self._rank)
            (folder / name).write_text(random_state, encoding="utf-8")
            own = [
                *folder.glob(f"__{self._rank}_*"),
                folder / name,
                *([folder / ".metadata"] if not self._rank else []),
            ]
            return {path.name: sha256_of(path) for path in own}
        except (CheckpointException, RuntimeError, OSError) as error:
            raise UserError(
                f"cannot write the training state to {folder}: {_reason(error)}; free space or change "
                "checkpointing.checkpoint_dir (earlier checkpoints are untouched)"
            ) from error


def rng_file(rank: int) -> str:
    """Name of the file with a rank's random state."""
    return f"rng_rank_{rank}.json"


def load_training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, folder: str
) -> None:
    """Restore what `save_training_state` wrote, at the same or another parallel size. Collective.

    Weights, moments and schedule are the same at any size. Random state is a rank's own: see `restore_random_state`.
    Rounded weights that the model keeps are the caller's to invalidate.

    Raises:
        UserError: the folder is missing, damaged, or of another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if not (Path(folder) / ".metadata").is_file():
        raise UserError(f"{folder} holds no training checkpoint (no .metadata file)")
    before, rates = dict(optimizer.state), [group["lr"] for group in optimizer.param_groups]
    optimizer.state.clear()  # torch then makes one for every parameter, not only for those that have been used here
    try:
        state = _training_state(model, optimizer, scheduler)
        unused = _without_absent_moments(state["optimizer"]["state"], folder)
        load(state, checkpoint_id=folder)
    except (CheckpointException, RuntimeError, KeyError, EOFError, OSError) as error:
        optimizer.state.clear()
        optimizer.state.update(before)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate  # torch makes a state by a step of rate 0, which may have been what failed
        raise UserError(f"{folder} cannot be restored into this model: {_reason(error)}") from error
    state["optimizer"]["state"].update(unused)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, parameter in model.named_parameters():
        if name.replace("_checkpoint_wrapped_module.", "") in unused:
            optimizer.state.pop(parameter, None)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    restore_random_state(Path(folder), dist.get_rank() if dist.is_initialized() else 0)


def restore_random_state(folder: Path, rank: int) -> None:
    """Put this rank's generators back to where the rank of the same number saved them.

    A rank that the saved run did not have is seeded from rank 0's saved state and its own number, so that its draws are
    reproducible and differ from every other rank's. Nothing in the GRPO step draws from these generators (sampling is
    seeded by `grpo.seed` and the step), so results do not depend on them.

    Raises:
        UserError: a file is damaged.
    """
    own, first = folder / rng_file(rank), folder / rng_file(0)
    if not first.is_file():
        log.warning("%s holds no random state (%s); generators stay as they are", folder, first.name)
        return
    try:
        if not own.is_file():
            seed_all(first.read_text(encoding="utf-8"), rank)
            return
        state = json.loads(own.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{own} cannot be read ({error}); resume from another checkpoint") from error
    restore_rng_state(state, str(own))


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    return state


def _without_absent_moments(moments: dict[str, Any], folder: str) -> dict[str, Any]:
    """Take out, and return, the optimizer entries of parameters that had none when the checkpoint was written.

    A parameter that no batch has used yet, such as the ratio-128 compressor while all sequences are short, has no
    moments; torch makes empty ones for every parameter before it loads, and would miss them in the checkpoint.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    written = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in saved if key.startswith("optimizer.")}
    return {name: moments.pop(name) for name in list(moments) if name not in written}
