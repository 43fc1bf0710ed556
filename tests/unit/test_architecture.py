"""Conventions as tests: which layer may import which, and how long a file may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "nemo_rl_dsv4"
LAYERS = (
    "errors",
    "regular_file",
    "routes",
    "numerics",
    "model",
    "refit",
    "utils",
    "data",
    "generation",
    "policy",
    "grpo",
    "environments",
    "config",
    "tiny",
    "mismatch",
    "planning",
    "cluster",
    "rollout_engines",
    "runtime",
    "doctor",
    "integrations",
    "cli",
)
"""Lowest first; a layer imports only what stands before it."""
FORBIDDEN = {
    "numerics": {"numpy", "ray", "transformers", "nemo_automodel", "vllm"},
    "model": {"ray", "vllm"},
    "refit": {"ray", "vllm"},
    "grpo": {"ray", "vllm", "transformers", "nemo_automodel"},
    "config": {"ray", "vllm", "transformers", "nemo_automodel", "torch"},
    "cli": {"vllm", "nemo_automodel"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent != PACKAGE)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "nemo_rl_dsv4"}
    return found


def test_every_file_belongs_to_a_layer():
    assert {layer_of(path) for path in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_point_down(path):
    layer = layer_of(path)
    own = [name.split(".")[1] for name in imported_modules(path) if name.startswith("nemo_rl_dsv4.")]
    above = {name for name in own if LAYERS.index(name) > LAYERS.index(layer)}
    assert not above, f"{layer} imports {sorted(above)}, which stand above it"
    outside = {name.split(".")[0] for name in imported_modules(path)}
    assert not outside & FORBIDDEN.get(layer, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_readable(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
