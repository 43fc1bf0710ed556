"""Receiving: every parameter once, in place, with the exported values; every defect named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, TRANSFORMERS, automodel_config, transformers_config
from nemo_rl_dsv4.model.official_names import tensor_kind
from nemo_rl_dsv4.numerics import fake_quant, get_profile
from nemo_rl_dsv4.refit import StreamTally, export_weights, pack_buckets, receive_weights
from nemo_rl_dsv4.refit.report import Checks, checked_names, require_valid

State = dict[str, torch.Tensor]
Items = list[tuple[str, torch.Tensor]]
HOPPER = get_profile("vllm-hopper")


@pytest.fixture
def engine(tiny_config: dict[str, Any]) -> torch.nn.Module:
    return DeepseekV4ForCausalLM(transformers_config(tiny_config)).eval()


def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
    kind = tensor_kind(name)
    return fake_quant(value, HOPPER.site(kind)) if kind in ("linear.weight", "expert.weight") else value


def test_two_refits_write_every_tensor_in_place(
    engine: torch.nn.Module, training_state: State, random_official: State
) -> None:
    """Cases C040 and C043: scales were all zero after a reload that reported success, and storage moved."""
    before = {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()}
    for step in (1.0, 1.25):
        moved = {k: v * step if v.is_floating_point() else v for k, v in training_state.items()}
        sender = StreamTally()
        report = receive_weights(engine, sender.watch(export_weights(moved, HOPPER, unquantized=torch.float32)))
        state = engine.state_dict()
        assert {name: tensor.data_ptr() for name, tensor in state.items()} == before
        for name, value in random_official.items():
            slot = TRANSFORMERS.slot(name)
            wanted = rounded(name, value * step if value.is_floating_point() else value)
            assert torch.equal(TRANSFORMERS.view(state[slot.key], slot), wanted), name
        quantized = sum(tensor_kind(name) in ("linear.weight", "expert.weight") for name in random_official)
        assert (report.tensors, report.quantized) == (len(random_official) + quantized, quantized)
        assert report.checksum == sender.report().checksum
        assert report.bytes == sender.report().bytes > sum(v.numel() for v in random_official.values())


@pytest.mark.parametrize("checks", ["sampled", "all"])
def test_weights_that_the_engine_did_not_keep_are_a_finding(
    engine: torch.nn.Module, training_state: State, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose head and embedding share memory goes on with the one that was written last."""
    embedding, head = engine.get_input_embeddings(), engine.get_output_embeddings()
    kept = head.weight
    head.weight = embedding.weight
    monkeypatch.setattr("nemo_rl_dsv4.refit.report.SAMPLE", 48 if checks == "all" else 1 << 20)
    try:
        report = receive_weights(engine, export_weights(training_state, HOPPER), checks=checks, version=3)
    finally:
        head.weight = kept
    assert report.findings == ("embed.weight: the engine computes with other values than were sent",)
    assert report.phase_bytes["verify"] > report.phase_bytes["receive"] == report.bytes
    with pytest.raises(UserError, match=r"refit of version 3: embed.weight: the engine computes"):
        require_valid(report)
    require_valid(report, on_finding="warn")
    clean = receive_weights(engine, export_weights(training_state, HOPPER), checks=checks)
    assert clean.findings == ()
    assert set(clean.phases) == {"receive", "load", "verify"}


def test_sampled_checks_draw_other_weights_each_time() -> None:
    names = [str(i) for i in range(500)]
    first, second = checked_names(names, "sampled", 1), checked_names(names, "sampled", 2)
    assert len(set(first)) == len(set(second)) == 48
    assert first != second
    assert checked_names(names, "all", 1) == names


def test_what_engines_have_lost_is_compared_each_time() -> None:
    """Cases C046 and C052: sinks, hash tables and the router's bias. Among 34,000 names 48 drawn ones find nothing."""
    lost = [f"layers.{i}.{end}" for i in range(3) for end in ("attn.attn_sink", "ffn.gate.tid2eid", "ffn.gate.bias")]
    names = [*lost, *(f"layers.0.ffn.experts.{i}.w1.weight" for i in range(400))]
    for version in range(5):
        checked = checked_names(names, "sampled", version)
        assert set(lost) < set(checked) and len(set(checked)) == len(checked) == 48 + len(lost)


