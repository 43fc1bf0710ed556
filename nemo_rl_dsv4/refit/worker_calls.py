"""Call a method on every worker of a vLLM engine, and hear of a failure only when all of them have answered.

vLLM 0.26's `collective_rpc` raises at the first worker that failed and leaves the answers of the others in their
queues, where the next call takes them for its own. A refit that some workers refuse must leave an engine that goes on
with its old weights, so failures travel as answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nemo_rl_dsv4.errors import UserError

Answer = tuple[str, Any]
_RESULT, _REFUSED, _FAILED = "result", "refused", "failed"


class CallsWorkers(Protocol):
    """vLLM's `LLM`, as far as needed here."""

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: Any = None
    ) -> list: ...


def answer(call: Callable[[], Any]) -> Answer:
    """A worker's end: what `call` returned, or what it raised, as plain values."""
    try:
        return _RESULT, call()
    except UserError as error:
        return _REFUSED, str(error)
    except Exception as error:
        return _FAILED, f"{type(error).__name__}: {error}"


def call_workers(engine: CallsWorkers, method: str, *args: Any, **kwargs: Any) -> list[Any]:
    """What a method of `RefitWorkerExtension` returned on every worker, in their order.

    Raises:
        UserError: a worker raised one; the first of them, with the worker's number where there are several.
        RuntimeError: a worker failed otherwise.
    """
    return results(method, engine.collective_rpc("dsv4_answer", args=(method, args, kwargs)))


def results(method: str, answers: Sequence[Answer]) -> list[Any]:
    """See `call_workers`."""
    for kind, error in ((_FAILED, RuntimeError), (_REFUSED, UserError)):
        for worker, (found, value) in enumerate(answers):
            if found == kind:
                where = f"worker {worker}: " if len(answers) > 1 else ""
                raise error(f"{where}{value}" if kind == _REFUSED else f"{where}{method} failed: {value}")
    return [value for _, value in answers]


def call_method(owner: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
    """`answer` for a method by name."""
    return answer(lambda: getattr(owner, method)(*args, **kwargs))
