"""Read a checkpoint in DeepSeek's released format: official names, FP4 or FP8 experts, FP8 elsewhere, UE8M0 scales.

Opening checks every header (names, dtypes, shapes, scale grids, file lengths) before any weight is read; reading checks
every value (scales, codes, NaN, tables). A checkpoint that opens and reads is complete and means what it says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.checkpoint.classes import MTP, UNSCALED_FP8
from nemo_rl_dsv4.model.checkpoint.values import decode_tensor
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Layout
from nemo_rl_dsv4.model.release_writer import write_release_checkpoint
from nemo_rl_dsv4.model.safetensors_file import ShardReader

__all__ = ["ReleaseCheckpoint", "read_release_checkpoint", "write_release_checkpoint"]


class ReleaseCheckpoint:
    """A checked folder: `config`, and tensors by official name, one at a time.

    Attributes:
        config: its `config.json` with the overrides applied.
        mtp: what the dropped `mtp.` tensors were: "none", "next_token" or "drafter".
        dropped: number of `mtp.` tensors, which the policy does not train.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config_overrides: Mapping[str, Any] | None = None,
        unscaled_fp8: Collection[str] = (),
    ) -> None:
        """Open `directory` and check all headers.

        Args:
            directory: folder with config.json and model.safetensors, or shards and their index.
            config_overrides: keys that replace those of config.json (a recipe's `hf_config_overrides`).
            unscaled_fp8: official names of FP8 weights that may lack a scale and then count as scale 1.

        Raises:
            UserError: any damage, naming file and tensor.
        """
        self.directory = Path(directory)
        checked = check_checkpoint(
            self.directory, config_overrides=config_overrides, unscaled_fp8=(*UNSCALED_FP8, *unscaled_fp8)
        )
        checked.raise_if_damaged()
        assert checked.config is not None
        self.config = checked.config
        self._power_of_two, self._reader = checked.power_of_two, ShardReader()
        self.mtp, self.dropped = checked.mtp, sum(name.startswith(MTP) for name in checked.shards.tensors)
        self._experts: int = checked.config["n_routed_experts"]
        self._shapes, self._weights, self._scales = checked.shapes, checked.weights, checked.scales

    def __iter__(self) -> Iterator[str]:
        """Official names in export order, scales left out."""
        return iter(self._shapes)

    def stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a tensor as stored and, where it has one, its scale as stored."""
        scale = self._scales.get(name)
        return self._reader.read(self._weights[name]), None if scale is None else self._reader.read(scale)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype a tensor is stored in."""
        return self._weights[name].dtype

    def scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (weight name, scale as stored) of every quantized weight that has one."""
        for name, scale in self._scales.items():
            yield name, scale.read()

    def value(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Read one official tensor and decode it, see `decode`."""
        return self.decode(name, *self.stored(name), dtype)

    def decode(
        self, name: str, data: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return what `stored` gave as values: tables int64, FP32-class tensors float32, the rest `dtype`.

        Raises:
            UserError: an invalid scale, a NaN or infinite element, an id that is no expert.
        """
        return decode_tensor(
            self._weights[name], data, scale, dtype, power_of_two=self._power_of_two, experts=self._experts
        )


def read_release_checkpoint(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    config_overrides: Mapping[str, Any] | None = None,
    layout: Layout = AUTOMODEL,
) -> dict[str, torch.Tensor]:
    """Read a whole checkpoint into a state dict under a model's names, experts stacked.

    FP8 and FP4 weights are dequantized, exactly for float32 and bfloat16. Needs memory for the result and one tensor.

    Args:
        directory: the checkpoint folder.
        dtype: dtype of all tensors but the FP32 ones of a release (which stay float32) and tables (int64).
        config_overrides: keys that replace those of config.json.
        layout: whose names to use.

    Returns:
        {key: tensor}, complete for `DeepseekV4ForCausalLM.load_state_dict(..., strict=True)`.

    Raises:
        UserError: any damage, naming file and tensor.
    """
    checkpoint = ReleaseCheckpoint(directory, config_overrides=config_overrides)
    experts = checkpoint.config["n_routed_experts"]
    state: dict[str, torch.Tensor] = {}
    for name in checkpoint:
        value, slot = checkpoint.value(name, dtype), layout.slot(name)
        if slot.expert is None:
            state[slot.key] = value
            continue
        if slot.key not in state:
            state[slot.key] = torch.empty(layout.stack_shape(value.shape, slot, experts), dtype=dtype)
        layout.view(state[slot.key], slot).copy_(value)
    return state
