import ast
import sys
from pathlib import Path

import nemo_rl_dsv4

PACKAGE = Path(nemo_rl_dsv4.__file__).parent / "grpo"
ALLOWED = {
    "torch",
    "numpy",
    "nemo_rl_dsv4.errors",
    "nemo_rl_dsv4.regular_file",
    "nemo_rl_dsv4.routes",
    "nemo_rl_dsv4.grpo",
    "nemo_rl_dsv4.utils.file_digest",
    "nemo_rl_dsv4.utils.random_state",
}


def test_grpo_imports_neither_models_nor_engines_nor_the_recipe_schema():
    """Only torch, numpy, what `ALLOWED` names and itself: ray, AutoModel, vLLM and the schema stay outside."""
    foreign = set()
    files = list(PACKAGE.glob("*.py"))
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            foreign |= {
                f"{path.name}: {name}"
                for name in names
                if name.split(".")[0] not in sys.stdlib_module_names
                and not any(name == good or name.startswith(good + ".") for good in ALLOWED)
            }
    assert len(files) > 10
    assert foreign == set()
