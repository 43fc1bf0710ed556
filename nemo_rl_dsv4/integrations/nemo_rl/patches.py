"""What is changed in NeMo-RL's process where it offers no hook, and what is registered where it does.

| patch | what | where |
|---|---|---|
| transformers-guard | NeMo-RL refuses transformers 5.12 and newer; AutoModel pins 5.18.0 | `nemo_rl.models.policy` |

Why upstream would take it: the guard protects a workaround for DeepSeek-V3 tokenizers and says itself that it goes once
newer versions are allowed. No tokenizer of DeepSeek-V3 is loaded here; a warning in its place would serve everyone.

Every patch says whether this tree needs it, is undone when its block ends, and is refused if what it replaces is not
there. Registrations (an environment, the Python that runs it) use NeMo-RL's own registries and are undone as well.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.integrations.nemo_rl.tree import require_tree, symbol

GUARD_TEXT = "transformers.__version__"
GUARD_LIMIT = (5, 12)
"""First version of transformers that the guard refuses."""
VERSION_SHOWN = "5.11.0"

ENVIRONMENT_NAME = "dsv4_math"
ENVIRONMENT_CLASS = "nemo_rl_dsv4.integrations.nemo_rl.environment.EnvironmentActor"


@dataclass(frozen=True)
class Patch:
    """One attribute that is replaced for a while.

    Attributes:
        name: as in the table above.
        owner: the object that has the attribute, found when the patch is applied.
        attribute: its name.
        value: what stands there instead, given what stood there.
        needed: whether the tree that is present needs it.
    """

    name: str
    owner: Callable[[], Any]
    attribute: str
    value: Callable[[Any], Any]
    needed: Callable[[], bool] = lambda: True


@contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[list[str]]:
    """Apply the patches that are needed; undo them in reverse order when the block ends. Yields their names.

    Raises:
        UserError: the attribute to replace is not there, or something else replaced it meanwhile.
    """
    names = []
    with ExitStack() as undo:
        for patch in patches:
            if patch.needed():
                undo.enter_context(_replaced(patch))
                names.append(patch.name)
        yield names


@contextmanager
def _replaced(patch: Patch) -> Iterator[None]:
    owner = patch.owner()
    shown = f"{getattr(owner, '__name__', type(owner).__name__)}.{patch.attribute}"
    if not hasattr(owner, patch.attribute):
        raise UserError(f"patch {patch.name}: there is no {shown} to replace; the tree has moved")
    before = getattr(owner, patch.attribute)
    put = patch.value(before)
    setattr(owner, patch.attribute, put)
    try:
        yield
    finally:
        found = getattr(owner, patch.attribute, None)
        if found is put:
            setattr(owner, patch.attribute, before)
        elif sys.exc_info()[1] is None:
            raise UserError(f"patch {patch.name}: {shown} was replaced by something else; it is left as it is")


@contextmanager
def registered(registry: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """An entry of a registry of NeMo-RL for the length of a block.

    Raises:
        UserError: the name is taken.
    """
    if name in registry:
        raise UserError(f"NeMo-RL's registry already has {name!r}: {registry[name]!r}; it would be replaced")
    registry[name] = value
    try:
        yield
    finally:
        registry.pop(name, None)


def guard_is_there(source: Path) -> bool:
    """NeMo-RL's policy package still refuses newer versions of transformers."""
    file = source / "nemo_rl" / "models" / "policy" / "__init__.py"
    return file.is_file() and GUARD_TEXT in file.read_text(encoding="utf-8")


def transformers_guard(source: Path) -> Patch:
    """See the table; `source` is the folder of the checkout."""

    def owner() -> Any:
        # transformers puts a second module object in its own place while this part of it is imported.
        importlib.import_module("transformers.processing_utils")
        return sys.modules["transformers"]

    def needed() -> bool:
        installed = importlib.import_module("transformers").__version__
        return guard_is_there(source) and tuple(map(int, installed.split(".")[:2])) >= GUARD_LIMIT

    return Patch("transformers-guard", owner, "__version__", lambda _: VERSION_SHOWN, needed)


def import_nemo_rl() -> list[str]:
    """Import the part of NeMo-RL that guards its imports, in this process; returns the patches that it took.

    Raises:
        UserError: no tree, too old a Python, or a library that is not installed.
    """
    source = require_tree()
    if "nemo_rl.models.policy" in sys.modules:
        return []
    with applied([transformers_guard(source)]) as names:
        symbol("nemo_rl.models.policy:PolicyConfig")
    return names


@contextmanager
def registrations(python: str = sys.executable) -> Iterator[None]:
    """NeMo-RL finds our environment, and runs it with the Python that has this package."""
    environments = symbol("nemo_rl.environments.utils:ENV_REGISTRY")
    pythons = symbol("nemo_rl.distributed.ray_actor_environment_registry:ACTOR_ENVIRONMENT_REGISTRY")
    with (
        registered(environments, ENVIRONMENT_NAME, {"actor_class_fqn": ENVIRONMENT_CLASS}),
        registered(pythons, ENVIRONMENT_CLASS, python),
    ):
        yield


def worker_environment(source: Path, path: str) -> dict[str, str]:
    """Environment variables with which every process of the cluster finds this package and NeMo-RL.

    Args:
        source: folder of NeMo-RL's checkout.
        path: PYTHONPATH of this process.
    """
    own = str(Path(__file__).resolve().parents[3])
    entries = [own, str(source), *path.split(":")]
    return {"PYTHONPATH": ":".join(dict.fromkeys(entry for entry in entries if entry))}
