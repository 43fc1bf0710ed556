"""Read safetensors files, header checks first, then one tensor at a time; errors name the file and the tensor."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl_dsv4.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file; `begin` and `end` are byte offsets in the file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> torch.Tensor:
        """Read the tensor into memory of its own; `UserError` if the file shrank or cannot be read."""
        raw = torch.empty(self.end - self.begin, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin)
                got = file.readinto(raw.numpy().data) if len(raw) else 0
        except OSError as error:
            raise UserError(f"{self.path}: cannot read tensor {self.name!r} ({error})") from error
        if got != len(raw):
            raise UserError(f"{self.path}: tensor {self.name!r} has {got} of {len(raw)} bytes; the file is truncated")
        return raw.view(self.dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one file: every tensor's dtype, shape and place, by name.

    Raises:
        UserError: no such file, a damaged header, an unknown dtype, a size that does not follow from dtype and shape, a
            tensor beyond the end of the file (truncated), or bytes that no tensor owns.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise UserError(f"{path}: no safetensors header in its {size} bytes; the file is damaged or truncated")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: the safetensors header is not JSON ({error}); the file is damaged") from error
    if not isinstance(header, dict):
        raise UserError(f"{path}: the safetensors header is no JSON object; the file is damaged")
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.end > size:
            raise UserError(
                f"{path}: tensor {tensor.name!r} ends at byte {tensor.end} of {size}; the file is truncated, "
                "fetch it again"
            )
        if tensor.begin != position:
            raise UserError(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.begin}, wanted {position}; damaged header"
            )
        position = tensor.end
    if position != size:
        raise UserError(f"{path}: {size} bytes, but its tensors end at {position}; the file is damaged")
    return tensors


def _entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.get("dtype") not in DTYPES:
        found = entry.get("dtype") if isinstance(entry, dict) else entry
        raise UserError(f"{path}: tensor {name!r} has dtype {found!r}; wanted one of {', '.join(DTYPES)}")
    shape, offsets = _naturals(entry.get("shape")), _naturals(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise UserError(
            f"{path}: tensor {name!r} has shape {entry.get('shape')!r} and offsets {entry.get('data_offsets')!r}; "
            "damaged header"
        )
    dtype = DTYPES[entry["dtype"]]
    wanted = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != wanted:
        raise UserError(
            f"{path}: tensor {name!r} has {offsets[1] - offsets[0]} bytes; {entry['dtype']} {shape} takes {wanted}"
        )
    return StoredTensor(path, name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _naturals(values: object) -> list[int] | None:
    return values if isinstance(values, list) and all(type(v) is int and v >= 0 for v in values) else None
