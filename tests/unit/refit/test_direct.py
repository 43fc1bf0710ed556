"""Direct writes: only where two refits through the loaders have shown that they are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import Block, Experts, FakeEngine, Kernel
from test_live import expected, same, stage, started, versions  # noqa: F401  (fixtures)

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit import report
from nemo_rl_dsv4.refit.direct import DirectWrites
from nemo_rl_dsv4.refit.live import LiveRefit


def refitted(engine: FakeEngine, expected: Any, versions: Any, count: int) -> LiveRefit:  # noqa: F811
    live = LiveRefit(engine, checks="all", direct=True)
    for number in range(1, count + 1):
        assert live.apply(stage(expected, versions[number % 3], number)).findings == ()
    return live


EXPERT = "layers.1.ffn.experts.0.w1"


def with_small_codes(stream: Any) -> Any:
    """The stream with an expert whose largest code is 224 or less: its amax was rounded down to a power of two."""
    weights = dict(stream)
    weights[f"{EXPERT}.weight"] = (weights[f"{EXPERT}.weight"].float() / 2).to(torch.float8_e4m3fn)
    weights[f"{EXPERT}.scale"] = weights[f"{EXPERT}.scale"] * 2
    return list(weights.items())


@pytest.mark.parametrize("layout", ["float", "requantized"])
def test_the_third_refit_is_direct_and_equals_a_fresh_engine(
    expected: Any,  # noqa: F811
    versions: Any,  # noqa: F811
    layout: Any,
) -> None:
    versions = [with_small_codes(version) for version in versions]
    engine = started(expected, versions, layout)
    live = refitted(engine, expected, versions, 2)
    sent, held = dict(versions[2])[f"{EXPERT}.weight"], engine.memory(f"{EXPERT}.weight")
    assert held is not None and torch.equal(sent.float(), held.weight.float()) == (layout == "float")
    assert live.direct is not None and live.direct.ready and live.direct.reason is None and engine.loads == 2
    for number in (3, 4, 5):
        report = live.apply(stage(expected, versions[number % 3], number))
        assert report.findings == () and set(report.phases) == {"check", "load", "repoint", "verify"}
        fresh = FakeEngine(expected, layout)
        fresh.start(versions[number % 3])
        if layout == "float":
            assert same(engine.kernel_values(), fresh.kernel_values())
        for name in expected:
            (found, _), (wanted, _) = engine.read_back(name), fresh.read_back(name)  # type: ignore[misc]
            assert torch.equal(found, wanted), name
        experts = [{k: v for k, v in e.kernel_values().items() if "w13" in k or "w2_" in k} for e in (engine, fresh)]
        assert experts[0] and same(*experts)
    assert engine.loads == 2 and engine.caches_reset == 5


def test_what_was_decided_is_said_once(expected: Any, versions: Any) -> None:  # noqa: F811
    notes = []
    for layout in ("float", "shuffled"):
        live = LiveRefit(started(expected, versions, layout), checks="all", direct=True)  # type: ignore[arg-type]
        notes.append([live.apply(stage(expected, versions[n % 3], n)).notes for n in (1, 2, 3)])
    (first, decided, later), (kept, *nothing) = notes
    assert first == later == () and nothing == [(), ()]
    assert decided[0].endswith("weights go straight into the engine's memory from now on")
    assert kept[0].startswith("weights keep going through the engine's loaders") and "in another form" in kept[0]


@pytest.mark.parametrize(
    ("layout", "reason"), [("packed", "are packed into words"), ("shuffled", "lies in the engine in another form")]
)
def test_other_kernel_layouts_stay_with_the_loaders(
    expected: Any,  # noqa: F811
    versions: Any,  # noqa: F811
    layout: Any,
    reason: str,
) -> None:
    engine = started(expected, versions, layout)
    live = refitted(engine, expected, versions, 4)
    assert live.direct is not None and not live.direct.ready
    assert live.direct.reason is not None and reason in live.direct.reason
    assert engine.loads == 4
    fresh = FakeEngine(expected, layout)
    fresh.start(versions[4 % 3])
    assert same(engine.kernel_values(), fresh.kernel_values())


def as_fnuz(module: Any, leaf: str) -> None:
    """gfx942: the same bytes read as e4m3fnuz, under twice the scale."""
    raw = getattr(module, leaf).data.view(torch.uint8).clone()
    raw[raw == 0x80] = 0
    setattr(module, leaf, torch.nn.Parameter(raw.view(torch.float8_e4m3fnuz), requires_grad=False))
    scale = getattr(module, f"{leaf}_scale_inv").data * 2
    setattr(module, f"{leaf}_scale_inv", torch.nn.Parameter(scale, requires_grad=False))


def with_scales_in_bytes(module: Any, leaf: str) -> None:
    """Exponents as uint8, into which a copy would write numbers."""
    exponents = (getattr(module, f"{leaf}_scale_inv").data.view(torch.int32) >> 23).to(torch.uint8)
    setattr(module, f"{leaf}_scale_inv", torch.nn.Parameter(exponents, requires_grad=False))


@pytest.mark.parametrize(
    ("convert", "form"),
    [(as_fnuz, "as torch.float8_e4m3fnuz with scales in"), (with_scales_in_bytes, "with scales in torch.uint8")],
)
@pytest.mark.parametrize("checks", ["all", "sampled"])
def test_equal_values_in_other_dtypes_stay_with_the_loaders(
    expected: Any,  # noqa: F811
    versions: Any,  # noqa: F811
    convert: Any,
    form: str,
    checks: Any,
) -> None:
    """Cases C006 and C055: codes times scales are equal, but a copy into another dtype writes other values."""
    engine = FakeEngine(expected, "float")
    process_all = engine.process_all

    def process() -> None:
        process_all()
        for module in engine.model.modules():
            if isinstance(module, Experts):
                leaves = ("w13_weight", "w2_weight")
            else:
                leaves = ("weight",) if isinstance(module, Block) and hasattr(module, "weight_scale_inv") else ()
            for leaf in leaves:
                convert(module, leaf)

    engine.process_all = process  # type: ignore[method-assign]
    engine.start(versions[0])
    for module in engine.model.modules():
        if isinstance(module, Experts):
            module.kernel = Kernel(module.w13_weight_scale_inv, module.w2_weight_scale_inv)  # type: ignore[arg-type]
    live = LiveRefit(engine, checks=checks, direct=True)
    for number in (1, 2, 3, 4):
        assert live.apply(stage(expected, versions[number % 3], number)).findings == ()
    assert live.direct is not None and live.direct.reason is not None and form in live.direct.reason
    assert engine.loads == 4


def test_a_wrong_weight_that_the_observation_meets_is_a_finding(
    expected: Any,  # noqa: F811
    versions: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sampled checks may miss it; the observation, which compares all, takes it for another form at first."""
    monkeypatch.setattr(report, "SAMPLE", 0)
    engine = started(expected, versions, "float")
    refresh = engine.refresh_derived

    def losing() -> None:
        refresh()
        dict(engine.model.named_parameters())["model.layers.2.ffn_norm.weight"].data.zero_()

    engine.refresh_derived = losing  # type: ignore[method-assign]
    live = LiveRefit(engine, direct=True)
    (finding,) = live.apply(stage(expected, versions[1], 1)).findings
    assert finding.startswith("layers.2.ffn_norm.weight: the engine computes with other values") and not live.valid


