"""Memory of the GPUs that recipes are written for."""

from __future__ import annotations

from nemo_rl_dsv4.errors import UserError

MIB, GIB = 1024**2, 1024**3

GPUS: dict[str, int] = {
    "h100": 81559 * MIB,
    "h200": 143771 * MIB,
    "b200": 183359 * MIB,
    "gb200": 189471 * MIB,
    "mi300x": 192 * 10**9,
    "mi355x": 288 * 10**9,
}
"""Bytes a driver reports: nvidia-smi's total for NVIDIA, the vendor's figure read as 10^9 bytes for AMD."""

RUNTIME_BYTES = 3 * GIB // 2
"""Assumed, not measured: what one process holds on a GPU besides tensors (driver context, NCCL, library workspaces)."""


def gpu_bytes(name: str) -> int:
    """Memory of a GPU in bytes.

    Args:
        name: a name of `GPUS`, or a number of GiB such as `96`.

    Raises:
        UserError: neither.
    """
    if name in GPUS:
        return GPUS[name]
    try:
        size = float(name)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise UserError(f"--gpu is {name!r}; wanted one of {', '.join(GPUS)}, or the GPU's memory in GiB, such as 96")
    return int(size * GIB)
