"""NeMo-RL's source tree: where it is, which one it is, and its names by path."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.config.runtime_choice import nemo_rl_source
from nemo_rl_dsv4.errors import UserError

TESTED_COMMIT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"
"""NeMo-RL's main of 2026-08-22: what docs/nemo_rl.md reports was run with this tree."""
PYTHON = (3, 12)
"""Oldest Python that NeMo-RL's sources run on."""


def require_tree() -> Path:
    """Folder of the checkout that `import nemo_rl` finds.

    Raises:
        UserError: there is none, or this Python is too old for it.
    """
    source = nemo_rl_source()
    if source is None:
        raise UserError(
            "NeMo-RL's source tree is not importable; put its checkout on PYTHONPATH "
            "(git clone https://github.com/NVIDIA-NeMo/RL; the package of that name on the index is an empty "
            "placeholder), or run with --trainer embedded"
        )
    if sys.version_info < PYTHON:
        found, wanted = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, PYTHON))
        raise UserError(
            f"this is Python {found}; NeMo-RL's sources need {wanted} or newer: make the environment with "
            f"`uv venv --python {wanted}`, or run with --trainer embedded"
        )
    return source.parent


def revision(tree: Path) -> str:
    """Commit of a checkout, or its version where git's files are not there."""
    head = tree / ".git" / "HEAD"
    if head.is_file():
        text = head.read_text(encoding="utf-8").strip()
        if not text.startswith("ref: "):
            return text
        reference = tree / ".git" / text.removeprefix("ref: ")
        if reference.is_file():
            return reference.read_text(encoding="utf-8").strip()
        packed = tree / ".git" / "packed-refs"
        for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else ():
            commit, _, name = line.partition(" ")
            if name == text.removeprefix("ref: "):
                return commit
    info = tree / "nemo_rl" / "package_info.py"
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    numbers = [re.search(rf"^{part} *= *(\d+)", text, re.M) for part in ("MAJOR", "MINOR", "PATCH")]
    return "version " + ".".join(found.group(1) for found in numbers if found) if any(numbers) else "unknown revision"


def symbol(path: str) -> Any:
    """An object of NeMo-RL by `module:name`.

    Raises:
        UserError: the tree has no such module or name, or a library that it needs is not installed.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        if error.name is not None and not error.name.startswith("nemo_rl"):
            raise UserError(
                f"importing {module_name} for NeMo-RL needs the library {error.name}, which is not installed; install "
                "it beside this package (docs/nemo_rl.md lists what was used)"
            ) from error
        raise _moved(path) from error
    except AttributeError as error:
        raise _moved(path) from error


def _moved(path: str) -> UserError:
    module_name, _, name = path.partition(":")
    return UserError(
        f"NeMo-RL's tree has no {name} in {module_name}: it has moved since the revision this version was run with "
        f"({TESTED_COMMIT[:12]}); check out that one, or run with --trainer embedded"
    )
