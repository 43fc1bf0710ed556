"""Launch shapes, one row a kernel: how many elements a program holds and how many warps share them.

``benchmarks/numerics.py --sweep`` tries :data:`CANDIDATES` and prints the best; the rows below are what it found on an
H200 at V4-Flash shapes. Bits never depend on them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """elements: of a program, powers of two; a kernel on whole blocks has no choice. warps: of a program.

    reload: a block is read again from the cache once its scale is known, instead of waiting in registers.
    """

    elements: int
    warps: int
    reload: bool = False


SHAPES: dict[str, Shape] = {
    "groups": Shape(1024, 4),
    "groups_float": Shape(1024, 2),
    "groups_to_bytes": Shape(1024, 4),
    "bytes_to_groups": Shape(4096, 4),
    "kv": Shape(1024, 4),
    "tiles": Shape(16384, 4, reload=True),
    "tiles_to_bytes": Shape(16384, 8, reload=True),
    "bytes_to_tiles": Shape(16384, 16),
    "stacks": Shape(16384, 8, reload=True),
    "stacks_turned": Shape(16384, 16, reload=True),
    "swiglu": Shape(1024, 2),
    "swiglu_backward": Shape(2048, 8),
    "rope": Shape(1024, 2),
    "rope_backward": Shape(1024, 4),
    "mix_streams": Shape(4096, 4),
    "mix_streams_backward": Shape(1024, 4),
}

_GROUPS = tuple(
    Shape(elements, warps)
    for elements, warps in (
        *((1024, 2), (1024, 4), (2048, 2), (2048, 4), (2048, 8)),
        *((4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16)),
    )
)
_TILES = tuple(Shape(16384, warps, reload) for reload in (False, True) for warps in (8, 16, 32))
_SWIGLU = tuple(
    Shape(elements, warps) for elements in (512, 1024, 2048, 4096) for warps in (elements // 256, elements // 512)
)

CANDIDATES: dict[str, tuple[Shape, ...]] = {
    "groups": _GROUPS,
    "groups_float": _GROUPS,
    "groups_to_bytes": _GROUPS,
    "bytes_to_groups": _GROUPS,
    "kv": _GROUPS,
    "tiles": (*_TILES, Shape(16384, 4, True)),
    "tiles_to_bytes": (*_TILES, Shape(16384, 4, True)),
    "bytes_to_tiles": _GROUPS,
    "stacks": (*_TILES, Shape(16384, 4, True)),
    "stacks_turned": (*_TILES, Shape(16384, 4, True)),
    "swiglu": _SWIGLU,
    "swiglu_backward": _SWIGLU,
    "rope": _GROUPS,
    "rope_backward": _GROUPS,
}


def tile_of(kernel: str, width: int) -> int:
    """Rows of ``width`` elements (a power of two) that one program of ``kernel`` takes."""
    return max(1, SHAPES[kernel].elements // width)