def test_a_parameter_replaced_between_refits_goes_through_the_loaders(expected: Any, versions: Any) -> None:  # noqa: F811
    """Known places are in the storage of the start, over which the replaced parameter would be copied afterwards."""
    for version in range(100, 106):
        engine = started(expected, versions, "float")
        live = refitted(engine, expected, versions, 2)
        live.checks = "sampled"
        norm = engine.model.get_submodule("model.norm")
        norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)  # type: ignore[union-attr]
        norm.weight.weight_loader = lambda p, value: p.data.copy_(value)  # type: ignore[union-attr]
        assert live.apply(stage(expected, versions[0], version)).findings == ()
        fresh = FakeEngine(expected, "float")
        fresh.start(versions[0])
        assert same(engine.kernel_values(), fresh.kernel_values()) and engine.loads == 3


def derives(engine: FakeEngine, attribute: str) -> None:
    """Let the engine's loading compute a tensor beside the parameters, which nobody computes again."""
    layer = engine.model.get_submodule("model.layers.1")
    process_all = engine.process_all

    def derive() -> None:
        process_all()
        weight = engine.model.get_submodule("model.layers.1.attn.fused_wqa_wkv").weight
        setattr(layer, attribute, weight.data.float().sum(0))

    engine.process_all = derive  # type: ignore[method-assign]


