"""Which runtime drives the loop."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.errors import UserError

Runtime = Literal["embedded", "nemo_rl"]


def nemo_rl_source() -> Path | None:
    """Folder of NeMo-RL's package if its source tree can be imported, without importing it.

    The package of that name on the index is an empty placeholder: it does not count.
    """
    spec = importlib.util.find_spec("nemo_rl")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / "algorithms" / "grpo.py").is_file():
            return Path(folder)
    return None


def choose_runtime(config: MasterConfig) -> Runtime:
    """The runtime that `runtime` asks for.

    Raises:
        UserError: `nemo_rl` is asked for but its source tree is not on the path.
    """
    if config.runtime == "embedded":
        return "embedded"
    found = nemo_rl_source()
    if config.runtime == "nemo_rl" and found is None:
        raise UserError(
            "runtime is nemo_rl but NeMo-RL's source tree is not importable; put its checkout on PYTHONPATH, "
            "or set runtime=embedded"
        )
    return "nemo_rl" if found else "embedded"
