"""From the rollout engine's routers to the trainer's: capture, batch, replay, tally."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.grpo.metrics import rollout_train_k3
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.parallel import Meshes, ParallelSizes
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.routes import RouterMode, pack_routes
from nemo_rl_dsv4.tiny.demonstrations import DemonstrationLoss

ROWS, NEW = 6, 24
LAYERS, HASH_LAYERS = 5, 1


def roll_out(config, state, profile):
    """Rows of 52 to 57 tokens, shortest first (a micro-batch sorts its rows), with the engine's routes."""
    engine = ReferenceEngine(config, get_profile(profile), experts="grouped_mm", capture_routes=True)
    engine.update_weights(export_weights(state, profile, unquantized=torch.float32))
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 160, (28 + row,), generator=generator).tolist() for row in range(ROWS)]
    done = engine.generate(prompts, SamplingParams(NEW), seed=1)
    lengths = torch.tensor([len(prompt) + NEW for prompt in prompts])
    width = int(lengths.max())
    ids, logprobs = torch.ones(ROWS, width, dtype=torch.long), torch.zeros(ROWS, width)
    token_mask = torch.zeros(ROWS, width)
    for row, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
        ids[row, : lengths[row]] = torch.tensor(prompt + completion.tokens)
        logprobs[row, len(prompt) : lengths[row]] = torch.tensor(completion.logprobs)
        token_mask[row, len(prompt) : lengths[row]] = 1
    data = {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": token_mask,
        "sample_mask": torch.ones(ROWS),
        "generation_logprobs": logprobs,
        "routed_experts": pack_routes([c.routed_experts for c in done], lengths.tolist(), width),
    }
    return engine, data


@pytest.fixture(scope="module")
def exact(config_once, training_once):
    return roll_out(config_once, training_once, "bf16")


@pytest.fixture(scope="module")
def fp8(config_once, training_once):
    return roll_out(config_once, training_once, "vllm-hopper")[1]


def make_worker(config, state, router, profile="vllm-hopper", **kwargs):
    model = build_model(automodel_config(config), seed=1)
    model.load_state_dict(state)
    return PolicyWorker(
        model,
        Meshes(ParallelSizes(1)),
        profile=get_profile(profile),
        fake_quant=dict.fromkeys(SWITCHES, False),
        micro_batch_size=4,
        logprob_batch_size=ROWS,
        optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4, "weight_decay": 0.0}},
        router=router,
        **kwargs,
    )


def train(worker, data):
    tokens = float(data["token_mask"][:, 1:].sum())
    return worker.train(data, DemonstrationLoss(), global_valid_seqs=len(data["input_ids"]), global_valid_tokens=tokens)


def recorded(data):
    return torch.arange(data["input_ids"].shape[1]) < data["input_lengths"].unsqueeze(1) - 1


def k3(worker, data):
    t, r, mask = worker.get_logprobs(data)["logprobs"], data["generation_logprobs"], data["token_mask"] > 0
    return float(rollout_train_k3(t.double(), r.double())[mask].mean())


def test_routes_of_decoding_are_those_of_one_forward_pass(exact):
    """Prefill and every cached step recorded the right row, layer and sequence, whatever the prompt's length."""
    engine, data = exact
    routes = data["routed_experts"]
    assert routes.shape == (ROWS, int(data["input_lengths"].max()), LAYERS, 2) and routes.dtype == torch.int16
    assert torch.equal((routes != -1).all(-1).all(-1), recorded(data)) and not (routes[~recorded(data)] + 1).any()
    for row in (0, ROWS - 1):
        length = int(data["input_lengths"][row])
        engine.route_capture.start()
        engine.score(data["input_ids"][row : row + 1, :length])
        whole = engine.route_capture.take(1)[0, :-1]
        assert torch.equal(routes[row, : length - 1].sort().values, whole.sort().values)