def test_a_tensor_that_follows_the_weights_unnoticed_keeps_the_loaders(expected: Any, versions: Any) -> None:  # noqa: F811
    """An engine that derives something at load time which nobody recomputes would go on with the old one."""
    engine = started(expected, versions, "float")
    derives(engine, "absorbed")
    live = refitted(engine, expected, versions, 3)
    assert live.direct is not None and live.direct.reason is not None
    assert live.direct.reason.startswith("model.layers.1.absorbed (1 in all) changes with the weights")
    assert engine.loads == 3


def test_a_weight_under_two_names_is_one(expected: Any, versions: Any) -> None:  # noqa: F811
    """vLLM's expert layer holds the router as well; its second name is no memory that changes without being sent."""
    engine = started(expected, versions, "float")
    engine.model.get_submodule("model.layers.1").router = engine.model.get_submodule("model.layers.1.ffn.gate")
    names = [name for name, _ in engine.model.named_parameters(remove_duplicate=False) if "gate.weight" in name]
    assert "model.layers.1.ffn.gate.weight" in names
    assert "model.layers.1.router.weight" in dict(engine.model.named_parameters(remove_duplicate=False))
    live = refitted(engine, expected, versions, 3)
    assert live.direct is not None and (live.direct.reason, live.direct.ready, engine.loads) == (None, True, 2)


def test_weights_that_share_a_storage_are_told_apart() -> None:
    """Two weights in one buffer, and a third of which nothing is ever sent; half of another one is."""
    buffer, other = torch.arange(12.0), torch.arange(8.0).view(2, 4)
    model = torch.nn.Module()
    for name, part in {**dict(zip("abc", buffer.split(4), strict=True)), "d": other}.items():
        model.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))
    direct = DirectWrites(SimpleNamespace(model=model))  # type: ignore[arg-type]
    views = {"a": model.a.data, "b": model.b.data, "d": model.d.data[:, :2], "again": model.d.data[:, :2]}
    direct._places = {name: SimpleNamespace(weight=view, scale=None) for name, view in views.items()}  # type: ignore[misc]
    before = direct._remaining()
    assert set(before) == {"c", "d"}
    model.a.data.add_(1)
    model.d.data[:, :2] += 1
    assert direct._remaining() == before  # what was sent may change
    for name, part in (("c", model.c.data), ("d", model.d.data[:, 2:])):
        part.add_(1)
        after = direct._remaining()
        assert {found for found in before if after[found] != before[found]} == {name}
        before = after
    direct._places["wide"] = SimpleNamespace(weight=model.c.data.view(torch.float64), scale=None)  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"a weight of torch.float64 lies in c, which is torch.float32"):
        direct._remaining()
    direct._places = {"away": SimpleNamespace(weight=torch.zeros(2), scale=None)}  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"a weight of shape \[2\] lies in no parameter"):
        direct._remaining()


def test_padding_that_the_loaders_change_keeps_the_loaders(expected: Any, versions: Any) -> None:  # noqa: F811
    engine = started(expected, versions, "float")
    head = engine.model.get_submodule("lm_head")
    padded = torch.zeros(head.weight.shape[0] + 4, *head.weight.shape[1:], dtype=head.weight.dtype)
    head.weight = torch.nn.Parameter(padded, requires_grad=False)
    fill = iter((0.0, 1.0, 2.0))

    def load(target: torch.nn.Parameter, value: torch.Tensor) -> None:
        target.data[: len(value)].copy_(value)
        target.data[len(value) :] = next(fill)

    head.weight.weight_loader = load  # type: ignore[attr-defined]
    live = refitted(engine, expected, versions, 3)
    assert live.direct is not None and live.direct.reason == "lm_head.weight changes where nothing was sent"


def test_constant_padding_is_left_as_it_is(expected: Any, versions: Any) -> None:  # noqa: F811
    engine = started(expected, versions, "float")
    head = engine.model.get_submodule("lm_head")
    rows = head.weight.shape[0]
    padded = torch.full((rows + 4, *head.weight.shape[1:]), -3.0, dtype=head.weight.dtype)
    head.weight = torch.nn.Parameter(padded, requires_grad=False)
    head.weight.weight_loader = lambda p, v: p.data[: len(v)].copy_(v)  # type: ignore[attr-defined]
    live = refitted(engine, expected, versions, 3)
    assert live.direct is not None and live.direct.ready and engine.loads == 2
    assert bool((head.weight[rows:] == -3.0).all())


