"""Agreement, learning and step times of finished runs, one block a run: the numbers of the tables in README and docs.

uv run benchmarks/summarize_runs.py logs/grpo-dsv4-tiny-qat/exp_001 logs/grpo-dsv4-tiny-bf16/exp_001
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.utils.compare import summarize_run, training_records


def main() -> int:
    """Print one block a run, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = {str(run): summarize_run(training_records(run)) for run in options.runs}
    if options.json:
        print(json.dumps([{"run": run, **row} for run, row in rows.items()], indent=1))
        return 0
    for run, row in rows.items():
        print(run)
        for name, value in row.items():
            print(f"  {name:28} {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
