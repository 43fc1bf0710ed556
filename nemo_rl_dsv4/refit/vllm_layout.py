"""Where vLLM keeps the official DeepSeek-V4 tensors, and what its kernels read there.

Names as in `vllm/models/deepseek_v4/nvidia/model.py` of 0.25 to 0.33: `layers.` becomes `model.layers.`, wq_a and wkv
are rows of one weight, and so are a compressor's wkv and wgate and a shared expert's w1 and w3; routed experts are
slices of `w13_weight` and `w2_weight`. Scales are `weight_scale_inv`: float32 for 128x128 blocks on Hopper, on
Blackwell int32 with four exponents a word for each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.numerics.packing import unpack_ue8m0

_BLOCK = 128
_FUSED = (
    # official leaf, vLLM leaf, its partner before it in the fused weight
    ("attn.wq_a", "attn.fused_wqa_wkv", None),
    ("attn.wkv", "attn.fused_wqa_wkv", "attn.wq_a"),
    ("compressor.wkv", "compressor.fused_wkv_wgate", None),
    ("compressor.wgate", "compressor.fused_wkv_wgate", "compressor.wkv"),
    ("shared_experts.w1", "shared_experts.gate_up_proj", None),
    ("shared_experts.w3", "shared_experts.gate_up_proj", "shared_experts.w1"),
)
_RENAMED = (("shared_experts.w2", "shared_experts.down_proj"), ("ffn.gate.bias", "ffn.gate.e_score_correction_bias"))
_EXPERT = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}


@dataclass(frozen=True)
class Place:
    """A parameter, and in it: the expert, or whether the second of two fused weights is meant."""

    parameter: str
    expert: int | None = None
    second: bool = False
    fused: bool = False


def place_of(name: str, parameters: Mapping[str, torch.Tensor]) -> Place:
    """Find the vLLM parameter of an official tensor.

    Raises:
        UserError: no such parameter: this vLLM names its layers otherwise.
    """
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        leaf = "w2_weight" if expert[3] == "w2" else "w13_weight"
        found = [p for p in parameters if p.startswith(f"model.{expert[1]}.") and p.endswith(f".{leaf}")]
        if len(found) != 1:
            raise UserError(f"refit: found {found or 'no parameter'} for {name!r}; wanted one ending in {leaf!r}")
        return Place(found[0], int(expert[2]), second=expert[3] == "w3", fused=expert[3] != "w2")
    target, second, fused = _TOP.get(name, f"model.{name}"), False, False
    for official, leaf, partner in _FUSED:
        if target.endswith(f"{official}.weight"):
            target, second, fused = target.replace(official, leaf), partner is not None, True
            break
    for official, leaf in _RENAMED:
        target = target.replace(official, leaf)
    if target not in parameters:
        raise UserError(f"refit: this vLLM has no parameter {target!r} for {name!r}; its layer names have changed")
    return Place(target, second=second, fused=fused)


@dataclass(frozen=True)
class Memory:
    """Where one official tensor lies: views of what the kernels read, and which part of the whole each of them is.

    Attributes:
        weight: codes, or plain values, in the engine's dtype.
        part: of the official tensor.
        scale: of quantized weights, in the engine's form.
        scale_part: of the official grid.
    """

    weight: torch.Tensor
    part: tuple[slice, ...]
    scale: torch.Tensor | None = None
    scale_part: tuple[slice, ...] = ()


class VllmLayout:
    """Reads official tensors back out of a vLLM model, and says where they lie.

    Args:
        model: its `DeepseekV4ForCausalLM`.
        expected: official name -> unquantized shape.
        tensor_rank: this worker's tensor-parallel rank.
        tensor_size: number of tensor-parallel ranks.
        expert_rank: this worker's expert-parallel rank, or None without expert parallelism.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        expected: Mapping[str, tuple[int, ...]],
        tensor_rank: int = 0,
        tensor_size: int = 1,
        expert_rank: int | None = None,
    ) -> None:
        self._model, self._expected = model, dict(expected)
        self._rank, self._size, self._expert_rank = tensor_rank, tensor_size, expert_rank
        self._live: dict[str, torch.Tensor] | None = None
        self._stacks: dict[tuple[str, str], str] = {}

    def forget(self) -> None:
        """Look parameters up anew: a loader may have registered other objects."""
        self._live = None

    def read_back(self, name: str) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
        """Values of one official tensor as the kernels see them, and the part of it this worker holds.

        float32 for quantized weights, else the parameter's own dtype. None for an expert of another worker.
        """
        held = self._held(name)
        if held is None:
            return None
        place, weight, scale = held
        if weight.dim() == 3:  # wo_a as a batch of matrices, one a group
            if scale is not None:
                scale = kernel_scale(scale, (weight.shape[1], weight.shape[2])).flatten(0, 1)
            weight = weight.flatten(0, 1)
        values = weight if scale is None else dequantize_blocks(weight, scale)
        return _own_part(self._of_fused(values, name, place), self._expected[name], self._rank)

    def memory(self, name: str) -> Memory | None:
        """Views of the memory of one official tensor and its scale. None for an expert of another worker.

        Raises:
            UserError: its scales are packed, or its matrices are no views of one.
        """
        held = self._held(name)
        if held is None:
            return None
        place, weight, scale = held
        if scale is not None and scale.dtype == torch.int32:
            raise UserError(f"the scales of {name} are packed into words")
        if not weight.is_contiguous() or (scale is not None and weight.dim() == 3 and not scale.is_contiguous()):
            raise UserError(f"{name} is not contiguous")
        if weight.dim() == 3:
            weight, scale = weight.flatten(0, 1), None if scale is None else scale.flatten(0, 1)
        shape = self._expected[name]
        weight, part = _own_part(self._of_fused(weight, name, place), shape, self._rank)
        if scale is None:
            return Memory(weight, part)
        grid = tuple(-(-size // _BLOCK) for size in shape)
        return Memory(weight, part, *_own_part(self._of_fused(scale, name, place, _BLOCK), grid, self._rank))

    def _held(self, name: str) -> tuple[Place, torch.Tensor, torch.Tensor | None] | None:
        """Place, parameter and scale parameter of an official tensor; of a stack, its expert."""
        if self._live is None:
            self._live = dict(self._model.named_parameters())
        parameters, place = self._live, self._place(name)
        weight = parameters[place.parameter].data
        scale_name = _scale_of(place.parameter)
        scale = parameters[scale_name].data if scale_name in parameters else None
        if place.expert is None:
            return place, weight, scale
        local = place.expert
        if self._expert_rank is not None:
            local -= self._expert_rank * weight.shape[0]
        if not 0 <= local < weight.shape[0]:
            return None
        return place, weight[local], None if scale is None else scale[local]

    def _place(self, name: str) -> Place:
        """`place_of`, which searches all parameters for the stack of an expert: here once a layer."""
        assert self._live is not None
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            return place_of(name, self._live)
        key = (expert[1], "w2" if expert[3] == "w2" else "w13")
        if key not in self._stacks:
            self._stacks[key] = place_of(name, self._live).parameter
        return Place(self._stacks[key], int(expert[2]), second=expert[3] == "w3", fused=expert[3] != "w2")

    def _of_fused(self, values: torch.Tensor, name: str, place: Place, block: int = 1) -> torch.Tensor:
        """One of two weights in a fused one (or of their scales, a block of rows each), without a sink's padding.

        Replicated pairs keep their sizes, tensor-parallel ones are halves.
        """
        if name.endswith("attn_sink"):  # padded to the kernel's tile: the size does not tell a rank's heads
            return values[: self._expected[name][0] // self._size]
        if not place.fused:
            return values
        rows = -(-self._expected[name][0] // block)
        if place.expert is None and "shared_experts" not in name:
            return values[values.shape[0] - rows :] if place.second else values[:rows]
        half = values.shape[0] // 2
        return values[half:] if place.second else values[:half]

    def scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter name, float32 values) of every weight scale."""
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            if not name.endswith(("weight_scale_inv", "weight_scale")):
                continue
            weight = parameters[name.removesuffix("_inv").removesuffix("_scale")]
            yield name, kernel_scale(parameter.data, (weight.shape[-2], weight.shape[-1]))


def kernel_scale(scale: torch.Tensor, matrix: tuple[int, int]) -> torch.Tensor:
    """Float32 scales [..., ceil(rows/128) or rows, ceil(cols/128)] of a kernel's scale for a [rows, cols] matrix.

    int32 holds four exponents a word, for each row (Blackwell); everything else is read as numbers or E8M0 bytes.
    """
    if scale.dtype == torch.int32:
        return unpack_ue8m0(scale, -(-matrix[1] // _BLOCK))
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        from nemo_rl_dsv4.numerics.formats import e8m0_bytes_to_scale

        return e8m0_bytes_to_scale(scale)
    return scale.float()


def _scale_of(parameter: str) -> str:
    return f"{parameter}_scale_inv"


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What FP8 codes [rows, cols] and a kernel's scale (see `kernel_scale`) stand for, float32."""
    rows, cols = weight.shape
    grid = kernel_scale(scale, (rows, cols))
    row_block = 1 if grid.shape[0] == rows and rows > 1 else _BLOCK
    spread = grid.repeat_interleave(row_block, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :cols]
    return weight.float() * spread


def _own_part(values: torch.Tensor, shape: tuple[int, ...], rank: int) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Cut padding off, and say which part of the whole this tensor-parallel rank holds."""
    part = []
    for dim, (held, whole) in enumerate(zip(values.shape, shape, strict=True)):
        if held >= whole:
            values = values.narrow(dim, 0, whole)
            part.append(slice(0, whole))
        else:
            start = rank * held
            stop = min(start + held, whole)
            values = values.narrow(dim, 0, max(stop - start, 0))
            part.append(slice(start, stop))
    return values, tuple(part)
