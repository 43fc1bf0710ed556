"""A stack of expert matrices on its way into a bucket: values to quantize, or codes that training already has.

The blocks of a stack are those of its matrices: rows and columns are whole blocks, and experts never share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, dequantize, quantize
from nemo_rl_dsv4.numerics.formats import is_power_of_two
from nemo_rl_dsv4.refit.source_scales import SourceScales, keep_source_scale

_SMALLEST_SOURCE = 2.0**-117
"""Under a smaller scale the smallest code is a subnormal number, which kernels need not keep."""


@dataclass(frozen=True)
class ExpertStack:
    """Matrices of one shape in official orientation.

    Attributes:
        values: [E, rows, cols], any strides; of a stack with codes only its shape and device matter.
        spec: FP8 in square blocks that divide rows and columns.
        stored: codes and scales of training, [E, rows, cols] and [E, rows/block, cols/block], any strides.
        source: float32 scales of the checkpoint that the values came from, contiguous, 0 where there is none.
    """

    values: torch.Tensor
    spec: QuantSpec
    stored: StoredCodes | None = None
    source: torch.Tensor | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks along rows and columns."""
        block = self.spec.block[0]
        return self.values.shape[1] // block, self.values.shape[2] // block

    def write(self, first: int, count: int, codes: torch.Tensor, scale: torch.Tensor, damaged: torch.Tensor) -> None:
        """Write codes and scales of `count` matrices from `first`.

        Args:
            codes: uint8 [count, rows, cols], contiguous.
            scale: float32 [count, rows/block, cols/block], contiguous.
            damaged: int32 [1], set to 1 where an element is NaN or infinite.
        """
        some = slice(first, first + count)
        source = None if self.source is None else self.source[some]
        if self.stored is not None:
            _copy_bytes(self.stored.data[some].view(torch.uint8), codes)
            scale.copy_(self.stored.scale[some])
        elif (values := self.values[some]).is_cuda and _kernel_covers(values, self.spec, source):
            from nemo_rl_dsv4.numerics.fused.stacks import quantize_stack

            quantize_stack(values, self.spec, codes, scale, damaged, source=source)
            return
        else:
            # Square blocks are the same blocks either way round: read a transposed stack in its own order.
            turned = values.stride(-1) != 1 and values.stride(-2) == 1
            quantized = quantize(values.transpose(-1, -2) if turned else values, self.spec)
            data, own = quantized.data.view(torch.uint8), quantized.scale
            codes.copy_(data.transpose(-1, -2) if turned else data)
            scale.copy_(own.transpose(-1, -2) if turned else own)
        damaged.logical_or_(~scale.isfinite().all())
        if source is not None:
            self._keep(first, source, codes, scale)

    def _keep(self, first: int, source: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Give blocks that their source scale represents exactly that scale, in place, one matrix after the other."""
        candidates = (source > 0) & (source != scale)
        for i in candidates.flatten(1).any(1).nonzero().flatten().tolist():
            own = Quantized(codes[i].view(torch.float8_e4m3fn), scale[i], self.spec, codes[i].shape)
            values = self.values[first + i] if self.stored is None else dequantize(own, torch.float32)
            kept = keep_source_scale(own, values, torch.where(candidates[i], source[i], scale[i]))
            codes[i].copy_(kept.data.view(torch.uint8))
            scale[i].copy_(kept.scale)


def stack_of(
    names: Sequence[str],
    values: torch.Tensor,
    spec: QuantSpec,
    stored: StoredCodes | None,
    source_scales: Mapping[str, torch.Tensor],
) -> ExpertStack:
    """The stack of some official weights, one after the other along the rows of each expert.

    Args:
        names: for each expert, the weights whose rows lie one below the other: w1 and w3, or w2.
        values: [E, rows, cols].
        spec: of the profile.
        stored: the stack's own codes.
        source_scales: by official weight name. Other grids, and scales under 2^-117, are no source of these blocks.
    """
    stack = ExpertStack(values, spec, stored)
    if not source_scales:
        return stack
    kept = source_scales.stacks if isinstance(source_scales, SourceScales) else {}
    label = (names[0], names[-1], values.device)
    if label not in kept:
        grid = (stack.grid[0] * len(values) // len(names), stack.grid[1])
        none = torch.zeros(grid)
        found = [source_scales.get(name, none) for name in names]
        found = [scale.cpu() if scale.shape == grid else none for scale in found]
        if all(scale is none for scale in found):
            return stack
        source = torch.stack(found)
        source = torch.where(is_power_of_two(source) & (source >= _SMALLEST_SOURCE), source, 0.0)
        kept[label] = source.view(len(values), *stack.grid).to(values.device)
    return replace(stack, source=kept[label])


def _kernel_covers(values: torch.Tensor, spec: QuantSpec, source: torch.Tensor | None) -> bool:
    from nemo_rl_dsv4.numerics.fused.stacks import covers, covers_source

    return covers(values, spec) and (source is None or covers_source(values, spec))


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """uint8 [matrices, rows, columns] of any strides into a contiguous tensor."""
    if source.is_cuda and source.transpose(-1, -2).is_contiguous():
        from nemo_rl_dsv4.numerics.fused.transpose import transpose_bytes

        transpose_bytes(source.transpose(-1, -2), out=target)
        return
    target.copy_(source)
