"""Progress of a read whose size is known only once it goes on."""

from __future__ import annotations

import io

from rich.console import Console

from nemo_rl_dsv4.utils import progress as progress_module
from nemo_rl_dsv4.utils.progress import bytes_progress


def test_a_log_gets_mebibytes_of_all(monkeypatch):
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    text = io.StringIO()
    with bytes_progress(Console(file=text, width=200), "loading") as report:
        report(3 << 20, 10 << 20)
        report((9 << 20) + 5, 10 << 20)
    lines = text.getvalue().splitlines()
    assert lines[:3] == ["loading ...", "loading (MiB): 3/10", "loading (MiB): 9/10"]
    assert lines[3].startswith("loading: done in ") and len(lines) == 4


def test_nothing_but_the_end_is_shown_where_nothing_is_read():
    text = io.StringIO()
    with bytes_progress(Console(file=text, width=200), "loading"):
        pass
    assert len(text.getvalue().splitlines()) == 2