def test_engine_computes_what_a_trainer_with_rounded_weights_computes(
    engine: torch.nn.Module, training_state: State, random_official: State, tiny_config: dict[str, Any]
) -> None:
    """Measured: 5e-6 between the two implementations after the refit; a trainer that does not round is 3 away."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM as Policy

    backend = BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch", rope_fusion=False
    )
    policy = Policy(automodel_config(tiny_config), backend=backend)
    policy.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    policy.load_state_dict(training_state)
    receive_weights(engine, export_weights(policy.state_dict(), HOPPER, unquantized=torch.float32))
    tokens = torch.randint(2, 160, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        rollout = engine(input_ids=tokens).logits
        plain = policy.eval()(input_ids=tokens).logits
        state = policy.state_dict()
        for name, value in random_official.items():
            slot = AUTOMODEL.slot(name)
            AUTOMODEL.view(state[slot.key], slot).copy_(rounded(name, value))
        qat = policy(input_ids=tokens).logits
    torch.testing.assert_close(rollout, qat, atol=2e-5, rtol=0)
    assert (rollout - plain).abs().max() > 0.1


def test_weights_arrive_in_buckets(engine: torch.nn.Module, training_state: State) -> None:
    """Case C050: post-processing ran per bucket; here completeness is judged once, over all buckets."""
    buckets = list(pack_buckets(export_weights(training_state, HOPPER), capacity_bytes=100_000))
    assert len(buckets) > 3
    report = receive_weights(engine, (item for bucket in buckets for item in bucket))
    assert report.tensors == sum(map(len, buckets))


def test_checksum_sees_a_flipped_bit_and_ignores_order(training_state: State) -> None:
    items = list(export_weights(training_state, HOPPER))

    def checksum(stream: Items) -> str:
        tally = StreamTally()
        assert len(list(tally.watch(stream))) == len(stream)
        return tally.report().checksum

    right = checksum(items)
    assert checksum(items[::-1]) == right
    items[40][1].view(torch.uint8).view(-1)[0] ^= 1
    assert checksum(items) != right


def position(items: Items, name: str) -> int:
    return [item[0] for item in items].index(name)


def without(name: str) -> Callable[[Items], Items]:
    return lambda items: [item for item in items if item[0] != name]


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Items], Items]:
    return lambda items: [(n, change(t) if n == name else t) for n, t in items]


def twice(name: str) -> Callable[[Items], Items]:
    return lambda items: [*items, items[position(items, name)], items[position(items, name) + 1]]


WEIGHT, SCALE = "layers.2.attn.wq_a.weight", "layers.2.attn.wq_a.scale"


def with_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("layers.2.attn.attn_sink"), "'layers.2.attn.attn_sink' missing"),
        (without(SCALE), r"wq_a\.weight' is torch.float8_e4m3fn and 'layers\.2\.attn\.wkv\.weight' follows"),
        (without(WEIGHT), r"unexpected tensor 'layers\.2\.attn\.wq_a\.scale'; a scale must come directly after"),
        (twice(WEIGHT), r"'layers\.2\.attn\.wq_a\.weight' arrived twice"),
        (lambda items: [*items, ("layers.2.attn.bias", torch.ones(1))], r"'layers\.2\.attn\.bias'; not in the model"),
        (changed(SCALE, with_first(float("nan"))), r"wq_a\.scale\[0, 0\] is nan"),
        (changed(SCALE, with_first(0.0)), r"wq_a\.scale\[0, 0\] is 0\.0; wanted a power of two"),
        (changed(SCALE, with_first(0.3)), r"wq_a\.scale\[0, 0\] is 0\.3.*; wanted a power of two"),
        (changed(SCALE, lambda t: torch.zeros_like(t, dtype=torch.uint8)), r"wq_a\.scale\[0, 0\] is 5\.8.*e-39"),
        (changed(SCALE, lambda t: t.repeat(2, 1)), r"wq_a\.weight: scale is \[2, 1\]; wanted \[1, 1\]"),
        (changed(WEIGHT, lambda t: t[:32]), r"wq_a\.weight' is \[32, 128\]; the model wants \[64, 128\]"),
        (
            changed(WEIGHT, lambda t: torch.full(t.shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)),
            r"wq_a\.weight\[0, 0\] is NaN",
        ),
        (changed("norm.weight", with_first(float("inf"))), r"norm\.weight\[0\] is inf"),
        (changed("norm.weight", torch.zeros_like), r"'norm\.weight' is all zero"),
        (changed(WEIGHT, torch.zeros_like), r"wq_a\.weight' is all zero"),
        (changed("layers.0.ffn.gate.tid2eid", torch.zeros_like), r"tid2eid.*all 320 expert ids are zero"),
        (changed("layers.0.ffn.gate.tid2eid", lambda t: t + 8), r"tid2eid.*from 8 to 15; wanted 0 to 7"),
        (changed("layers.0.ffn.gate.tid2eid", lambda t: t.float()), r"tid2eid' is torch.float32"),
    ],
)
def test_defects_are_named(
    engine: torch.nn.Module, training_state: State, damage: Callable[[Items], Items], message: str
) -> None:
    """Cases C027, C029, C040, C047 and C052: each of these once loaded without an error."""
    items = list(export_weights(training_state, HOPPER))
    with pytest.raises(UserError, match=message):
        receive_weights(engine, damage(items))
