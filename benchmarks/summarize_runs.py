"""Agreement and learning of finished runs, one row a run: the numbers of the README's table.

uv run benchmarks/summarize_runs.py logs/grpo-dsv4-tiny-qat/exp_001 logs/grpo-dsv4-tiny-bf16/exp_001
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils.metrics_file import read_steps

COLUMNS = {
    "k3": "train/gen_kl_error",
    "k1": "rollout_corr/kl",
    "probs diff": "training/rollout_probs_diff_mean",
}


def summarize(run_dir: Path) -> dict[str, Any]:
    """Step-1 and mean mismatch, reward of the first and last five steps, first and last held-out accuracy.

    Raises:
        UserError: the folder has no metrics of training steps.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl; name a run folder such as logs/RECIPE/exp_001")
    records = read_steps(path)
    steps = [record for record in records if record.get("train/reward") is not None]
    if not steps:
        raise UserError(f"{path} has no training step")
    row: dict[str, Any] = {"run": str(run_dir), "steps": len(steps)}
    for label, name in COLUMNS.items():
        values = [record[name] for record in steps if record.get(name) is not None]
        if values:
            row[f"{label}, step 1"], row[f"{label}, mean"] = values[0], statistics.fmean(values)
    rewards = [record["train/reward"] for record in steps]
    row["reward, first 5"], row["reward, last 5"] = statistics.fmean(rewards[:5]), statistics.fmean(rewards[-5:])
    accuracies = [record["validation/accuracy"] for record in records if record.get("validation/accuracy") is not None]
    if accuracies:
        row["accuracy, first"], row["accuracy, last"] = accuracies[0], accuracies[-1]
    row["seconds, steps"] = sum(record.get("timing/train/total_step_time") or 0.0 for record in records)
    return row


def main() -> int:
    """Print one block a run, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = [summarize(run) for run in options.runs]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print(row.pop("run"))
        for name, value in row.items():
            print(f"  {name:20} {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
