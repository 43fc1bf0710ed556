"""Check expressions over the metrics of a run; exit 0 if all hold, 1 if one does not, 2 on bad input.

  uv run tests/check_metrics.py logs/grpo-dsv4-tiny-qat 'mean(data["train/gen_kl_error"]) < 1e-6'
  uv run tests/check_metrics.py RUN --steps            the last step of the run, and nothing else
  uv run tests/check_metrics.py RUN --json EXPRESSION...

RUN is a metrics.jsonl, a run folder with one, a log folder (its newest run), a folder with TensorBoard events, or a
.json of {metric: {step: value}} as NeMo-RL's scripts dump it. In an expression data["NAME"] is a metric by step; min,
max, mean, median and last make a number of it; mean and median take range_start and range_end as NeMo-RL's checker does
(steps from 1, the end excluded, negative from the end, 0 for the last). Numbers can be added and compared; nothing else
is evaluated. A step whose value is null (what a run writes for NaN and infinities) makes numbers over it NaN, and no
comparison with NaN holds.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import operator
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from nemo_rl_dsv4.cli.guard import FINDING, OK, guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.metrics_file import read_steps

Series = dict[int, float]
COMPARE: dict[type, Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}
ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def read_metrics(path: Path) -> dict[str, Series]:
    """Metric -> step -> value, of any of the forms named above.

    Raises:
        UserError: nothing there that holds metrics.
    """
    if path.is_dir():
        runs = sorted(path.glob("exp_*/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
        file = path / "metrics.jsonl" if (path / "metrics.jsonl").is_file() else runs[-1] if runs else None
        if file is None:
            return _read_events(path)
        path = file
    if path.suffix == ".json":
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return {name: {int(step): float(value) for step, value in by.items()} for name, by in document.items()}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: no JSON of {{metric: {{step: value}}}} ({error})") from error
    metrics: dict[str, Series] = {}
    for record in read_steps(path):
        for name, value in record.items():
            if name != "step":  # null is what a run writes for NaN and infinities
                metrics.setdefault(name, {})[record["step"]] = math.nan if value is None else float(value)
    return metrics


def _read_events(folder: Path) -> dict[str, Series]:
    if not any(folder.rglob("events.out.tfevents.*")):
        raise UserError(f"{folder}: neither metrics.jsonl, exp_*/metrics.jsonl nor TensorBoard events")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics: dict[str, Series] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            metrics.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    return metrics


def within(series: Series, start: int, end: int) -> list[float]:
    """Values of the steps from `start` up to before `end`; negative counts from the end, end 0 includes the last."""
    last = max(series)
    start = start + last + 1 if start < 0 else start
    end = end + last + 1 if end <= 0 else end
    return [value for step, value in sorted(series.items()) if start <= step < end]


def _whole(name: str, value: float) -> int:
    if not math.isfinite(value) or value != int(value):
        raise UserError(f"{name} is {value}; wanted a whole number of steps")
    return int(value)


def _extreme(kind: Callable[[list[float]], float]) -> Callable[[Series], float]:
    """`min` or `max`, or NaN if a value is NaN: Python's own depend on where it stands."""
    return lambda series: math.nan if any(map(math.isnan, series.values())) else kind(list(series.values()))


def _average(kind: Callable[[list[float]], float]) -> Callable[..., float]:
    def over(series: Series, range_start: float = 1, range_end: float = 0) -> float:
        values = within(series, _whole("range_start", range_start), _whole("range_end", range_end))
        if not values:
            raise UserError(f"no step from {range_start} to before {range_end} in steps {min(series)} to {max(series)}")
        return math.nan if any(map(math.isnan, values)) else kind(values)

    return over


MAX_PARTS = 200
FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": _extreme(min),
    "max": _extreme(max),
    "last": lambda series: series[max(series)],
    "mean": _average(statistics.fmean),
    "median": _average(statistics.median),
}


class Checker:
    """Evaluates one expression at a time over metrics."""

    def __init__(self, metrics: dict[str, Series]) -> None:
        self.metrics = metrics

    def check(self, expression: str) -> tuple[bool, list[float]]:
        """Whether a comparison holds, and the numbers that it compared.

        Raises:
            UserError: no comparison, an unknown metric or function, or anything else that is not evaluated here.
        """
        try:
            tree = ast.parse(expression, mode="eval").body
        except SyntaxError as error:
            raise UserError(f"{expression!r} is no expression ({error.msg})") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"{expression[:80]!r} is no expression ({error or type(error).__name__})") from error
        if sum(1 for _ in ast.walk(tree)) > MAX_PARTS:
            raise UserError(f"{expression[:80]!r}... has more than {MAX_PARTS} parts; write several expressions")
        if not isinstance(tree, ast.Compare):
            raise UserError(f'{expression!r} compares nothing; write such as mean(data["train/reward"]) > 0.5')
        numbers = [self._number(side, expression) for side in (tree.left, *tree.comparators)]
        holds = []
        for sign, left, right in zip(tree.ops, numbers, numbers[1:], strict=False):
            if type(sign) not in COMPARE:
                raise UserError(f"{expression!r}: only <, <=, >, >= and == compare here")
            holds.append(COMPARE[type(sign)](left, right))
        return all(holds), numbers

    def _number(self, node: ast.expr, expression: str) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand, expression)
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            left, right = self._number(node.left, expression), self._number(node.right, expression)
            try:
                return ARITHMETIC[type(node.op)](left, right)
            except ZeroDivisionError as error:
                raise UserError(f"{expression!r} divides by zero") from error
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and node.args:
            words = [self._number(argument, expression) for argument in node.args[1:]]
            named = {str(word.arg): self._number(word.value, expression) for word in node.keywords}
            try:
                return FUNCTIONS[node.func.id](self._series(node.args[0], expression), *words, **named)
            except TypeError as error:
                raise UserError(f"{expression!r}: {node.func.id} does not take that ({error})") from error
        raise UserError(
            f"{expression!r}: {ast.unparse(node)!r} is not evaluated; use {', '.join(FUNCTIONS)} and numbers"
        )

    def _series(self, node: ast.expr, expression: str) -> Series:
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "data"
            and isinstance(node.slice, ast.Constant)
        ):
            name = str(node.slice.value)
            if not self.metrics.get(name):
                raise UserError(
                    f"{expression!r}: the run has no metric {name!r}; it has {', '.join(sorted(self.metrics))}"
                )
            return self.metrics[name]
        raise UserError(f'{expression!r}: {ast.unparse(node)!r} is no metric; write data["NAME"]')


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def run(arguments: list[str]) -> int:
    """Checks and prints; returns the exit status."""
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("expressions", metavar="EXPRESSION", nargs="*")
    parser.add_argument("--steps", action="store_true", help="print the last training step and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_intermixed_args(arguments)
    metrics = read_metrics(options.run)
    if options.steps:
        print(max(metrics.get("train/loss") or {0: 0.0}))
        return OK
    if not options.expressions:
        raise UserError("no expression to check; see --help")
    checker = Checker(metrics)
    rows: list[dict[str, Any]] = []
    for expression in options.expressions:
        holds, numbers = checker.check(expression)
        rows.append({"expression": expression, "holds": holds, "numbers": numbers})
    if options.json:
        print(json.dumps({"checks": rows}))
    else:
        for row in rows:
            numbers = ", ".join(f"{number:.4g}" for number in row["numbers"])
            print(f"{'ok  ' if row['holds'] else 'FAIL'} {row['expression']}  [{numbers}]")
    return OK if all(row["holds"] for row in rows) else FINDING


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
