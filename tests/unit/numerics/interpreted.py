"""The fused kernels under Triton's interpreter, on CPU tensors, without touching how anyone else imports them."""

import importlib
import os
import sys
from types import ModuleType

PACKAGE = "nemo_rl_dsv4.numerics.fused"


def load() -> dict[str, ModuleType]:
    """Fresh copies of the kernel modules whose @triton.jit functions are interpreted, by their last name."""
    import triton  # noqa: F401  imported before the switch: its own library must stay compiled

    names = (
        "shapes",
        "rounding",
        "groups",
        "group_bytes",
        "kv",
        "weights",
        "swiglu",
        "rotary",
        "hyper_connections",
        "stacks",
        "tf32",
        "transpose",
        "word_sums",
    )
    saved = {name: module for name, module in sys.modules.items() if name.startswith(PACKAGE)}
    before = os.environ.get("TRITON_INTERPRET")
    for name in saved:
        del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return {name: importlib.import_module(f"{PACKAGE}.{name}") for name in names}
    finally:
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]
        sys.modules.update(saved)
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