def test_a_direct_write_that_fails_goes_back_to_the_loaders(
    expected: Any,  # noqa: F811
    versions: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = started(expected, versions, "float")
    live = refitted(engine, expected, versions, 2)
    assert live.direct is not None
    live.direct._places.pop("layers.1.attn.wq_a.weight")
    with pytest.raises(Exception, match=r"'layers.1.attn.wq_a.weight' has no known place"):
        live.apply(stage(expected, versions[0], 3))
    assert not live.valid and live.direct.reason is not None and "a direct write failed" in live.direct.reason
    assert live.apply(stage(expected, versions[0], 4)).findings == () and live.valid and engine.loads == 3


def test_a_wrong_place_is_found_by_the_verification(expected: Any, versions: Any) -> None:  # noqa: F811
    engine = started(expected, versions, "float")
    live = refitted(engine, expected, versions, 2)
    assert live.direct is not None
    places = live.direct._places
    names = ("layers.1.ffn.experts.0.w1.weight", "layers.1.ffn.experts.1.w1.weight")
    places[names[0]], places[names[1]] = places[names[1]], places[names[0]]
    findings = live.apply(stage(expected, versions[0], 3)).findings
    assert len(findings) == 2 and all("the engine computes with other values" in finding for finding in findings)


def test_switched_off_nothing_is_observed(expected: Any, versions: Any) -> None:  # noqa: F811
    engine = started(expected, versions, "float")
    live = LiveRefit(engine)
    for number in (1, 2, 3):
        live.apply(stage(expected, versions[number % 3], number))
    assert live.direct is None and engine.loads == 3


def test_weights_that_have_not_changed_yet_prove_nothing(expected: Any, versions: Any) -> None:  # noqa: F811
    """The first refits may bring what the engine holds: nothing that follows from the weights moves then."""
    engine = started(expected, versions, "float")
    derives(engine, "absorbed_cache")
    engine.process_all()
    live = LiveRefit(engine, checks="all", direct=True)
    for number, version in enumerate((0, 0, 0), start=1):
        live.apply(stage(expected, versions[version], number))
    assert live.direct is not None and engine.loads == 2  # the third changes nothing, and may go direct
    live.apply(stage(expected, versions[1], 4))
    assert engine.loads == 3 and live.direct.reason is not None and "absorbed_cache" in live.direct.reason


def test_a_weight_that_changes_for_the_first_time_goes_through_the_loaders(expected: Any, versions: Any) -> None:  # noqa: F811
    def without(version: Any, kept: str) -> Any:
        return [(name, dict(versions[0])[name] if name == kept else value) for name, value in version]

    frozen = "norm.weight"
    engine = started(expected, versions, "float")
    live = LiveRefit(engine, checks="all", direct=True)
    for number, version in enumerate((1, 2, 0, 1), start=1):
        live.apply(stage(expected, without(versions[version], frozen), number))
    assert engine.loads == 2 and live.direct is not None and live.direct.ready
    live.apply(stage(expected, versions[2], 5))
    assert engine.loads == 3
    live.apply(stage(expected, versions[0], 6))
    assert engine.loads == 3 and live.valid
    fresh = FakeEngine(expected, "float")
    fresh.start(versions[0])
    assert same(engine.kernel_values(), fresh.kernel_values())


def test_findings_of_a_direct_refit_send_the_next_one_through_the_loaders(expected: Any, versions: Any) -> None:  # noqa: F811
    engine = started(expected, versions, "float")
    live = refitted(engine, expected, versions, 2)
    assert live.direct is not None
    places = live.direct._places
    names = ("layers.1.ffn.experts.0.w1.weight", "layers.1.ffn.experts.1.w1.weight")
    places[names[0]], places[names[1]] = places[names[1]], places[names[0]]
    report = live.apply(stage(expected, versions[0], 3))
    assert len(report.findings) == 2 and "a direct refit left" in report.notes[0]
    assert live.apply(stage(expected, versions[1], 4)).findings == () and engine.loads == 3 and live.valid


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x")])
def test_an_engine_that_cannot_be_observed_keeps_its_good_refit(
    expected: Any,  # noqa: F811
    versions: Any,  # noqa: F811
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = started(expected, versions, "float")

    def memory(_: str) -> None:
        raise error

    monkeypatch.setattr(engine, "memory", memory)
    live = LiveRefit(engine, checks="all", direct=True)
    report = live.apply(stage(expected, versions[1], 1))
    assert live.valid and report.findings == () and f"could not be found ({type(error).__name__}" in report.notes[0]
