"""Whether a program is a Python that rollout engines can run with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from nemo_rl_dsv4.generation.vllm_settings import MAKE_VLLM

PACKAGES = ("vllm", "ray")
SECONDS_TO_ANSWER = 60.0
_QUESTION = (
    "import importlib.util as u; "
    f"print('python', *(name for name in {PACKAGES!r} if u.find_spec(name) is None), sep=',')"
)


def python_problem(path: str) -> str | None:
    """What keeps engines from running with `path`, with the fix; None if nothing does.

    The program is asked which packages it finds; none of them is imported.
    """
    if not Path(path).is_file():
        return f"no such file; make it with `{MAKE_VLLM}`"
    if not os.access(path, os.X_OK):
        return "a file that cannot be executed; wanted a Python"
    command = [str(Path(path).absolute()), "-c", _QUESTION]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a program that does not answer within {SECONDS_TO_ANSWER:.0f} s; wanted a Python"
    except (OSError, UnicodeDecodeError) as error:
        return f"a program that does not start as a Python does ({error})"
    kind, *missing = answer.stdout.strip().split(",")
    if answer.returncode or kind != "python":
        return "no Python: it does not run `-c` with a line of code; wanted the interpreter of vLLM's environment"
    if missing:
        return f"a Python without {' and '.join(missing)}; make vLLM's environment with `{MAKE_VLLM}`"
    return None
