"""Recipes of the repository, and a way to write small ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_dsv4.config import load_config

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
RECIPES = CONFIGS / "recipes" / "llm"
SIZES = [
    "grpo.num_prompts_per_step=16",
    "grpo.num_generations_per_prompt=8",
    "policy.train_global_batch_size=128",
    "policy.max_total_sequence_length=256",
    "policy.generation.max_new_tokens=24",
    "policy.generation.reference_cfg.num_workers=1",
    "policy.dsv4.tiny.max_position_embeddings=1024",
    "data.max_input_seq_length=232",
    "policy.dsv4.cpu_processes=1",
    "policy.dtensor_cfg.dp_replicate_size=1",
    "policy.dsv4.tiny.n_routed_experts=8",
    "loss_fn.force_on_policy_ratio=false",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
]
"""What the cases below count on, whatever the recipe is tuned to."""


@pytest.fixture
def base_file() -> Path:
    """The file that lists every key."""
    return CONFIGS / "grpo_dsv4.yaml"


@pytest.fixture
def tiny() -> Path:
    """The CPU recipe."""
    return RECIPES / "grpo-dsv4-tiny-1n0g-automodel-qat.yaml"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a YAML file, folders included, below the test's folder."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def recipe(tiny: Path, tmp_path: Path):
    """Loads the CPU recipe at fixed sizes, with overrides."""
    places = [f"logger.log_dir={tmp_path}/logs", f"checkpointing.checkpoint_dir={tmp_path}/ckpt", "runtime=embedded"]
    return lambda overrides: load_config(tiny, [*SIZES, *places, *overrides])
