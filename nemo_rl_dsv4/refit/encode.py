"""How one official tensor becomes what a checkpoint stores: codes and scale, or plain values of its dtype class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.model.stored_weight import require_finite, require_table, scale_grid, scale_name
from nemo_rl_dsv4.model.weight_rounding import checkpoint_spec
from nemo_rl_dsv4.numerics import Quantized, QuantSpec, RolloutProfile, dequantize, quantize, scale_to_e8m0_bytes
from nemo_rl_dsv4.numerics.formats import format_of
from nemo_rl_dsv4.refit.source_scales import keep_source_scale

SCALE_DTYPES = (torch.float32, torch.uint8, torch.float8_e8m0fnu)


class Encoded(NamedTuple):
    """Codes and float32 scale of a quantized weight, or a plain tensor and None."""

    data: torch.Tensor
    scale: torch.Tensor | None


@dataclass(frozen=True)
class Encoder:
    """Turns values [out, in] under official names into stored tensors.

    Attributes:
        profile: decides format, block and scale rule of `linear.weight` and `expert.weight`.
        unquantized: dtype of what a release stores in BF16, and of weights the profile does not quantize.
        scale_dtype: float32, uint8 or float8_e8m0fnu.
        source_scales: scales of the checkpoint that the weights came from, by official weight name.
        stored: codes and scales that training already has, by official weight name.
    """

    profile: RolloutProfile
    unquantized: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float32
    source_scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stored: Mapping[str, StoredCodes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scale_dtype not in SCALE_DTYPES:
            raise UserError(f"scale_dtype is {self.scale_dtype}; wanted one of {', '.join(map(str, SCALE_DTYPES))}")

    def spec(self, name: str) -> QuantSpec | None:
        """How the weight of this official name is quantized, None where it is not.

        Raises:
            UserError: not an official name; a fnuz profile whose maximum has no e4m3fn twin.
        """
        kind = tensor_kind(name)
        spec = None if kind in ("bf16", "fp32", "integer") else self.profile.site(kind)
        return None if spec is None else checkpoint_spec(spec, self.profile.name)

    def encode(self, name: str, value: torch.Tensor, part: tuple[slice, slice] | None = None) -> Encoded:
        """Encode a tensor, or a part of it that cuts no block.

        A non-finite element is not an error yet: its block's scale is NaN. `check` finds it, after the parts of all
        ranks have been put together, so that every rank raises.

        Args:
            name: official name.
            value: the tensor, any strides.
            part: rows and columns of the scale grid that `value` covers; None for all.
        """
        value, kind, spec = value.detach(), tensor_kind(name), self.spec(name)
        if spec is None:
            dtype = {"integer": torch.int64, "fp32": torch.float32}.get(kind, self.unquantized)
            return Encoded(value.to(dtype).contiguous(), None)
        if name in self.stored:
            return self._of_training(name, spec, part)
        # FP4 has no NaN code and refuses such values; a NaN scale carries the news instead.
        damaged = spec.fmt == "e2m1" and not bool(value.isfinite().all())
        quantized = quantize(value.nan_to_num() if damaged else value, spec, name=name)
        if name in self.source_scales and not damaged:
            source = self.source_scales[name]
            quantized = keep_source_scale(quantized, value, source if part is None else source[part])
        data = quantized.data.view(torch.int8) if spec.fmt == "e2m1" else quantized.data
        return Encoded(data, quantized.scale.fill_(torch.nan) if damaged else quantized.scale)

    def _of_training(self, name: str, spec: QuantSpec, part: tuple[slice, slice] | None) -> Encoded:
        data, scale, found = self.stored[name]
        if found != spec:
            raise UserError(
                f"{name}: training quantized it as {found}; profile {self.profile.name} wants {spec}; "
                "export with the profile of the training run"
            )
        if part is not None:
            blocks = zip(part, spec.block, scale.shape, strict=True)
            data = data[tuple(_elements(blocks_of_dim, block, count) for blocks_of_dim, block, count in blocks)]
            scale = scale[part]
        # Flattened for strides that a byte view takes: a dim of size 1 may keep any stride otherwise.
        data, scale = (tensor.contiguous().flatten().view(tensor.shape) for tensor in (data, scale.clone()))
        if name in self.source_scales:
            source = self.source_scales[name].to(scale.device)
            source = source if part is None else source[part]
            if not torch.equal(source, scale):
                same = Quantized(data, scale, spec, data.shape)
                same = keep_source_scale(same, dequantize(same, torch.float32), source)
                data, scale = same.data, same.scale
        return Encoded(data, scale)

    def encode_stack(self, names: Sequence[str], values: torch.Tensor) -> list[Encoded]:
        """Encode tensors of one shape at once: [number, out, in], any strides. Scales are checked together.

        Raises:
            UserError: a non-finite element.
        """
        spec = self.spec(names[0])
        if spec is None or not all(self.checks_stack(name) for name in names):
            return [self.encode(name, value) for name, value in zip(names, values, strict=True)]
        # Square blocks are the same blocks either way round: read a transposed stack in its own order, turn the codes.
        turned = values.stride(-1) != 1 and values.stride(-2) == 1 and spec.block[0] == spec.block[1]
        quantized = quantize(values.detach().transpose(-1, -2) if turned else values.detach(), spec, name=names[0])
        data, scale = quantized.data, quantized.scale
        if turned:
            data, scale = transpose_codes(data), _copied(scale.transpose(-1, -2))
        if not bool(scale.isfinite().all()):
            for name, value in zip(names, values, strict=True):
                require_finite(name, value)
        encoded = [Encoded(*pair) for pair in zip(data, scale, strict=True)]
        if any(name in self.source_scales for name in names):
            for i, (name, value) in enumerate(zip(names, values, strict=True)):
                if name in self.source_scales:
                    q = Quantized(*encoded[i], spec, value.shape)  # type: ignore[arg-type]
                    q = keep_source_scale(q, value, self.source_scales[name])
                    encoded[i] = Encoded(q.data, q.scale)
        return encoded

    def has_whole(self, name: str, keys: Iterable[str], spec: QuantSpec) -> bool:
        """Whether the stacks at some state-dict keys, `name` in one of them, have codes as a whole, or none at all."""
        found = [self.stored.get(key) for key in keys]
        if name not in self.stored:
            return not any(found)
        return all(codes is not None and codes.spec == spec for codes in found)

    def checks_stack(self, name: str) -> bool:
        """Whether `encode_stack` has looked at this weight's scale: FP8 codes that were made there."""
        spec = self.spec(name)
        return spec is not None and spec.fmt != "e2m1" and name not in self.stored

    def empty(self, name: str, shape: torch.Size, device: torch.device) -> Encoded:
        """Uninitialized tensors of the shapes and dtypes that `encode` gives for a value [out, in] of `shape`."""
        spec, kind = self.spec(name), tensor_kind(name)
        if spec is None:
            dtype = {"integer": torch.int64, "fp32": torch.float32}.get(kind, self.unquantized)
            return Encoded(torch.empty(shape, dtype=dtype, device=device), None)
        codes = (shape[0], shape[1] // 2) if spec.fmt == "e2m1" else shape
        dtype = torch.int8 if spec.fmt == "e2m1" else format_of(spec.fmt).dtype
        scale = torch.empty(scale_grid(shape, spec.block), dtype=torch.float32, device=device)
        return Encoded(torch.empty(codes, dtype=dtype, device=device), scale)

    def items(
        self, name: str, encoded: Encoded, value: torch.Tensor | None = None, *, checked: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Check a whole encoded tensor and yield what a stream carries: one item, or codes and scale.

        Args:
            value: where at hand, the values, so that a NaN can be named by its index.
            checked: the scale is known to be finite.

        Raises:
            UserError: a non-finite element, an all-zero hash table, a scale that `scale_dtype` cannot hold.
        """
        data, scale = encoded
        if scale is None:
            if data.is_floating_point():
                require_finite(name, data if value is None else value)
            else:
                require_table(name, data)
            yield name, data
            return
        if not checked and not bool(scale.isfinite().all()):
            if value is not None:
                require_finite(name, value)
            row, col = (~scale.isfinite()).nonzero()[0].tolist()
            raise UserError(f"{name}: block [{row}, {col}] holds a NaN or infinite value; find what produced it")
        yield name, data
        if self.scale_dtype != torch.float32:
            scale = scale_to_e8m0_bytes(scale, name=scale_name(name)).view(self.scale_dtype)
        yield scale_name(name), scale


def _elements(blocks: slice, size: int, count: int) -> slice:
    """Slice of the elements of a slice of `count` blocks along a dim; the last may be short."""
    start, stop, _ = blocks.indices(count)
    return slice(start * size, None if stop == count else stop * size)


def transpose_codes(codes: torch.Tensor) -> torch.Tensor:
    """FP8 codes [matrices, rows, columns] as [matrices, columns, rows], contiguous."""
    raw = codes.view(torch.uint8)
    if raw.is_cuda and raw.numel():
        from nemo_rl_dsv4.numerics.fused.transpose import transpose_bytes

        return transpose_bytes(raw).view(codes.dtype)
    return _copied(raw.transpose(-1, -2)).view(codes.dtype)


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Row-major copy. `contiguous()` leaves odd strides on dims of size 1, which views as bytes refuse."""
    return x.new_empty(x.shape).copy_(x)
