"""`nemo-rl-dsv4 plan` on a small recipe; the full layout is planned once."""

import json
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.main import main

RECIPES = Path(__file__).parents[3] / "examples" / "configs" / "recipes" / "llm"
TINY = str(RECIPES / "grpo-dsv4-tiny-1n0g-automodel-qat.yaml")
REFERENCE = str(RECIPES / "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128.yaml")


@pytest.fixture
def plan(capsys, tmp_path):
    places = [f"logger.log_dir={tmp_path}/l", f"checkpointing.checkpoint_dir={tmp_path}/c", "runtime=embedded"]

    def run(recipe, *words):
        status = main(["plan", "--config", recipe, *places, *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The 16 x 8 H100 recipe, planned once."""
    from nemo_rl_dsv4.config import load_config
    from nemo_rl_dsv4.planning.hardware import gpu_bytes
    from nemo_rl_dsv4.planning.plan import STAGES, make_plan

    stages = []
    made = make_plan(load_config(Path(REFERENCE), ["runtime=embedded"]), gpu_bytes("h100"), stages.append)
    assert len(stages) == STAGES
    return made


def test_reference_layout(reference):
    """284 B parameters over 128 ranks: two experts a rank, everything else in 128 slices."""
    layout = reference.layout
    assert round(layout.parameters / 1e9) == 284 and round(layout.active_parameters(6) / 1e9) == 13
    by_name = {placement.name: placement for placement in layout.placements}
    experts = by_name["model.layers.20.mlp.experts.gate_and_up_projs"]
    assert (experts.shape, experts.local_shape) == ((256, 4096, 4096), (2, 4096, 4096))
    assert by_name["lm_head.weight"].local_shape == (1010, 4096)
    forward = reference.forward
    assert (forward.ids_shape, forward.logits_shape) == ((1, 384), (1, 384, 129280))
    assert forward.blocks_run == 43 and sum(block.count for block in forward.blocks) == 43
    assert reference.passes.training == 32 and reference.passes.scoring == 32
    assert set(reference.phases) == {"training", "scoring", "refit", "generation"}
    assert {"FSDP all-gather", "FSDP reduce-scatter", "expert dispatch and combine", "refit"} <= {
        kind.kind for kind in reference.traffic
    }
    assert all(kind.sent >= kind.between_nodes > 0 for kind in reference.traffic[:3])


def test_a_small_gpu_is_a_finding_with_the_key_to_change(reference):
    from nemo_rl_dsv4.config import load_config
    from nemo_rl_dsv4.planning.plan import _findings

    config = load_config(Path(REFERENCE), ["runtime=embedded"])
    found = _findings(config, reference.phases, reference.engine, 8 * 1024**3)
    training = next(line for line in found if line.startswith("training needs"))
    assert "of 8.0 GiB on every GPU" in training and "policy.dtensor_cfg.expert_parallel_size" in training
    assert not [line for line in _findings(config, reference.phases, reference.engine, 2**50) if "needs" in line]


@pytest.fixture
def forward_once(monkeypatch):
    """One forward check of the same recipe serves all plans of a test."""
    from nemo_rl_dsv4.planning import plan as module

    checks, check = [], module.check_forward

    def once(*args, **kwargs):
        if not checks:
            checks.append(check(*args, **kwargs))
        return checks[0]

    monkeypatch.setattr(module, "check_forward", once)


@pytest.mark.usefixtures("forward_once")
def test_tables_and_json_say_the_same(plan):
    status, shown, progress = plan(TINY, "--gpu", "0.001")
    assert status == 1 and "does not fit: training needs" in shown and "planning" in progress
    status, shown, _ = plan(TINY, "--json")
    document = json.loads(shown)
    assert status == 0 and document["fits"] and document["gpu"]["bytes"] is None
    assert document["forward"]["blocks"] == 5
    assert document["totals"]["training"] == sum(document["memory"]["training"].values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h1000"], "--gpu is 'h1000'; wanted one of h100"),
        (["--gpu", ""], "--gpu is ''; wanted one of h100"),
        (["policy.dsv4.gpuu=h100"], "gpuu"),
        (["policy.model_name=some/model", "policy.tokenizer.name=x"], "neither a folder nor one of deepseek-ai"),
        (["policy.dtensor_cfg.expert_parallel_size=3"], "which policy.dtensor_cfg.expert_parallel_size = 3"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_status_2(plan, words, message):
    status, shown, errors = plan(TINY, *words)
    assert status == 2 and shown == ""
    assert message in [line for line in errors.splitlines() if line.startswith("error:")][-1]
