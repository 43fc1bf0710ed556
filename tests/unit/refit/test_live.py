"""Refits of a live engine: each fault that real engines had is missed by a naive refit and not by ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_engine import Experts, FakeEngine, LayoutName

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import expected_tensors
from nemo_rl_dsv4.refit import export_weights, pack_buckets
from nemo_rl_dsv4.refit import live as live_module
from nemo_rl_dsv4.refit.live import LiveRefit
from nemo_rl_dsv4.refit.manifest import write_bucket
from nemo_rl_dsv4.refit.report import refit_metrics, require_valid
from nemo_rl_dsv4.refit.staging import StagedWeights

State = dict[str, torch.Tensor]
CAPACITY = 200_000
LAYOUTS: tuple[LayoutName, ...] = ("float", "packed", "shuffled")


@pytest.fixture(scope="module")
def expected(config_once: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return expected_tensors(
        {**config_once, "num_hidden_layers": 3, "moe_intermediate_size": 128, "n_routed_experts": 4}
    )


@pytest.fixture(scope="module")
def versions(expected: dict[str, tuple[int, ...]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Exported streams of three policy versions, all tensors different but the hash table."""
    from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL

    streams = []
    for version in range(3):
        generator = torch.Generator().manual_seed(version)
        state: State = {}
        for name, shape in expected.items():
            value = torch.randn(shape, generator=generator) * 2.0**version
            if "tid2eid" in name:
                value = torch.arange(shape[0] * shape[1]).view(shape) % 4
            slot = AUTOMODEL.slot(name)
            if slot.expert is None:
                state[slot.key] = value
                continue
            state.setdefault(slot.key, torch.empty(AUTOMODEL.stack_shape(shape, slot, 4)))
            AUTOMODEL.view(state[slot.key], slot).copy_(value)
        streams.append(list(export_weights(state, "vllm-hopper")))
    return streams


def stage(expected: dict[str, tuple[int, ...]], stream: Any, version: int) -> StagedWeights:
    staged, buffer = StagedWeights(expected), torch.empty(CAPACITY, dtype=torch.uint8)
    buckets = list(pack_buckets(stream, CAPACITY))
    for index, items in enumerate(buckets):
        last = index == len(buckets) - 1
        staged.add(write_bucket(items, buffer, version=version, index=index, last=last), buffer)
    return staged


