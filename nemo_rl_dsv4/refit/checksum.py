"""A 64-bit checksum of a tensor's bytes that a GPU computes at memory speed, equal on every device.

For the bytes as little-endian int32 words w_0 ... w_n (zero padded): sum of w_i * (2 i + 1), in two's complement of
64 bits. Every word has an odd factor, so one changed word always changes the sum, and a swap of two words does unless
they are equal. It finds lost, zeroed, shifted and torn transfers; it is no protection against an adversary.
"""

from __future__ import annotations

import functools
import zlib

import torch

_CHUNK = 1 << 22  # words at a time: 16 MiB of input, 64 MiB of work buffers


def bytes_checksum(tensor: torch.Tensor) -> int:
    """Checksum of a tensor's bytes in row-major order, 0 <= value < 2^64."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = raw.numel() // 4 * 4
    aligned = raw.storage_offset() * raw.element_size() % 4 == 0
    words = (raw[:whole] if aligned else raw[:whole].clone()).view(torch.int32)
    factors = _factors(raw.device)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        total += (part * factors[: part.numel()]).sum() + part.sum() * (2 * start)
    if whole < raw.numel():
        tail = torch.zeros(4, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        total += tail.view(torch.int32).to(torch.int64)[0] * (whole // 2 + 1)
    return int(total) % 2**64


def item_checksum(name: str, tensor: torch.Tensor) -> int:
    """Checksum over name, dtype, shape and bytes of one tensor of a stream, 0 <= value < 2^64."""
    head = f"{name}|{tensor.dtype}|{list(tensor.shape)}".encode()
    return (bytes_checksum(tensor) * 0x9E3779B97F4A7C15 + zlib.crc32(head) * 0xC2B2AE3D27D4EB4F) % 2**64


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    return torch.arange(_CHUNK, device=device) * 2 + 1
