"""Class paths of optimizer and schedule, as far as they can be judged without importing them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from nemo_rl_dsv4.config.rules import require

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
UNUSABLE = {
    "torch.optim.LBFGS": "calls the loss again through a closure, which the trainer has none of",
    "torch.optim.SparseAdam": "takes sparse gradients only",
    "torch.optim.Optimizer": "is the base class",
    "torch.optim.lr_scheduler.ReduceLROnPlateau": "wants a metric at each step, which the trainer does not give it",
    "torch.optim.lr_scheduler.LRScheduler": "is the base class",
}
"""Class -> why the trainer cannot drive it."""


def check_class_path(path: str, key: str, example: str) -> None:
    """Refuses text that is no class path, functions of the standard library, and classes that cannot be driven.

    Raises:
        UserError: the key, what it holds, and an example of what fits.
    """
    fits = _PATH.fullmatch(path) is not None and path.split(".")[0] not in sys.stdlib_module_names
    require(fits, f"{key} is {path!r}; wanted a class path, such as {example}")
    require(path not in UNUSABLE, f"{key} is {path}, which {UNUSABLE.get(path)}; take another, such as {example}")


def check_schedule_arguments(path: str, where: str, arguments: Mapping[str, Any]) -> None:
    """Arguments with which torch makes a schedule that fails at its first step."""
    size = arguments.get("step_size", 1)
    require(
        path != "torch.optim.lr_scheduler.StepLR" or (isinstance(size, int) and size >= 1),
        f"{where}.step_size is {size!r}; wanted a whole number of 1 or more",
    )