def started(expected: Any, versions: Any, layout: LayoutName) -> FakeEngine:
    engine = FakeEngine(expected, layout)
    engine.start(versions[0])
    return engine


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_refits_equal_fresh_engines(expected: Any, versions: Any, layout: LayoutName) -> None:
    """Cases C043, C044, C050: in place, kernels on live scales, finalized once for all buckets; twice in a row."""
    engine = started(expected, versions, layout)
    pointers = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    live = LiveRefit(engine, checks="all")
    for version in (1, 2):
        engine.processed = 0
        staged = stage(expected, versions[version], version)
        report = live.apply(staged)
        assert report.findings == ()
        assert (report.version, live.version, live.valid) == (version, version, True)
        assert report.tensors == len(versions[version])
        assert report.bytes == sum(t.numel() * t.element_size() for _, t in versions[version])
        assert set(report.phases) == {"check", "load", "repoint", "verify"}
        logged = refit_metrics([report.to_dict(), report.with_receive(2.0).to_dict()])
        assert logged["findings"] == 0.0
        assert logged["bytes_load"] == logged["bytes_receive"] == report.bytes
        assert logged["seconds_receive"] == 2.0
        assert logged["seconds"] == report.seconds + 2.0
        assert engine.processed == 1
        assert engine.caches_reset == version
        assert {name: p.data_ptr() for name, p in engine.model.named_parameters()} == pointers
        fresh = FakeEngine(expected, layout)
        fresh.start(versions[version])
        assert same(engine.kernel_values(), fresh.kernel_values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stale_scale_objects_are_found_when_re_pointing_is_skipped(
    expected: Any, versions: Any, layout: LayoutName
) -> None:
    """Case C044: after a layout change the MoE kernel went on with the scale objects of before."""
    engine = started(expected, versions, layout)
    live = LiveRefit(engine, checks="all")
    for version in (1, 2):
        report = live.apply(stage(expected, versions[version], version), skip_repointing=True)
        stale = [finding for finding in report.findings if "stale" in finding]
        assert len(stale) == 2 * 3
        assert "layers.0.ffn.experts.kernel.quant_config['w1']" in " ".join(stale)
        assert not live.valid
        with pytest.raises(UserError, match=rf"refit of version {version}: .*stale.* \(and 3 more\)"):
            require_valid(report)
        require_valid(report, on_finding="warn")
        assert refit_metrics([report.to_dict()])["findings"] == len(report.findings)
    assert live.apply(stage(expected, versions[1], 3)).findings == ()


def naive(engine: FakeEngine, stream: Any) -> None:
    """Loaders on kernel parameters, then post-processing: what a refit without preparation does."""
    for name, value in stream:
        engine.write(name, value)
    engine.process_all()


@pytest.mark.parametrize("layout", ["float", "packed"])
def test_replaced_parameters_leave_a_naive_refits_kernels_on_old_scales(
    expected: Any, versions: Any, layout: LayoutName
) -> None:
    """Case C044: parameters in checkpoint layout again, loaded and processed, and a kernel that knows nothing of it."""
    engine = started(expected, versions, layout)
    for module in engine.model.modules():
        if hasattr(module, "reset"):
            quantized: Any = module
            if isinstance(module, Experts) or hasattr(module, "weight_scale_inv"):
                quantized.reset()
    naive(engine, versions[1])
    fresh = FakeEngine(expected, layout)
    fresh.start(versions[1])
    held, wanted = engine.kernel_values(), fresh.kernel_values()
    wrong = [name for name in wanted if not torch.equal(held[name], wanted[name])]
    assert [name for name in wrong if "derived" not in name] == [
        f"model.layers.{layer}.ffn.experts.{leaf}" for layer in range(3) for leaf in ("w13_weight", "w2_weight")
    ]
    assert "model.layers.0.derived" in wrong
    live = LiveRefit(engine, checks="all")
    for version in (1, 2):
        live.apply(stage(expected, versions[version], version))
    again = FakeEngine(expected, layout)
    again.start(versions[2])
    assert same(engine.kernel_values(), again.kernel_values())


def test_packed_layout_breaks_a_naive_refit(expected: Any, versions: Any) -> None:
    """Case C047 from the engine's side: raw grids do not fit into parameters that hold packed scales."""
    with pytest.raises((RuntimeError, AttributeError)):
        naive(started(expected, versions, "packed"), versions[1])


def test_shuffled_layout_breaks_a_naive_refit_silently(expected: Any, versions: Any) -> None:
    """Case C041: shuffled codes keep shape and dtype, so writing over them raised nothing."""
    engine = started(expected, versions, "shuffled")
    for module in engine.model.modules():
        if isinstance(module, Experts):
            for leaf in ("w13_weight", "w2_weight"):
                getattr(module, leaf).weight_loader = lambda p, value, expert, part: p.data[
                    expert, {"w1": slice(0, 128), "w3": slice(128, None), "w2": slice(None)}[part]
                ].copy_(value)
    for name, value in versions[1]:
        engine.write(name, value)
    fresh = FakeEngine(expected, "shuffled")
    fresh.start(versions[1])
    assert not same(engine.kernel_values(), fresh.kernel_values())
    live = LiveRefit(engine, checks="all")
    for version in (1, 2):
        assert live.apply(stage(expected, versions[version], version)).findings == ()
    again = FakeEngine(expected, "shuffled")
    again.start(versions[2])
    assert same(engine.kernel_values(), again.kernel_values())


def test_post_processing_after_each_bucket_breaks_weights(expected: Any, versions: Any) -> None:
    """Case C050: later buckets landed in parameters that were already in kernel layout."""
    engine = started(expected, versions, "shuffled")
    original = engine.load

    def per_bucket(stream: Any) -> set[str]:
        items = list(stream)
        written: set[str] = set()
        for half in (items[: len(items) // 2], items[len(items) // 2 :]):
            written |= original(half)
        return written

    engine.load = per_bucket  # type: ignore[method-assign]
    live = LiveRefit(engine, checks="all")
    for version in (1, 2):
        report = live.apply(stage(expected, versions[version], version))
        assert any("computes with other values" in finding for finding in report.findings)


Fault = Callable[[FakeEngine, list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]]


def drop(part: str) -> Fault:
    return lambda engine, items: [item for item in items if part not in item[0]]


def zero(part: str) -> Fault:
    return lambda engine, items: [(n, torch.zeros_like(t) if part in n else t) for n, t in items]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop("attn_sink"), r"layers\.0\.attn\.attn_sink: no loader wrote it"),
        (drop("hc_ffn_base"), r"hc_ffn_base: no loader wrote it"),
        (zero("tid2eid"), r"layers\.0\.ffn\.gate\.tid2eid: the engine computes with other values"),
        (zero("experts.2.w2.scale"), r"experts\.w2_weight_scale_inv: 1 scales are zero"),
        (zero("attn.wkv.weight"), r"layers\.0\.attn\.wkv\.weight or .*: the engine computes with other values"),
    ],
)
def test_what_an_engine_loses_is_found(expected: Any, versions: Any, fault: Fault, message: str) -> None:
    """Cases C040, C046 and C052: a load that reports success, sinks without a loader, a table of zeros."""
    engine = started(expected, versions, "float")
    original = engine.load
    engine.load = lambda stream: original(fault(engine, list(stream)))  # type: ignore[method-assign]
    live = LiveRefit(engine, checks="all")
    for version in (1, 2):
        report = live.apply(stage(expected, versions[version], version))
        assert any(re.search(message, finding) for finding in report.findings), report.findings[:3]
        assert not live.valid


