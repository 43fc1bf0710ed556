"""This package under the NeMo-RL that is present: `NEMO_RL_DIR` names its checkout, Python is 3.12 or newer.

NEMO_RL_DIR=path/to/RL PYTHONPATH=path/to/RL python -m pytest tests/contract
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.utils.metrics_file import read_steps

CHECKOUT = os.environ.get("NEMO_RL_DIR")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="NEMO_RL_DIR is not set; it names a checkout of NeMo-RL"),
]
CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
RECIPES = sorted((CONFIGS / "recipes" / "llm").glob("*.yaml"))
TINY = CONFIGS / "recipes" / "llm" / "grpo-dsv4-tiny-1n0g-automodel-qat.yaml"
TOLERANCE = 1e-5
"""Measured: 0 for losses and gradient norms, 7e-9 for the mismatch metrics (NeMo-RL evaluates them in float32)."""

SMALL = [
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "policy.logprob_batch_size=8",
    "grpo.max_val_samples=16",
    "grpo.val_batch_size=8",
    "data.train.size=64",
    "data.validation.size=16",
    "policy.dsv4.tiny.warm_start.steps=30",
]
RUNS = {
    "on policy": (5, ["grpo.val_period=5", "checkpointing.save_period=2"]),
    "reference and rollout correction": (
        2,
        [
            "loss_fn.force_on_policy_ratio=false",
            "loss_fn.reference_policy_kl_penalty=0.05",
            "policy.train_global_batch_size=8",
            "policy.dsv4.router_replay=true",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "grpo.val_period=0",
            "checkpointing.enabled=false",
        ],
    ),
}
COMPARED = {
    *(
        f"train/{name}"
        for name in ("loss", "grad_norm", "lr", "reward", "gen_kl_error", "policy_kl_error", "kl_penalty")
    ),
    *(f"train/{name}" for name in ("js_divergence_error", "token_mult_prob_error", "sampling_importance_ratio")),
    *(f"train/{name}" for name in ("approx_entropy", "probs_ratio", "probs_ratio_clamped", "probs_ratio_clamped_max")),
    *(f"train/{name}" for name in ("mean_gen_tokens_per_sample", "truncation_rate", "advantages/mean")),
    *(f"train/{name}" for name in ("global_valid_toks", "total_num_tokens", "mean_prompt_length")),
    "rollout_corr/kl",
    "training/rollout_probs_diff_max",
}
"""Must be there under both trainers; whatever else both report is compared too."""
DIFFER = {
    "train/mean_total_tokens_per_sample": "NeMo-RL counts the generated tokens, the embedded trainer the prompt too",
    "train/natural_termination_rate": "NeMo-RL counts a finished conversation, truncated or not",
}


@pytest.fixture(scope="module", autouse=True)
def checkout():
    """The tree, importable here and in the processes that Ray starts."""
    assert CHECKOUT is not None
    if CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    from nemo_rl_dsv4.integrations.nemo_rl.patches import import_nemo_rl

    import_nemo_rl()


def train(shared: Path, trainer: str, name: str, resume: Path | None = None) -> Path:
    """Run the tiny recipe under one of the trainers; returns its run folder."""
    steps, overrides = RUNS[name]
    config = load_config(
        TINY,
        [
            *SMALL,
            *overrides,
            f"grpo.max_num_steps={steps}",
            f"runtime={trainer}",
            f"policy.dsv4.tiny.cache_dir={shared}/cache",
            f"logger.log_dir={shared}/logs-{trainer}",
            f"checkpointing.checkpoint_dir={shared}/checkpoints-{trainer}",
        ],
    )
    if trainer == "embedded":
        from nemo_rl_dsv4.runtime import run as embedded

        embedded(config, resume=resume)
        return max((shared / "logs-embedded").glob("exp_*"))
    from nemo_rl_dsv4.integrations.nemo_rl.run import run

    return run(config, resume=resume)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The run folder of a recipe under a trainer; each runs once."""
    shared = tmp_path_factory.mktemp("contract")
    done: dict[tuple[str, str], Path] = {}

    def get(trainer: str, name: str) -> Path:
        if (trainer, name) not in done:
            done[trainer, name] = train(shared, trainer, name)
        return done[trainer, name]

    return get


