"""What every command line does with an error: bad input is one line and exit status 2, Ctrl-C one line and 130."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable

from nemo_rl_dsv4.errors import UserError

OK, FINDING, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
FAILED = 1

_OUT_OF_MEMORY = (
    "lower policy.train_micro_batch_size, policy.logprob_batch_size or policy.logprob_chunk_size, or what a rollout "
    "engine on the same GPU keeps (policy.generation.vllm_cfg.gpu_memory_utilization; policy.dsv4.engine_sleep gives "
    "it back); end what else runs there; `nemo-rl-dsv4 plan` estimates what a recipe needs"
)
_HOST_OUT_OF_MEMORY = (
    "end what else runs there, or lower policy.train_micro_batch_size and policy.logprob_batch_size (a packed sequence "
    "has policy.sequence_packing.train_mb_tokens and logprob_mb_tokens), policy.logprob_chunk_size, or on CPUs "
    "policy.dsv4.cpu_processes and policy.generation.reference_cfg.num_workers; a run with checkpoints goes on with "
    "--resume"
)
_CPU_ALLOCATION = re.compile(
    r"DefaultCPUAllocator: .*?(\d+) bytes|Storage size calculation overflowed|numel: integer multiplication overflow",
    re.DOTALL,
)
"""What torch says, in a plain RuntimeError, of a tensor that the host cannot hold."""
_DIED = (
    "the host may be short of memory (its kernel's log says so), or the process crashed (Ray's session folder has its "
    "log); a run with checkpoints goes on with --resume"
)


def guarded(command: Callable[[], int], *, debug: bool = False, lower: str | None = None) -> int:
    """Runs `command` and returns the process's exit status.

    A `UserError`, also one that a Ray task or actor raised, becomes one line on stderr and status 2. `debug` shows the
    traceback of what would otherwise be one line. Memory that a GPU or a host does not have, and a process of the run
    that died, are one line with what to do, and status 1. Any other exception is a defect: its traceback is always
    shown, and the status is 1.

    Args:
        command: what to run.
        debug: show tracebacks.
        lower: what to do where memory lacks, for a command that reads no recipe; None names a recipe's keys.
    """
    try:
        return command()
    except UserError as error:
        if debug:
            traceback.print_exc()
        _say(f"error: {one_line(error)}")
        return BAD_INPUT
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        _say("interrupted")
        return INTERRUPTED
    except Exception as error:
        reason = _lack(error, lower)
        if reason is None:
            raise
        if debug:
            traceback.print_exc()
        _say(f"error: {reason}")
        return FAILED


def _lack(error: Exception, lower: str | None) -> str | None:
    """What the run lacked, where an exception says so and is no defect. By names: no library is imported for it."""
    cause = getattr(error, "cause", None)
    original = cause if isinstance(cause, Exception) else error
    names = {kind.__name__ for kind in type(original).__mro__}
    if "OutOfMemoryError" in names and "RuntimeError" in names:  # torch's; Ray's of this name is no RuntimeError
        return f"{one_line(original).partition(' Of the allocated memory')[0].rstrip('.')}; {lower or _OUT_OF_MEMORY}"
    if "OutOfMemoryError" in names:
        found = re.search(r"Memory on the node.*?(\S+ used / \S+ limit)", str(original), re.DOTALL)
        used = f" ({found[1]})" if found else ""
        return f"a host of the run is short of memory{used}, and Ray ended processes there; {_HOST_OUT_OF_MEMORY}"
    asked = _CPU_ALLOCATION.search(str(original)) if "RuntimeError" in names else None
    if asked:
        size = f"{int(asked[1]) / 2**30:.1f} GiB" if asked[1] else "more than 2^63 bytes"
        return f"the host cannot allocate {size} for one tensor; {lower or _HOST_OUT_OF_MEMORY}"
    if "MemoryError" in names:
        return f"the host is out of memory ({one_line(original)}); {lower or _HOST_OUT_OF_MEMORY}"
    if "RayActorError" in names:
        return f"a process of the run died: {one_line(original)}; {_DIED}"
    return None


def one_line(error: BaseException) -> str:
    """The message without line breaks; of an error that crossed Ray, the message of the original one."""
    original = getattr(error, "cause", None)
    text = str(original if isinstance(original, BaseException) else error)
    return " ".join(text.split()) or type(error).__name__


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
