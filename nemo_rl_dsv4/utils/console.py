"""What a run shows: a table a step, progress within its phases, and where the files are at the end.

On a terminal these are rich tables and bars; in a file or a pipe they are plain lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl_dsv4.utils.progress import PhaseBar, PhaseLines, start_phase

PHASE_PREFIX = "timing/train/"
TOTAL_TIME = PHASE_PREFIX + "total_step_time"
VALIDATION_TIME = "timing/validation/total_validation_time"
PIPE_WIDTH = 120

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "train/reward", ".3f"),
    ("accuracy", "validation/accuracy", ".3f"),
    ("loss", "train/loss", ".4f"),
    ("grad norm", "train/grad_norm", ".3f"),
    ("KL (k3)", "train/gen_kl_error", ".2e"),
    ("KL (k1)", "rollout_corr/kl", "+.2e"),
    ("probs diff", "training/rollout_probs_diff_mean", ".2e"),
    ("entropy", "train/approx_entropy", ".3f"),
    ("tokens", "train/mean_gen_tokens_per_sample", ".1f"),
    ("truncated", "train/truncation_rate", ".1%"),
)
"""Heading, metric name and format of a step's table; metrics that a step does not have are left out."""

PHASE_LABELS = {
    "generation": "rollout",
    "policy_and_reference_logprobs": "logprobs",
    "policy_training": "training",
    "prepare_for_generation/total": "refit",
    "reward_calculation": "rewards",
    "advantage_calculation": "advantages",
    "data_processing": "batching",
    "checkpointing": "checkpoint",
    "total_validation_time": "validation",
}
"""Short words for NeMo-RL's names of phases; other names are shown as they are."""


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout, or on stderr; wide enough for tables when it is no terminal."""
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH, stderr=stderr)


def phase_seconds(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Phase -> seconds, longest first, out of the timing metrics.

    The total is no phase, and neither is what another thread does meanwhile.
    """
    phases = {
        PHASE_LABELS.get(label, label): value
        for name, value in metrics.items()
        if value is not None and name != TOTAL_TIME and (name.startswith(PHASE_PREFIX) or name == VALIDATION_TIME)
        for label in [name.split("/", 2)[2]]
        if not label.startswith("background/")
    }
    return dict(sorted(phases.items(), key=lambda item: -item[1]))


class RunConsole:
    """Shows a run while it goes on; the trainer calls the `on_...` methods.

    Args:
        console: where to.
        max_steps: number of steps of the run.
    """

    def __init__(self, console: Console, max_steps: int) -> None:
        self.console = console
        self.max_steps = max_steps
        self._display: PhaseBar | PhaseLines | None = None

    def on_phase_start(self, name: str, total: int) -> None:
        """A phase of `total` items begins; 0: unknown."""
        self.on_phase_end()
        self._display = start_phase(self.console, PHASE_LABELS.get(name, name), total or None)

    def on_phase_progress(self, n: int) -> None:
        """`n` more items are done."""
        if self._display is not None:
            self._display.advance(n)

    def on_phase_end(self) -> None:
        """The phase is over."""
        if self._display is not None:
            self._display.stop()
            self._display = None

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the numbers of a step; step 0 is what is measured before the first.

        Args:
            step: number of the step.
            metrics: name -> number, as given to `RunLogger.log_step`.
        """
        self.on_phase_end()
        cells = [(head, format(metrics[name], form)) for head, name, form in COLUMNS if name in metrics]
        phases = ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in phase_seconds(metrics).items() if seconds >= 0.05
        )
        total = f"{metrics[TOTAL_TIME]:.1f} s" if TOTAL_TIME in metrics else ""
        title = f"step {step}/{self.max_steps}"
        if self.console.is_terminal:
            self._print_tables(f"{title}  {total}".rstrip(), cells, phases)
            return
        times = f"{total} ({phases})" if total and phases else total or phases
        line = " | ".join([title, *(f"{head} {value}" for head, value in cells), *([times] if times else [])])
        self.console.print(Text(line), soft_wrap=True)

    def _print_tables(self, title: str, cells: list[tuple[str, str]], phases: str) -> None:
        self.console.print(Text(title, style="bold"))
        for row in _rows_that_fit(cells, self.console.width):
            table = Table()
            for head, _ in row:
                table.add_column(head, justify="right", no_wrap=True)
            table.add_row(*(value for _, value in row))
            self.console.print(table)
        if phases:
            self.console.print(Text(f"seconds: {phases}", style="dim"))


def _rows_that_fit(cells: list[tuple[str, str]], width: int) -> Iterator[list[tuple[str, str]]]:
    """Cuts the cells into tables that are not wider than the terminal."""
    row: list[tuple[str, str]] = []
    used = 1
    for cell in cells:
        needed = max(len(cell[0]), len(cell[1])) + 3
        if row and used + needed > width:
            yield row
            row, used = [], 1
        row.append(cell)
        used += needed
    if row:
        yield row


def print_summary(console: Console, results: Mapping[str, object], files: Mapping[str, Path]) -> None:
    """The end of a run: its main numbers, and where the files are.

    Args:
        results: description -> value, such as accuracy before and after.
        files: description -> path, as `RunLogger.finish` returns them, and others such as the last checkpoint.
    """
    if not console.is_terminal:
        for name, value in [*results.items(), *files.items()]:
            console.print(Text(f"{name}: {value}"), soft_wrap=True)
        return
    table = Table(title="Summary", title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in results.items():
        table.add_row(Text(name), Text(str(value)))
    if results and files:
        table.add_section()
    for name, path in files.items():
        table.add_row(Text(name), Text(str(path)))
    console.print(table)
