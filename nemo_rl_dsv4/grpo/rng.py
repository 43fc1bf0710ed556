"""The driver's random state as JSON: Python's, numpy's and torch's CPU generators."""

import base64
import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The present state of all three generators, as JSON-able values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), _encode(keys.tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _encode(bytes(torch.get_rng_state().tolist())),
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set all three generators to what :func:`rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_decode(keys), dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(list(_decode(state["torch"])), dtype=torch.uint8))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"))