def differences(found: Path, wanted: Path) -> dict[str, float]:
    """Largest difference of each metric that both runs report, steps compared one by one."""
    left = {record["step"]: record for record in read_steps(found / "metrics.jsonl")}
    right = {record["step"]: record for record in read_steps(wanted / "metrics.jsonl")}
    assert sorted(left) == sorted(right)
    largest: dict[str, float] = {}
    for step, record in left.items():
        for name in record.keys() & right[step].keys():
            if name.startswith(("timing/", "performance/", "refit/")) or name in DIFFER:
                continue
            a, b = record[name], right[step][name]
            assert (a is None) == (b is None), f"{name} of step {step}: {a} and {b}"
            largest[name] = max(largest.get(name, 0.0), 0.0 if a is None else abs(a - b))
    return largest


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_metrics_are_those_of_the_embedded_trainer(finished, name):
    embedded, nemo = finished("embedded", name), finished("nemo_rl", name)
    found = differences(nemo, embedded)
    assert found.keys() >= COMPARED
    print("differences:", {key: value for key, value in found.items() if value > 0})
    assert {key: value for key, value in found.items() if value > TOLERANCE} == {}
    losses = [record["train/loss"] for record in read_steps(nemo / "metrics.jsonl") if record["step"] > 0]
    assert len(losses) == RUNS[name][0]
    assert sum(loss != 0 for loss in losses) >= len(losses) // 2  # groups of equal rewards teach nothing


def test_a_resumed_run_goes_on_as_it_would_have(finished, tmp_path):
    """From step 2 of 5: steps 3 to 5 come out equal to the bit, and are checkpointed again."""
    whole = finished("nemo_rl", "on policy")
    checkpoints = whole.parents[1] / "checkpoints-nemo_rl" / whole.name
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_2", "step_4", "step_5"]
    shutil.copy(whole / "metrics.jsonl", tmp_path / "metrics.jsonl")
    for later in ("step_4", "step_5"):
        shutil.rmtree(checkpoints / later)
    assert train(whole.parents[1], "nemo_rl", "on policy", resume=whole) == whole
    assert max(differences(whole, tmp_path).values()) == 0
    assert (checkpoints / "step_5" / "manifest.json").is_file()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_nemo_rl_accepts_every_recipe(recipe):
    """Its own `load_config`, resolvers and `MasterConfig`, without this package's loader."""
    from nemo_rl.algorithms.grpo import MasterConfig  # pyright: ignore[reportMissingImports]
    from nemo_rl.utils.config import load_config as theirs  # pyright: ignore[reportMissingImports]
    from nemo_rl.utils.config import register_omegaconf_resolvers  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    values = OmegaConf.to_container(theirs(recipe), resolve=True)
    accepted = MasterConfig(**values)
    ours = load_config(recipe)
    assert accepted.grpo.num_prompts_per_step == ours.grpo.num_prompts_per_step
    assert accepted.policy["dsv4"]["train_mode"] == ours.policy.dsv4.train_mode


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_nemo_rl_accepts_every_recipe_as_it_is_handed_over(recipe):
    from nemo_rl.algorithms.grpo import MasterConfig  # pyright: ignore[reportMissingImports]

    from nemo_rl_dsv4.integrations.nemo_rl.settings import master_config, upstream_settings

    config = load_config(recipe)
    values = upstream_settings(config, log_dir="logs", checkpoint_dir="checkpoints", val_samples=512)
    master = master_config(MasterConfig, values)
    assert master.cluster["gpus_per_node"] > 0 and master.grpo.max_val_samples > 0


def test_the_interfaces_and_functions_of_this_tree_are_those_that_were_run():
    from nemo_rl_dsv4.integrations.nemo_rl.run import upstream

    found = upstream()
    assert found.policy_class.__abstractmethods__ == frozenset()
    assert found.generation_class.__abstractmethods__ == frozenset()
    assert found.refit_class.__abstractmethods__ == frozenset()


def test_registrations_leave_nemo_rl_as_it_was():
    from nemo_rl.distributed.ray_actor_environment_registry import (  # pyright: ignore[reportMissingImports]
        ACTOR_ENVIRONMENT_REGISTRY,
    )
    from nemo_rl.environments.utils import ENV_REGISTRY  # pyright: ignore[reportMissingImports]

    from nemo_rl_dsv4.integrations.nemo_rl.patches import ENVIRONMENT_CLASS, ENVIRONMENT_NAME, registrations

    before = dict(ENV_REGISTRY), dict(ACTOR_ENVIRONMENT_REGISTRY)
    with registrations():
        assert ENV_REGISTRY[ENVIRONMENT_NAME]["actor_class_fqn"] == ENVIRONMENT_CLASS
        assert ACTOR_ENVIRONMENT_REGISTRY[ENVIRONMENT_CLASS] == sys.executable
    assert before == (ENV_REGISTRY, ACTOR_ENVIRONMENT_REGISTRY)