def test_an_engine_that_records_nothing_returns_nothing(config_once, training_once):
    engine = ReferenceEngine(config_once, get_profile("bf16"), experts="grouped_mm")
    engine.update_weights(export_weights(training_once, "bf16", unquantized=torch.float32))
    (completion,) = engine.generate([[5, 6]], SamplingParams(1), seed=0)
    assert completion.routed_experts is None


def test_without_rounding_both_choose_the_same_experts(config_once, training_once, exact):
    worker = make_worker(config_once, training_once, RouterMode.COMPARE, profile="bf16")
    tally = train(worker, exact[1])["router"]
    assert tally.metrics() == {
        "router_overlap": 1.0,
        "router_no_overlap_share": 0.0,
        "router_missing_share": 0.0,
        "router_hash_mismatches": 0.0,
    }
    tokens = int(recorded(exact[1]).sum())
    assert (tally.expected, tally.compared) == (tokens * LAYERS, tokens * (LAYERS - HASH_LAYERS))


def test_replay_takes_the_fp8_rollouts_experts_and_lowers_the_mismatch(config_once, training_once, fp8):
    """C063: a trainer that does not round picks other experts than an FP8 rollout; replay removes that part of k3."""
    own = make_worker(config_once, training_once, RouterMode.COMPARE)
    replaying = make_worker(config_once, training_once, RouterMode.REPLAY)
    used: dict[int, torch.Tensor] = {}
    for name, block in replaying.model.model.layers.items():
        block.mlp.gate.register_forward_hook(
            lambda module, args, out, layer=int(name): used.__setitem__(layer, out[1].clone())
        )
    before, after = k3(own, fp8), k3(replaying, fp8)
    here = recorded(fp8)
    for layer in range(LAYERS):
        trained = used[layer].unflatten(0, here.shape)[here].sort().values
        assert torch.equal(trained, fp8["routed_experts"][:, :, layer][here].long().sort().values)
    assert after < 0.9 * before, (before, after)
    overlap = train(own, fp8)["router"].metrics()["router_overlap"]
    assert 0.5 < overlap < 1.0


def test_replay_trains_and_comparing_changes_nothing(config_once, training_once, fp8):
    data = {name: value[:2] for name, value in fp8.items()}
    plain = train(make_worker(config_once, training_once, RouterMode.OWN), data)
    compared = train(make_worker(config_once, training_once, RouterMode.COMPARE), data)
    assert "router" not in plain
    assert (compared["loss"], compared["grad_norm"]) == (plain["loss"], plain["grad_norm"])
    results = []
    for checkpointing in (False, True):
        worker = make_worker(config_once, training_once, RouterMode.REPLAY, activation_checkpointing=checkpointing)
        results.append(train(worker, data))
    assert results[0]["loss"] != plain["loss"]
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-6)
    assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-5)
    assert results[1]["router"] == pytest.approx(results[0]["router"])


def test_the_reference_policy_chooses_for_itself(config_once, training_once, fp8):
    worker = make_worker(config_once, training_once, RouterMode.REPLAY, keep_reference=True)
    own = make_worker(config_once, training_once, RouterMode.OWN)
    reference = worker.get_reference_logprobs(fp8)["reference_logprobs"]
    torch.testing.assert_close(reference, own.get_logprobs(fp8)["logprobs"], rtol=0, atol=0)
    assert not torch.equal(reference, worker.get_logprobs(fp8)["logprobs"])


def test_a_batch_without_routes_is_refused_before_any_step(config_once, training_once, fp8):
    worker = make_worker(config_once, training_once, RouterMode.REPLAY)
    without = {name: value for name, value in fp8.items() if name != "routed_experts"}
    for call in (worker.get_logprobs, lambda data: train(worker, data)):
        with pytest.raises(UserError, match="has no routed_experts"):
            call(without)
        with pytest.raises(UserError, match="every recorded id is 0"):
            call(fp8 | {"routed_experts": torch.zeros_like(fp8["routed_experts"])})