def test_scales_that_are_no_powers_of_two_are_found(expected: Any, versions: Any) -> None:
    """Case C004: mantissa bits of float scales leak into their neighbours when a kernel packs them.

    Sent ones are refused before the engine is touched; those that its loaders make are found afterwards.
    """

    def odd(stream: Any) -> Any:
        return [(n, t * 1.5 if n.endswith("wq_b.scale") else t) for n, t in stream]

    engine = started(expected, versions, "float")
    live, before, original = LiveRefit(engine), engine.kernel_values(), engine.load
    with pytest.raises(UserError, match=r"wq_b\.scale\[0, 0\] is .*; wanted a power of two"):
        live.apply(stage(expected, odd(versions[1]), 1))
    assert same(engine.kernel_values(), before) and live.valid
    engine.load = lambda stream: original(odd(stream))  # type: ignore[method-assign]
    for version in (1, 2):
        report = live.apply(stage(expected, versions[version], version))
        assert any("wq_b.weight_scale_inv: scales are not powers of two" in finding for finding in report.findings)


def test_minus_zero_is_zero_and_nan_is_no_weight(expected: Any, versions: Any) -> None:
    """Values are compared, not their bytes; of those that differ only, by bytes, the difference is said."""
    engine = started(expected, versions, "float")
    plain, original = "layers.0.attn_norm.weight", engine.load

    def with_first(stream: Any, value: float) -> Any:
        for name, tensor in stream:
            if name == plain:
                tensor = tensor.clone()
                tensor[0] = value
            yield name, tensor

    live = LiveRefit(engine, checks="all")
    engine.load = lambda stream: original(with_first(stream, -0.0))  # type: ignore[method-assign]
    sent = list(with_first(versions[1], 0.0))
    assert live.apply(stage(expected, sent, 1)).findings == () and live.valid
    engine.load = lambda stream: original(with_first(stream, torch.nan))  # type: ignore[method-assign]
    report = live.apply(stage(expected, versions[2], 2))
    (finding,) = report.findings
    assert re.fullmatch(rf"{plain}: the engine computes with other values, largest difference nan", finding)


def test_infinite_weights_are_found_although_both_sides_have_them(expected: Any, versions: Any) -> None:
    """A scale that is a power of two and times the largest code beyond float32."""
    engine = started(expected, versions, "float")
    live = LiveRefit(engine, checks="all")
    large = [(n, torch.full_like(t, 2.0**125) if n == "layers.1.attn.wq_b.scale" else t) for n, t in versions[1]]
    (finding,) = live.apply(stage(expected, large, 1)).findings
    assert finding.startswith("layers.1.attn.wq_b.weight or ") and finding.endswith("largest difference inf")


