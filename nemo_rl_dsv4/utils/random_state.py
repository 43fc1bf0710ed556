"""A process's random state as JSON: Python's, numpy's, torch's CPU generator and, where there is one, the GPU's."""

import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch

from nemo_rl_dsv4.errors import UserError


def rng_state() -> dict[str, Any]:
    """The present state of all generators of this process, as JSON-able values.

    `cuda` is the state of the current device's generator, null in a process that has not used a GPU.
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), _encode(keys.tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _encode(bytes(torch.get_rng_state().tolist())),
        "cuda": _encode(bytes(torch.cuda.get_rng_state().tolist())) if torch.cuda.is_initialized() else None,
    }


def restore_rng_state(state: dict[str, Any], where: str = "the saved random state") -> None:
    """Set all generators to what :func:`rng_state` returned. A GPU's state is left alone where there is no GPU now.

    Args:
        state: what was saved.
        where: file or folder it came from, for the message.

    Raises:
        UserError: the state is damaged.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.frombuffer(_decode(keys), dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_tensor(state["torch"]))
        if state.get("cuda") is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(_tensor(state["cuda"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"{where} cannot be restored ({type(error).__name__}: {error}); resume from another checkpoint"
        ) from error


def seed_all(*parts: object) -> None:
    """Seed all generators of this process from a hash of `parts`: equal parts give equal draws on any machine."""
    seed = int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(_decode(text)), dtype=torch.uint8)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"))
