"""Send a checkpoint's own bytes for weights that training has not changed.

Values alone do not determine bytes: a block whose largest code is half of the format's maximum or less has the same
values under a scale half as large. Quantizing dequantized weights anew then keeps every value and halves that block's
scale once. A checkpoint's scales, kept beside the weights (one byte for 16,384 of them), remove the freedom: a block
that its source scale represents exactly is sent with that scale, and a code is unique once the scale is known. A block
that training changed is no longer exact under it and gets the profile's own scale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
import torch.nn.functional as F

from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint
from nemo_rl_dsv4.model.safetensors_file import ShardReader
from nemo_rl_dsv4.model.stored_weight import decode_scale, scale_grid, scale_name
from nemo_rl_dsv4.numerics import Quantized, QuantSpec
from nemo_rl_dsv4.numerics.formats import decode, encode, is_power_of_two, pack_e2m1, unpack_e2m1


class SourceScales(Mapping[str, torch.Tensor]):
    """Scales of a checkpoint's quantized weights: official weight name -> raw grid [ceil(out/rows), ceil(in/cols)].

    Args:
        scales: (weight name, scale) as stored: float32, bfloat16 or E8M0 bytes.

    Raises:
        UserError: a scale that is not a finite positive number.
    """

    def __init__(self, scales: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._scales = {}
        self.stacks: dict[Hashable, torch.Tensor] = {}
        """Of experts together, on the device that quantizes them; whoever puts one together leaves it here."""
        for name, scale in scales:
            decode_scale(scale, name=scale_name(name), power_of_two=False)
            self._scales[name] = scale.detach().cpu()

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: CheckedCheckpoint,
        spec_of: Callable[[str], QuantSpec | None],
        keep: Callable[[str], bool] = lambda _: True,
    ) -> SourceScales:
        """Read the scales that an export can use, and no others.

        Args:
            checkpoint: what `check_checkpoint` found.
            spec_of: how the export quantizes a weight (`Encoder.spec`). A scale of another grid is never a source of
                its blocks: FP4 scales, 512 times as many as FP8 has, are left out where experts leave as FP8.
            keep: whether this rank exports a weight.
        """
        with ShardReader() as reader:
            return cls(
                (name, reader.read(scale))
                for name, scale in checkpoint.scales.items()
                if name in checkpoint.shapes and keep(name)
                if (spec := spec_of(name)) is not None
                and scale.shape == scale_grid(checkpoint.shapes[name], spec.block)
            )

    @property
    def bytes(self) -> int:
        """Memory of the scales as stored."""
        return sum(scale.nbytes for scale in self._scales.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        """Float32 grid of a weight."""
        return decode_scale(self._scales[name], name=scale_name(name), power_of_two=False)

    def __contains__(self, name: object) -> bool:
        return name in self._scales

    def __iter__(self):
        return iter(self._scales)

    def __len__(self) -> int:
        return len(self._scales)


def keep_source_scale(quantized: Quantized, value: torch.Tensor, source: torch.Tensor) -> Quantized:
    """Return `quantized` with every block that `source` represents exactly re-expressed under its source scale.

    Args:
        quantized: codes and scales of `value` under the profile's own rule.
        value: [out, in], float32, bfloat16 or float16.
        source: float32 [ceil(out/rows), ceil(in/cols)], or another grid, which is then no source of these blocks.

    Returns:
        Codes and scales with the same values. Only blocks whose two scales differ are looked at.
    """
    spec = quantized.spec
    source = source.to(quantized.scale.device)
    if source.shape != quantized.scale.shape:
        return quantized
    candidates = source != quantized.scale
    if spec.scale == "ue8m0":
        candidates &= is_power_of_two(source)
    if not bool(candidates.any()):
        return quantized
    grid = quantized.scale.shape
    codes = unpack_e2m1(quantized.data) if spec.fmt == "e2m1" else quantized.data.view(torch.uint8)
    shape = codes.shape
    values_KRC = _blocks(value, grid, spec.block)[candidates].float()
    scale_K11 = source[candidates][:, None, None]
    codes_KRC = encode((values_KRC / scale_K11).clamp(-spec.max_value, spec.max_value), spec.fmt)
    again_KRC = (decode(codes_KRC, spec.fmt) * scale_K11).to(value.dtype).float()
    exact_K = (again_KRC == values_KRC).flatten(1).all(1)
    chosen = candidates.clone()
    chosen[candidates] = exact_K
    if not bool(chosen.any()):
        return quantized
    code_blocks = _blocks(codes, grid, spec.block).clone()
    code_blocks[chosen] = codes_KRC[exact_K]
    codes = _unblock(code_blocks, shape)
    data = pack_e2m1(codes) if spec.fmt == "e2m1" else codes.view(quantized.data.dtype)
    return Quantized(data, torch.where(chosen, source, quantized.scale), spec, quantized.shape, quantized.kept)


def _blocks(matrix: torch.Tensor, grid: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """[out, in] as [grid rows, grid cols, block rows, block cols]; short last blocks are filled with zeros."""
    rows, cols = grid[0] * block[0], grid[1] * block[1]
    if matrix.shape != (rows, cols):
        matrix = F.pad(matrix, (0, cols - matrix.shape[1], 0, rows - matrix.shape[0]))
    return matrix.unflatten(0, (grid[0], block[0])).unflatten(2, (grid[1], block[1])).transpose(1, 2)


def _unblock(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    whole = blocks.transpose(1, 2).flatten(2).flatten(0, 1)
    return whole[: shape[0], : shape[1]].contiguous()
