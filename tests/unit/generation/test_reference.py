"""The CPU rollout engine: cached decoding, weights through the exporter, and agreement with the trainer."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES, install_numerics
from nemo_rl_dsv4.model.token_logprobs import token_logprobs
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.refit.wire import from_wire, to_wire


@pytest.fixture(scope="module")
def engine(config_once, training_once):
    engine = ReferenceEngine(
        config_once, get_profile("vllm-hopper"), experts="grouped_mm", decode=lambda ids: " ".join(map(str, ids))
    )
    engine.update_weights(export_weights(training_once, "vllm-hopper", unquantized=torch.float32))
    return engine


def prompt(length, seed=0):
    return torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def trainer_logprobs(config, state, ids, switches):
    model = build_model(automodel_config(config), seed=0)
    model.load_state_dict(state)
    install_numerics(model, get_profile("vllm-hopper"), switches)
    with torch.no_grad():
        return token_logprobs(model(ids).logits, torch.roll(ids, -1, 1))[:, :-1]


def decode_and_score(engine):
    """Logprobs of cached decoding and of one forward pass over the same tokens, past ratio-4 and ratio-128 windows."""
    start = prompt(120)
    (completion,) = engine.generate([start], SamplingParams(20), seed=1)
    scored = engine.score(torch.tensor([start + completion.tokens]))[0, len(start) :]
    return torch.tensor(completion.logprobs), scored


@pytest.fixture(scope="module")
def plain_engine(config_once, training_once):
    """Rounds nothing, so a last bit stays a last bit."""
    engine = ReferenceEngine(config_once, get_profile("bf16"), experts="grouped_mm")
    engine.update_weights(export_weights(training_once, "bf16", unquantized=torch.float32))
    return engine


def test_cached_decoding_equals_one_forward_pass(plain_engine):
    decoded, scored = decode_and_score(plain_engine)
    torch.testing.assert_close(decoded, scored, rtol=0, atol=5e-5)  # measured 3.6e-6


def test_cached_decoding_rounds_like_one_forward_pass(engine):
    """FP8 codes that flip on a last-bit difference move single logprobs of random weights by up to 0.025."""
    decoded, scored = decode_and_score(engine)
    assert (decoded - scored).abs().mean() < 2e-2  # measured 6.9e-3; without KV rounding in one of the two, 0.14


def test_the_trainer_agrees_when_it_rounds_and_not_when_it_does_not(engine, config_once, training_once):
    ids = torch.tensor([prompt(140, seed) for seed in range(4)])
    rollout = engine.score(ids)[:, 1:]
    qat = (trainer_logprobs(config_once, training_once, ids, dict.fromkeys(SWITCHES, True)) - rollout).abs()
    plain = (trainer_logprobs(config_once, training_once, ids, dict.fromkeys(SWITCHES, False)) - rollout).abs()
    assert qat.mean() * 10 < plain.mean(), (qat.mean(), plain.mean())


@pytest.mark.parametrize("switch", sorted(set(SWITCHES) - {"indexer"}))
def test_each_site_group_is_needed_for_agreement(engine, config_once, training_once, switch):
    """Leaving out one group of sites in the trainer must be visible; else that seam rounds nothing."""
    ids = torch.tensor([prompt(140, seed) for seed in range(2)])
    rollout = engine.score(ids)[:, 1:]
    on = dict.fromkeys(SWITCHES, True)
    aligned = (trainer_logprobs(config_once, training_once, ids, on) - rollout).abs().mean()
    without = (trainer_logprobs(config_once, training_once, ids, {**on, switch: False}) - rollout).abs().mean()
    assert without > 3 * aligned, (without, aligned)


def test_unequal_prompts_in_one_batch_give_what_they_give_alone(plain_engine):
    engine = plain_engine
    prompts = [prompt(30, 1), prompt(34, 2), prompt(41, 3)]
    params = SamplingParams(6)
    together = engine.generate(prompts, params, seed=9)
    alone = [engine.generate([p], params, seed=9, request_ids=[i])[0] for i, p in enumerate(prompts)]
    assert [c.tokens for c in together] == [c.tokens for c in alone]


def test_batches_hold_similar_lengths_and_respect_the_limit(engine):
    batches = list(engine._batches([50, 10, 12, 200, 11, 49]))
    assert batches == [[1, 4, 2], [5, 0], [3]]


def test_stopping(engine):
    free = engine.generate([prompt(30)], SamplingParams(8), seed=2)[0]
    assert free.truncated and len(free.tokens) == 8 == len(free.logprobs)
    stop_at = free.tokens[3]
    stopped = engine.generate([prompt(30)], SamplingParams(8, stop_token_ids=(stop_at,)), seed=2)[0]
    assert stopped.tokens == free.tokens[: free.tokens.index(stop_at) + 1] and not stopped.truncated
    text = f"{free.tokens[1]} {free.tokens[2]}"
    by_string = engine.generate([prompt(30)], SamplingParams(8, stop_strings=(text,)), seed=2)[0]
    assert by_string.tokens == free.tokens[:3] and not by_string.truncated


def test_sequences_end_at_the_length_limit(engine, monkeypatch):
    """policy.max_total_sequence_length used to be checked nowhere on the rollout's side."""
    monkeypatch.setattr(engine, "max_length", 36)
    short, long = engine.generate([prompt(30), prompt(34)], SamplingParams(8), seed=2)
    assert (len(short.tokens), len(long.tokens)) == (6, 2)
    assert short.truncated and long.truncated


def test_errors(engine, config_once):
    with pytest.raises(UserError, match="no weights yet"):
        ReferenceEngine(config_once, get_profile("bf16")).generate([[5]], SamplingParams(1), seed=0)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        engine.generate([[5], []], SamplingParams(1), seed=0)
    with pytest.raises(UserError, match="a prompt of 4096 tokens leaves no room for a response"):
        engine.generate([[5] * 4096], SamplingParams(10), seed=0)


def test_a_broken_refit_leaves_the_engine_on_its_old_weights(config_once, training_once):
    """An engine whose refit failed half-way must not answer from mixed weights."""
    engine = ReferenceEngine(config_once, get_profile("vllm-hopper"))
    stream = list(export_weights(training_once, "vllm-hopper", unquantized=torch.float32))
    engine.update_weights(stream)
    before = engine.generate([[5]], SamplingParams(1), seed=0)[0].logprobs
    other = [(name, value * 2 if value.dtype == torch.float32 else value) for name, value in stream]
    with pytest.raises(UserError, match="missing"):
        engine.update_weights(other[:-1])
    with pytest.raises(UserError, match=r"received checksum \w{16}, the policy sent 0123456789abcdef"):
        engine.update_weights(other, "0123456789abcdef")
    assert engine.generate([[5]], SamplingParams(1), seed=0)[0].logprobs == before
    engine.update_weights(other)
    assert engine.generate([[5]], SamplingParams(1), seed=0)[0].logprobs != before


def test_the_wire_keeps_every_byte(training_once):
    stream = list(export_weights(training_once, "vllm-hopper"))
    for (name, tensor), (back_name, back) in zip(stream, from_wire(to_wire(stream)), strict=True):
        assert name == back_name and tensor.dtype == back.dtype and tensor.shape == back.shape
        assert torch.equal(tensor.contiguous().view(torch.uint8), back.contiguous().view(torch.uint8))


def test_a_short_payload_is_named():
    (item,) = to_wire([("norm.weight", torch.ones(4))])
    with pytest.raises(UserError, match="'norm.weight' carries 12 bytes; float32 \\[4\\] needs 16"):
        list(from_wire([item._replace(payload=item.payload[:12])]))
