"""Collect one refit completely before an engine is touched: a broken transfer leaves it on its old version.

Staged tensors rest in host memory by default: one copy of the FP8 weights a host process, pinned where there is a GPU.
An engine that reloads layer by layer then needs one layer's part of GPU memory beyond the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import check_names, export_order, tensor_kind
from nemo_rl_dsv4.model.stored_weight import (
    FP4_SPEC,
    FP8_SPEC,
    decode_scale,
    is_quantized,
    scale_grid,
    scale_name,
)
from nemo_rl_dsv4.refit.manifest import Manifest, check_bucket
from nemo_rl_dsv4.refit.placement import views
from nemo_rl_dsv4.refit.report import combine_checksums

_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
"""Loaders cast a scale to their own dtype: these two keep their value, a byte under uint8 becomes a number (120.0)."""


class StagedWeights:
    """Weights of one policy version, complete or not.

    Args:
        expected: official name -> unquantized shape of every tensor (`expected_tensors(config)`).
        device: where staged tensors rest.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], device: torch.device | str = "cpu") -> None:
        self._expected = dict(expected)
        self._device = torch.device(device)
        self._tensors: dict[str, torch.Tensor] = {}
        self.checksums: dict[str, int] = {}
        """Checksum of each tensor that has arrived, by name; equal for equal bytes."""
        self._next_bucket, self._last = 0, False
        self._order: list[str] | None = None
        self._checked: set[bool] = set()
        self.version: int | None = None
        self.bytes = 0
        self._sum = 0

    def add(self, manifest: Manifest, buffer: torch.Tensor) -> None:
        """Check one bucket and copy it out of its buffer, which may be reused afterwards.

        Raises:
            UserError: a bucket of another version or out of order, damaged bytes, a tensor that arrived twice.
        """
        if self.version is None:
            self.version = manifest.version
        if manifest.version != self.version or manifest.index != self._next_bucket or self._last:
            state = "after the last one" if self._last else f"wanted {self._next_bucket} of version {self.version}"
            raise UserError(f"refit: received bucket {manifest.index} of version {manifest.version}; {state}")
        pin = self._device.type == "cpu" and torch.cuda.is_available()
        own = torch.empty(manifest.bytes, dtype=torch.uint8, device=self._device, pin_memory=pin)
        own.copy_(buffer[: manifest.bytes])
        # A GPU sums its memory a hundred times as fast as a CPU does.
        placed = check_bucket(manifest, buffer if buffer.is_cuda else own)
        for (name, *_), tensor in zip(placed, views(own, placed), strict=True):
            if name in self._tensors:
                raise UserError(f"refit: tensor {name!r} arrived twice; send each one once a refit")
            self._tensors[name] = tensor
        for entry in manifest.entries:
            self.bytes += entry.bytes
            self._sum = combine_checksums(self._sum, entry.checksum)
            self.checksums[entry.name] = entry.checksum
        self._next_bucket += 1
        self._last = manifest.last
        self._order, self._checked = None, set()

    @property
    def checksum(self) -> str:
        """What `StreamTally` computes over the same tensors."""
        return f"{self._sum:016x}"

    def check_complete(self, *, power_of_two: bool = True) -> None:
        """Compare with what the model needs: every tensor once, its shape, its scale's grid, dtype and values.

        A set that has passed is not compared again.

        Args:
            power_of_two: scales must be powers of two.

        Raises:
            UserError: the last bucket is missing, a tensor is missing, unknown or of another shape, or a scale is
                neither float32 nor float8_e8m0fnu, or holds a value that is no scale.
        """
        if power_of_two in self._checked or True in self._checked:
            return
        if not self._last:
            raise UserError(f"refit: the transfer ended after {self._next_bucket} buckets, before the last one")
        scales = {name for name in self._tensors if name.endswith(".scale")}
        check_names(set(self._tensors) - scales, self._expected, "refit")
        for name, tensor in self.weights():
            wanted = self._expected[name]
            packed = tensor.dtype in (torch.int8, torch.uint8) and tensor_kind(name) != "integer"
            shape = (wanted[0], wanted[1] // 2) if packed else wanted
            if tuple(tensor.shape) != tuple(shape):
                raise UserError(f"refit: {name!r} is {list(tensor.shape)}; the model wants {list(shape)}")
            if not is_quantized(tensor.dtype) or tensor_kind(name) == "integer":
                continue
            if scale_name(name) not in scales:
                raise UserError(f"refit: {name!r} is {tensor.dtype} and came without its scale")
            scales.discard(scale_name(name))
            grid = scale_grid(wanted, (FP4_SPEC if packed else FP8_SPEC).block)
            found = tuple(self._tensors[scale_name(name)].shape)
            if found != grid:
                raise UserError(f"refit: {scale_name(name)!r} is {list(found)}; wanted the raw grid {list(grid)}")
        if scales:
            raise UserError(f"refit: scale {min(scales)!r} belongs to no quantized weight")
        self._check_scales(power_of_two)
        self._checked.add(power_of_two)

    def _check_scales(self, power_of_two: bool) -> None:
        scales = {name: tensor for name, tensor in self._tensors.items() if name.endswith(".scale")}
        for name, scale in scales.items():
            if scale.dtype not in _SCALE_DTYPES:
                raise UserError(
                    f"refit: {name!r} is {scale.dtype}; wanted one float32 or float8_e8m0fnu value a block, not an "
                    "engine's packed words or bytes without a type: export with scale_dtype float32"
                )
        for dtype in _SCALE_DTYPES:
            group = [name for name in scales if scales[name].dtype == dtype]
            if not group:
                continue
            # All at once: a large model has tens of thousands of small scales. Only a bad set is searched for its name.
            together = torch.cat([scales[name].reshape(-1).view(torch.uint8) for name in group]).view(dtype)
            try:
                decode_scale(together, name="scales", power_of_two=power_of_two)
            except UserError:
                for name in group:
                    decode_scale(scales[name], name=f"refit: {name}", power_of_two=power_of_two)
                raise

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor but the scales, in export order."""
        if self._order is None:
            self._order = sorted((n for n in self._tensors if not n.endswith(".scale")), key=export_order)
        for name in self._order:
            yield name, self._tensors[name]

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield everything as the exporter did: a quantized weight, then its scale."""
        for name, tensor in self.weights():
            yield name, tensor
            scale = self._tensors.get(scale_name(name))
            if scale is not None and name.endswith(".weight"):
                yield scale_name(name), scale

    def pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a staged tensor and its scale, if it has one."""
        return self._tensors[name], self._tensors.get(scale_name(name))