def test_flags_are_read_from_every_device() -> None:
    on = [torch.tensor(value) for value in (True, False, True)]
    assert live_module._read(on) == [True, False, True] and live_module._read([]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_are_alike_are_compared_together(
    expected: Any, versions: Any, layout: LayoutName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, with two checksums and a wait for the GPU each, only those that differ."""
    asked: list[str] = []
    compare = live_module._compare
    monkeypatch.setattr(live_module, "_compare", lambda name, *args: asked.append(name) or compare(name, *args))
    engine = started(expected, versions, layout)
    original = engine.load
    live = LiveRefit(engine, checks="all")
    assert live.apply(stage(expected, versions[1], 1)).findings == () and asked == []
    wrong = [(n, t * 2 if n.endswith("1.attn.wq_b.scale") else t) for n, t in versions[2]]
    engine.load = lambda stream: original(iter(wrong))  # type: ignore[method-assign]
    (finding,) = live.apply(stage(expected, versions[2], 2)).findings
    assert asked == ["layers.1.attn.wq_b.weight"] and finding.startswith("layers.1.attn.wq_b.weight or ")


def test_a_set_that_has_passed_is_not_checked_again(
    expected: Any, versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passed with any scales is checked again where they must be powers of two, not the other way round."""
    counted: list[bool] = []
    check = StagedWeights._check_scales
    monkeypatch.setattr(StagedWeights, "_check_scales", lambda own, pow2: counted.append(pow2) or check(own, pow2))
    odd = [(n, t * 1.5 if n.endswith("wq_b.scale") else t) for n, t in versions[1]]
    staged = stage(expected, odd, 1)
    staged.check_complete(power_of_two=False)
    staged.check_complete(power_of_two=False)
    assert counted == [False]
    with pytest.raises(UserError, match=r"wq_b\.scale\[0, 0\] is .*; wanted a power of two"):
        staged.check_complete()
    good = stage(expected, versions[1], 1)
    for power_of_two in (True, True, False):
        good.check_complete(power_of_two=power_of_two)
    assert counted == [False, True, True]


def test_storage_that_moves_is_brought_home(expected: Any, versions: Any) -> None:
    """Case C043: captured graphs read freed memory after a loader had put new parameters in place."""
    engine = started(expected, versions, "float")
    original = engine.load
    home = dict(engine.model.named_parameters())["model.norm.weight"]

    def replacing(stream: Any) -> set[str]:
        written = original(stream)
        norm = engine.model.get_submodule("model.norm")
        norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)
        return written

    engine.load = replacing  # type: ignore[method-assign]
    live = LiveRefit(engine, checks="all")
    for version in (1, 2):
        assert live.apply(stage(expected, versions[version], version)).findings == ()
        assert dict(engine.model.named_parameters())["model.norm.weight"] is home


def test_engine_keeps_its_old_version_when_a_transfer_breaks(expected: Any, versions: Any) -> None:
    engine = started(expected, versions, "float")
    live = LiveRefit(engine, checks="all")
    live.apply(stage(expected, versions[1], 1))
    before = engine.kernel_values()
    staged, buffer = StagedWeights(expected), torch.empty(CAPACITY, dtype=torch.uint8)
    buckets = list(pack_buckets(versions[2], CAPACITY))
    for index, items in enumerate(buckets[:-1]):
        staged.add(write_bucket(items, buffer, version=2, index=index, last=False), buffer)
    with pytest.raises(UserError, match=rf"ended after {len(buckets) - 1} buckets, before the last one"):
        live.apply(staged)
    assert same(engine.kernel_values(), before)
    assert (live.version, live.valid) == (1, True)
    assert live.apply(stage(expected, versions[2], 2)).findings == ()


def test_engine_that_failed_while_loading_is_not_valid(expected: Any, versions: Any) -> None:
    engine = started(expected, versions, "float")
    original = engine.load

    def failing(stream: Any) -> set[str]:
        def broken() -> Any:
            for index, item in enumerate(stream):
                if index == 40:
                    raise RuntimeError("out of memory")
                yield item

        return original(broken())

    live = LiveRefit(engine, checks="all")
    live.apply(stage(expected, versions[1], 1))
    engine.load = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        live.apply(stage(expected, versions[2], 2))
    assert (live.version, live.valid) == (1, False)
    engine.load = original  # type: ignore[method-assign]
    assert live.apply(stage(expected, versions[2], 2)).findings == ()
    assert live.valid
