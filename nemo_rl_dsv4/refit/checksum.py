"""A 64-bit checksum of a tensor's bytes that a GPU computes at memory speed, equal on every device.

For the bytes as little-endian int32 words w_0 ... w_n (zero padded): sum of w_i * (2 i + 1), in two's complement of
64 bits. Every word has an odd factor, so one changed word always changes the sum, and a swap of two words does unless
they are equal. It finds lost, zeroed, shifted and torn transfers; it is no protection against an adversary.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence

import torch

_CHUNK = 1 << 22  # words at a time: 16 MiB of input, 64 MiB of work buffers


def bytes_checksum(tensor: torch.Tensor) -> int:
    """Checksum of a tensor's bytes in row-major order, 0 <= value < 2^64."""
    return int(_device_checksum(tensor)) % 2**64


def item_checksums(items: Iterable[tuple[str, torch.Tensor]]) -> list[int]:
    """Checksums over name, dtype, shape and bytes of each tensor, 0 <= value < 2^64, with one wait for a GPU."""
    pairs = list(items)
    if not pairs:
        return []
    sums = torch.stack([_device_checksum(tensor) for _, tensor in pairs]).tolist()
    return [with_head(head_of(n, t.dtype, tuple(t.shape)), v) for (n, t), v in zip(pairs, sums, strict=True)]


def start_range_checksums(buffer: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """`bytes_checksum` of byte ranges of a buffer, in one pass: int64 [ranges], modulo 2^64, not waited for.

    Args:
        buffer: uint8 [bytes].
        ranges: (first byte, number of bytes); first bytes are multiples of 4, and bytes between the end of a range and
            the next multiple of 4 are zero.
    """
    if not ranges:
        return torch.zeros(0, dtype=torch.int64)
    if buffer.is_cuda:
        from nemo_rl_dsv4.numerics.fused.word_sums import word_sums

        words = buffer[: buffer.numel() // 4 * 4].view(torch.int32)
        return word_sums(words, [start // 4 for start, _ in ranges], [-(-size // 4) for _, size in ranges])
    return torch.stack([_device_checksum(buffer[start : start + size]) for start, size in ranges])


def item_checksum(name: str, tensor: torch.Tensor) -> int:
    """`item_checksums` of one tensor."""
    return item_checksums([(name, tensor)])[0]


@functools.lru_cache(maxsize=1 << 18)
def head_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The part of an item's checksum that its bytes do not change; kept, since a model's names stay the same."""
    return zlib.crc32(f"{name}|{dtype}|{list(shape)}".encode()) * 0xC2B2AE3D27D4EB4F


def with_head(head: int, value: int) -> int:
    """An item's checksum from its head and the checksum of its bytes (modulo 2^64)."""
    return (value * 0x9E3779B97F4A7C15 + head) % 2**64


def _device_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the tensor's device."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = raw.numel() // 4 * 4
    aligned = raw.storage_offset() * raw.element_size() % 4 == 0
    words = (raw[:whole] if aligned else raw[:whole].clone()).view(torch.int32)
    factors = _factors(raw.device)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        if start:
            total += part.sum() * (2 * start)
        total += part.mul_(factors[: part.numel()]).sum()
    if whole < raw.numel():
        tail = torch.zeros(4, dtype=torch.uint8, device=raw.device)
        tail[: raw.numel() - whole] = raw[whole:]
        total += tail.view(torch.int32).to(torch.int64)[0] * (whole // 2 + 1)
    return total


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    return torch.arange(_CHUNK, device=device) * 2 + 1
