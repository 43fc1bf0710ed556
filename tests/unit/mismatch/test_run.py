"""A whole study in one process: the aligned trainer is close, each site counts, hidden states agree."""

from pathlib import Path

import pytest
import torch

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.mismatch.rollout_file import load_rollout
from nemo_rl_dsv4.mismatch.run import (
    Model,
    add_noise,
    build_trainer,
    compare_layers,
    roll_out,
    start_engine,
    study_of,
)
from nemo_rl_dsv4.mismatch.study import EVERYTHING, FP8_PRODUCTS, NOTHING, REPLAY_FP8
from nemo_rl_dsv4.mismatch.trainers import trainers_of
from nemo_rl_dsv4.numerics import get_profile

RECIPE = Path(__file__).resolve().parents[3] / "examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml"


@pytest.fixture(scope="module")
def rolled(config_once, training_once, tmp_path_factory):
    model = Model(config_once, training_once, "vllm-hopper", rows=8)
    engine = start_engine(model)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (length,), generator=generator).tolist() for length in (9, 9, 12, 9)]
    path = tmp_path_factory.mktemp("rollout") / "rollout.safetensors"
    params = SamplingParams(12, stop_token_ids=(1,))
    roll_out(engine, model, prompts, responses=2, params=params, pad_id=2, seed=1).save(path)
    return model, engine, load_rollout(path)


@pytest.fixture(scope="module")
def studied(rolled):
    model, engine, rollout = rolled
    chosen = [
        trainer
        for trainer in trainers_of(get_profile("vllm-hopper"), "float32", routes=True, fp8=True)
        if trainer.kind in ("reference point", "replay") or (trainer.name, trainer.kind) == ("kv", "left out")
    ]
    return study_of(model, rollout, engine=engine, trainers=chosen)


def test_the_aligned_trainer_agrees_and_the_others_do_not(studied) -> None:
    aligned, plain = (studied.variant(name, "reference point").mismatch for name in (EVERYTHING, NOTHING))
    without_kv = studied.variant("kv", "left out").mismatch
    assert aligned.k3.mean < 1e-4 < plain.k3.mean
    assert without_kv.k3.mean > 10 * aligned.k3.mean
    assert (aligned.prompts, aligned.tokens > 40) == (4, True)


def test_floor_replay_positions_and_layers_are_measured(studied) -> None:
    assert studied.floor is not None and studied.floor.k3.mean < 1e-4
    assert studied.other_sums is not None and 0 < studied.other_sums.k3.mean < 0.1
    assert studied.variant("router replay", "replay").overlap > 0.9
    assert studied.positions[0]["first"] == 0
    assert sum(row["tokens"] for row in studied.positions) == studied.floor.tokens
    assert [row["layer"] for row in studied.layers] == list(range(len(studied.layers))) != []
    assert all(row["cosine"] > 0.99 for row in studied.layers)
    assert all(0 < row["other_sums"] < 0.2 for row in studied.layers)
    assert all(abs(row["fp8_products"] - row["relative_error"]) < 1e-6 for row in studied.layers)  # emulated on a CPU
    assert studied.variant(REPLAY_FP8, "replay").mismatch.k3.mean < 1e-4
    assert studied.replayed_other_sums is not None and studied.replayed_other_sums.k3.mean > 0


def test_hidden_states_of_a_trainer_that_rounds_nothing_drift(rolled) -> None:
    """They are equal for the aligned one, which alone would not show that two sides are compared."""
    model, engine, rollout = rolled
    plain = trainers_of(get_profile("vllm-hopper"), "float32", routes=False)[0]
    drift = [row["relative_error"] for row in compare_layers(engine, build_trainer(model, plain), rollout)]
    assert min(drift) > 1e-4


def test_a_bf16_study_compares_the_same_weights(config_once, training_once) -> None:
    """The engine had codes of the float32 weights, the trainer those of their BF16 values: one in thirty differed."""
    model = Model(config_once, add_noise(training_once, 1e-3), "vllm-hopper", precision="bfloat16", rows=8)
    engine = start_engine(model)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 60, (9,), generator=generator).tolist() for _ in range(4)]
    params = SamplingParams(12, stop_token_ids=(1,))
    rollout = roll_out(engine, model, prompts, responses=1, params=params, pad_id=2, seed=1)
    aligned = trainers_of(get_profile("vllm-hopper"), "bfloat16", routes=False)[1]
    assert aligned.name == EVERYTHING
    first = compare_layers(engine, build_trainer(model, aligned), rollout)[0]
    assert first["relative_error"] < 1e-4, first


def test_trainers_differ_in_one_thing() -> None:
    profile = get_profile("vllm-hopper")
    made = trainers_of(profile, "bfloat16", routes=True)
    assert [t.name for t in made[:2]] == [NOTHING, EVERYTHING] and made[-1].replay
    for trainer in made:
        if trainer.kind == "left out" and trainer.name in trainer.fake_quant:
            assert [name for name, on in trainer.fake_quant.items() if not on] == [trainer.name]
            assert not trainer.alignment
        if trainer.kind == "on its own" and trainer.name in trainer.fake_quant:
            assert [name for name, on in trainer.fake_quant.items() if on] == [trainer.name]
    in_fp8 = [t for t in trainers_of(profile, "bfloat16", routes=True, fp8=True) if t.fp8]
    assert [(t.name, t.kind, t.replay) for t in in_fp8] == [
        (FP8_PRODUCTS, "reference point", False),
        (REPLAY_FP8, "replay", True),
    ]
    assert all(all(t.fake_quant.values()) for t in in_fp8)
    in_float32 = {t.name for t in trainers_of(profile, "float32", routes=False)}
    assert "yarn_on_window_layers" in in_float32 and "silu_bf16_steps" not in in_float32


def test_noise_moves_matrices_by_their_spread() -> None:
    state = {"w": torch.randn(64, 64) * 3, "norm": torch.ones(8), "table": torch.arange(9).reshape(3, 3)}
    moved = add_noise(state, 0.01)
    assert float((moved["w"] - state["w"]).std()) == pytest.approx(0.03, rel=0.1)
    assert torch.equal(moved["norm"], state["norm"]) and torch.equal(moved["table"], state["table"])
    assert torch.equal(add_noise(state, 0.0)["w"], state["w"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "--prompts is 0"),
        (["--noise", "2"], "--noise is 2.0"),
        (["--random-prompts", "9-4"], "--random-prompts is '9-4'"),
        (["--rollout", "a", "--save-rollout", "b"], "give one of them"),
        (["policy.dsv4.tiny.seed=987654"], "has not been made yet"),
        (["--checkpoint", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mismatch", "--config", str(RECIPE), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys) -> None:
    assert main(["mismatch", "--help"]) == 0
    assert "nemo-rl-dsv4 mismatch --config" in capsys.readouterr().out
