"""The worker extension against a stand-in for vLLM's modules: what it patches, restores, refreshes and refuses."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.official_names import expected_tensors
from nemo_rl_dsv4.numerics.packing import pack_ue8m0
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.refit.transport.broadcast import BroadcastSender
from nemo_rl_dsv4.refit.transport.channel import listen, open_channel
from nemo_rl_dsv4.refit.transport.file import write_folder
from nemo_rl_dsv4.refit.transport.shared import SharedSender
from nemo_rl_dsv4.refit.vllm_extension import RefitWorkerExtension
from nemo_rl_dsv4.refit.vllm_layout import VllmLayout, kernel_scale, place_of
from nemo_rl_dsv4.refit.vllm_symbols import check_vllm
from nemo_rl_dsv4.refit.worker_calls import answer, call_workers, results

CAPACITY = 200_000
SKIPPED = {"_expert_map", "e_score_correction_bias"}


@pytest.fixture
def small(config_once: dict[str, Any]) -> dict[str, Any]:
    return {**config_once, "num_hidden_layers": 2, "moe_intermediate_size": 128, "n_routed_experts": 4}


def weights(config: dict[str, Any], version: int) -> list[tuple[str, torch.Tensor]]:
    from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL

    generator = torch.Generator().manual_seed(version)
    state: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(config).items():
        value = torch.randn(shape, generator=generator)
        if "tid2eid" in name:
            value = torch.arange(shape[0] * shape[1]).view(shape) % 4
        slot = AUTOMODEL.slot(name)
        if slot.expert is None:
            state[slot.key] = value
        else:
            state.setdefault(slot.key, torch.empty(AUTOMODEL.stack_shape(value.shape, slot, 4)))
            AUTOMODEL.view(state[slot.key], slot).copy_(value)
    return list(export_weights(state, "vllm-hopper"))


class Beside(threading.Thread):
    """A call beside the test."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: tuple[str, Any] | None = None
        self.start()

    def run(self) -> None:
        self._outcome = answer(self._call)

    def outcome(self) -> Any:
        """What it returned, or raise what it raised."""
        self.join(30)
        assert self._outcome is not None
        return results("call", [self._outcome])[0]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


class StandIn:
    """vLLM's modules and one worker, around a `FakeEngine`."""

    def __init__(self, config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.skipped, self.calls = set(SKIPPED), []
        self.fake = FakeEngine(expected_tensors(config))
        self.fake.start(weights(config, 0))
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}), encoding="utf-8")
        model: Any = self.fake.model
        model.load_weights = self._load
        self.fail_at: int | None = None
        first = model.get_submodule("model.layers.0")
        first.hc_mult, first.hidden_size = config["hc_mult"], config["hidden_size"]
        first.hc_attn_fn_broadcast = self._broadcast(first)
        self.first = first

        layerwise = types.ModuleType("layerwise")
        exec(
            "def initialize_layerwise_reload(model): hook('begin')\n"
            "def finalize_layerwise_reload(*args, **kwargs): hook('finish')\n"
            "def finalize_layerwise_processing(model, model_config): pass\n"
            "LAYERWISE_INFO = {}\n",
            layerwise.__dict__,
        )
        layerwise.__dict__["hook"] = lambda event: self.calls.append((event, "attn_sink" in self.skipped))
        parallel = SimpleNamespace(
            get_tensor_model_parallel_rank=lambda: 0,
            get_tensor_model_parallel_world_size=lambda: 1,
            get_ep_group=lambda: SimpleNamespace(rank_in_group=0),
        )
        worker = type("Worker", (), dict.fromkeys(("reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up"), print))
        config_module = types.ModuleType("config")
        exec(
            "from contextlib import contextmanager\n@contextmanager\ndef set_current_vllm_config(vllm_config): yield\n",
            config_module.__dict__,
        )
        reload = "vllm.model_executor.model_loader.reload"
        self.modules = {
            "vllm": SimpleNamespace(__version__="0.26.0"),
            f"{reload}.layerwise": layerwise,
            f"{reload}.meta": SimpleNamespace(SKIP_TENSORS=self.skipped),
            "vllm.config": config_module,
            "vllm.distributed.parallel_state": parallel,
            "vllm.v1.worker.gpu_worker": SimpleNamespace(Worker=worker),
        }
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        hf_config = SimpleNamespace(model_type="deepseek_v4")
        own: Any = RefitWorkerExtension()
        own.model_runner = SimpleNamespace(get_model=lambda: model)
        own.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=hf_config, hf_overrides={}, model=str(folder)),
            parallel_config=SimpleNamespace(enable_expert_parallel=False),
        )
        own.reset_mm_cache = own.reset_encoder_cache = lambda: self.calls.append(("reset", False))
        self.worker = own

    @staticmethod
    def _broadcast(layer: Any) -> torch.Tensor:
        return layer.hc_attn_fn.data.view(-1, layer.hc_mult, layer.hidden_size).sum(1)

    def _load(self, stream: Any) -> set[str]:
        def watched() -> Any:
            for index, item in enumerate(stream):
                if index == self.fail_at:
                    raise RuntimeError("illegal memory access")
                yield item

        written = self.fake.load(watched())
        self.first.hc_attn_fn_broadcast = self._broadcast(self.first)  # 0.26: a new tensor
        return written


@pytest.fixture
def standin(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(small, tmp_path, monkeypatch)


def test_two_refits_through_the_worker(standin: StandIn, small: dict[str, Any], tmp_path: Path) -> None:
    """Case C046: sinks are written by a bare copy_; they are skipped by the reload, and only during it."""
    worker, derived = standin.worker, standin.first.hc_attn_fn_broadcast
    found = worker.dsv4_refit_prepare("all")
    assert found["references"] == 4
    assert found["parameters"] == len(dict(standin.fake.model.named_parameters()))
    for version in (1, 2):
        write_folder(weights(small, version), tmp_path / "buckets", capacity_bytes=CAPACITY, version=version)
        report = worker.dsv4_refit_from_folder(str(tmp_path / "buckets"), timeout=1)
        assert report["findings"] == []
        assert worker.dsv4_refit_version() == {"version": version, "valid": True}
        assert standin.calls[-4:] == [("begin", True), ("finish", True), ("reset", False), ("reset", False)]
        assert standin.skipped == SKIPPED
        assert standin.first.hc_attn_fn_broadcast is derived
        assert torch.equal(derived, standin._broadcast(standin.first))


def test_the_third_refit_leaves_the_loaders_out_when_asked_to(
    standin: StandIn, small: dict[str, Any], tmp_path: Path
) -> None:
    worker, derived = standin.worker, standin.first.hc_attn_fn_broadcast
    worker.dsv4_refit_prepare("all", True)
    for version in (1, 2, 3, 4):
        write_folder(weights(small, version), tmp_path / "buckets", capacity_bytes=CAPACITY, version=version)
        standin.calls.clear()
        report = worker.dsv4_refit_from_folder(str(tmp_path / "buckets"), timeout=1)
        assert report["findings"] == [] and report["version"] == version
        assert (("begin", True) in standin.calls) == (version < 3)
        assert standin.first.hc_attn_fn_broadcast is derived
        assert torch.equal(derived, standin._broadcast(standin.first))
    assert worker._dsv4_refit is not None and worker._dsv4_refit.direct is not None
    assert worker._dsv4_refit.direct.ready


def test_two_refits_from_a_sender_of_this_host(standin: StandIn, small: dict[str, Any]) -> None:
    sender = SharedSender(capacity_bytes=CAPACITY, timeout=10)
    standin.worker.dsv4_refit_prepare("all")
    try:
        for version in (1, 2):
            reports: list[Any] = []
            address = (sender.address.socket, sender.address.key)
            engine = threading.Thread(
                target=lambda to=reports, at=address: to.append(standin.worker.dsv4_refit_from_sender(*at, timeout=10))
            )
            engine.start()
            sent = sender.send(iter(weights(small, version)), version=version)
            engine.join(30)
            assert (reports[0]["findings"], reports[0]["version"]) == ([], version)
            assert reports[0]["checksum"] == sent.checksum
    finally:
        sender.close()


def test_two_refits_from_the_sender_on_this_gpu(standin: StandIn, small: dict[str, Any]) -> None:
    sender = SharedSender(capacity_bytes=CAPACITY, timeout=10)
    standin.worker.dsv4_refit_prepare("all")
    address = (sender.address.socket, sender.address.key)
    try:
        with pytest.raises(UserError, match=r"this worker is on GPU cpu; senders are on \['GPU-1'\]"):
            standin.worker.dsv4_refit_from_senders({"GPU-1": address})
        for version in (1, 2):
            engine = Beside(lambda: standin.worker.dsv4_refit_from_senders({"cpu": address}, timeout=10))
            sender.send(iter(weights(small, version)), version=version)
            report = engine.outcome()
            assert (report["findings"], report["version"]) == ([], version)
            assert {"receive", "load", "verify"} <= report["phases"].keys()
    finally:
        sender.close()


def test_two_refits_by_broadcast_and_a_lost_sender(standin: StandIn, small: dict[str, Any]) -> None:
    worker, store = standin.worker, listen(timeout=10)
    worker.dsv4_refit_prepare("all")
    with pytest.raises(UserError, match="call dsv4_refit_join before"):
        worker.dsv4_refit_from_broadcast(1)
    joining = Beside(lambda: worker.dsv4_refit_join([("127.0.0.1", store.port, 1, 2)], timeout=2))
    sender = BroadcastSender(open_channel(store, rank=0, size=2, device="cpu", timeout=10), capacity_bytes=CAPACITY)
    joining.outcome()
    for version in (1, 2):
        engine = Beside(lambda version=version: worker.dsv4_refit_from_broadcast(version))
        sent = sender.send(iter(weights(small, version)), version=version)
        report = engine.outcome()
        assert (report["findings"], report["checksum"]) == ([], sent.checksum)
    before = {name: parameter.clone() for name, parameter in standin.fake.model.named_parameters()}
    with pytest.raises(UserError, match=r"nothing from the sender for 2 s"):
        worker.dsv4_refit_from_broadcast(3)
    assert worker.dsv4_refit_version() == {"version": 2, "valid": True}
    for name, parameter in standin.fake.model.named_parameters():
        assert torch.equal(raw(parameter), raw(before[name])), name


def test_a_refit_through_a_channel_of_its_own(standin: StandIn, small: dict[str, Any]) -> None:
    """As a run does it: nothing is left of the channel, and a sender that goes leaves the old weights."""
    worker = standin.worker
    worker.dsv4_refit_prepare("all")
    for version in (1, 2):
        store = listen(timeout=10)
        places = {"cpu": ("127.0.0.1", store.port, 1, 2)}
        engine = Beside(
            lambda places=places, version=version: worker.dsv4_refit_by_broadcast(places, version, timeout=10.0)
        )
        channel = open_channel(store, rank=0, size=2, device="cpu", timeout=10)
        BroadcastSender(channel, capacity_bytes=CAPACITY).send(iter(weights(small, version)), version=version)
        assert engine.outcome()["findings"] == []
        channel.close()
    store = listen(timeout=10)
    places = {"cpu": ("127.0.0.1", store.port, 1, 2)}
    engine = Beside(lambda: worker.dsv4_refit_by_broadcast(places, 3, timeout=10.0))
    channel = open_channel(store, rank=0, size=2, device="cpu", timeout=10)
    channel.close()
    del channel, store
    with pytest.raises(UserError, match="refit: (nothing from the sender|the store of the broadcast)"):
        engine.outcome()
    assert worker.dsv4_refit_version() == {"version": 2, "valid": True}


def test_workers_answer_all_before_one_raises(standin: StandIn) -> None:
    """vLLM's own call raises at the first failure and leaves the other workers' answers for the next call."""
    worker, calls = standin.worker, []

    class Engine:
        def collective_rpc(self, method: str, timeout: Any = None, args: tuple = (), kwargs: Any = None) -> list[Any]:
            calls.append(method)
            return [getattr(worker, method)(*args, **(kwargs or {})), ("result", 5)]

    with pytest.raises(UserError, match="worker 0: refit: call dsv4_refit_prepare once"):
        call_workers(Engine(), "dsv4_refit_from_folder", "nowhere")
    with pytest.raises(RuntimeError, match=r"worker 0: dsv4_refit_prepare failed: TypeError: .*unexpected"):
        call_workers(Engine(), "dsv4_refit_prepare", unexpected=1)
    assert call_workers(Engine(), "dsv4_refit_prepare")[1] == 5
    assert calls == ["dsv4_answer"] * 3


def test_a_failed_load_restores_vllms_state(standin: StandIn, small: dict[str, Any], tmp_path: Path) -> None:
    worker = standin.worker
    worker.dsv4_refit_prepare("all")
    write_folder(weights(small, 1), tmp_path / "buckets", capacity_bytes=CAPACITY, version=1)
    standin.fail_at = 30
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.dsv4_refit_from_folder(str(tmp_path / "buckets"), timeout=1)
    assert standin.skipped == SKIPPED
    assert standin.calls[-1] == ("finish", True)
    assert worker.dsv4_refit_version() == {"version": None, "valid": False}
    standin.fail_at = None
    assert worker.dsv4_refit_from_folder(str(tmp_path / "buckets"), timeout=1)["findings"] == []
    assert worker.dsv4_refit_version() == {"version": 1, "valid": True}


def test_padding_heads_have_no_sink_after_a_refit(standin: StandIn, small: dict[str, Any], tmp_path: Path) -> None:
    """A level-2 sleep forgets the -inf of heads that only pad a kernel's tile, and no loader writes it again."""
    owner = standin.fake.model.get_submodule("model.layers.0.attn")
    heads = small["num_attention_heads"]
    owner.attn_sink = torch.nn.Parameter(torch.zeros(heads + 4), requires_grad=False)
    original = standin.fake.write

    def narrow(name: str, value: torch.Tensor) -> str:
        if name == "layers.0.attn.attn_sink":
            owner.attn_sink.data[:heads].copy_(value)
            return f"model.{name}"
        return original(name, value)

    standin.fake.write = narrow  # type: ignore[method-assign]
    standin.worker.dsv4_refit_prepare("all")
    for version in (1, 2):
        owner.attn_sink.data.fill_(5.0)
        write_folder(weights(small, version), tmp_path / "buckets", capacity_bytes=CAPACITY, version=version)
        assert standin.worker.dsv4_refit_from_folder(str(tmp_path / "buckets"), timeout=1)["findings"] == []
        assert bool(owner.attn_sink.data[heads:].isneginf().all())


def test_kernels_whose_scales_cannot_be_found_are_refused(standin: StandIn) -> None:
    for module in standin.fake.model.modules():
        if hasattr(module, "kernel"):
            module.kernel = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="no object of the MoE kernels holds w13_weight_scale_inv"):
        standin.worker.dsv4_refit_prepare()


def test_refit_before_prepare_and_other_models_are_refused(standin: StandIn) -> None:
    with pytest.raises(UserError, match="call dsv4_refit_prepare once"):
        standin.worker.dsv4_refit_from_folder("nowhere")
    standin.worker.vllm_config.model_config.hf_config.model_type = "qwen3"
    with pytest.raises(UserError, match="model_type 'qwen3'; wanted 'deepseek_v4'"):
        standin.worker.dsv4_refit_prepare()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m["vllm"], "__version__", "0.34.1"), r"vLLM is 0\.34\.1; the refit knows 0\.25 to 0\.33"),
        (lambda m: setattr(m["vllm"], "__version__", "dev"), "calls its version 'dev'"),
        (
            lambda m: delattr(m["vllm.model_executor.model_loader.reload.meta"], "SKIP_TENSORS"),
            r"reload\.meta\.SKIP_TENSORS is gone",
        ),
        (
            lambda m: setattr(m["vllm.config"], "set_current_vllm_config", lambda config: None),
            r"set_current_vllm_config takes \('config',\); wanted \('vllm_config',\)",
        ),
        (lambda m: delattr(m["vllm.v1.worker.gpu_worker"].Worker, "wake_up"), r"Worker\.wake_up is gone"),
    ],
)
def test_moved_symbols_are_named(standin: StandIn, change: Callable[[Any], None], message: str) -> None:
    check_vllm("0.26.0", standin.modules.__getitem__)
    change(standin.modules)
    with pytest.raises(UserError, match=message):
        check_vllm(standin.modules["vllm"].__version__, standin.modules.__getitem__)


def test_places_of_official_tensors() -> None:
    parameters: Any = dict.fromkeys(
        (
            "model.layers.3.ffn.experts.routed_experts.w13_weight",
            "model.layers.3.ffn.shared_experts.gate_up_proj.weight",
            "model.layers.3.ffn.gate.e_score_correction_bias",
            "model.layers.3.attn.indexer.compressor.fused_wkv_wgate.weight",
        )
    )
    names = list(parameters)
    expert = place_of("layers.3.ffn.experts.7.w3.weight", parameters)
    assert (expert.parameter, expert.expert, expert.second) == (names[0], 7, True)
    assert place_of("layers.3.ffn.shared_experts.w3.weight", parameters).second
    assert place_of("layers.3.ffn.gate.bias", parameters).parameter == names[2]
    wgate = place_of("layers.3.attn.indexer.compressor.wgate.weight", parameters)
    assert (wgate.parameter, wgate.second) == (names[3], True)
    for missing in ("layers.3.attn.wq_b.weight", "layers.4.ffn.experts.0.w1.weight"):
        with pytest.raises(UserError, match="refit: (this vLLM has no parameter|found no parameter)"):
            place_of(missing, parameters)


def test_tensor_parallel_ranks_read_back_their_part() -> None:
    """Columns of wo_b, rows of wq_b and of both halves of w13, for the second of two ranks."""
    model = torch.nn.Module()
    expected = {
        "layers.0.attn.wo_b.weight": (128, 512),
        "layers.0.ffn.experts.1.w3.weight": (256, 128),
        "embed.weight": (100, 8),
    }
    full = torch.arange(128 * 512).view(128, 512).remainder(7).float()
    model.register_module("model", torch.nn.Module())
    part: Any = model
    for path in ("model", "layers", "0", "attn", "wo_b"):
        if path not in part._modules:
            part.add_module(path, torch.nn.Module())
        part = part._modules[path]
    part.weight = torch.nn.Parameter(full[:, 256:].to(torch.float8_e4m3fn), requires_grad=False)
    packed = pack_ue8m0(torch.full((128, 2), 0.5))
    part.weight_scale_inv = torch.nn.Parameter(packed, requires_grad=False)
    layer: Any = model.get_submodule("model.layers.0")
    layer.add_module("ffn", torch.nn.Module())
    layer.ffn.add_module("experts", torch.nn.Module())
    codes = torch.stack([torch.full((256, 128), float(e)) for e in (1, 2)])
    codes[:, 128:] *= 2
    layer.ffn.experts.w13_weight = torch.nn.Parameter(codes.to(torch.float8_e4m3fn), requires_grad=False)
    layer.ffn.experts.w13_weight_scale_inv = torch.nn.Parameter(torch.ones(2, 2, 1), requires_grad=False)
    model.get_submodule("model").add_module("embed_tokens", torch.nn.Module())
    embed: Any = model.get_submodule("model.embed_tokens")
    embed.weight = torch.nn.Parameter(torch.ones(64, 8), requires_grad=False)

    expected["layers.0.attn.attn_sink"] = (16,)
    attn: Any = model.get_submodule("model.layers.0.attn")
    attn.attn_sink = torch.nn.Parameter(torch.full((64,), -torch.inf), requires_grad=False)  # 8 heads padded to 64
    attn.attn_sink.data[:8] = torch.arange(8.0)
    layout = VllmLayout(model, expected, tensor_rank=1, tensor_size=2)
    values, where = layout.read_back("layers.0.attn.attn_sink") or (None, None)
    assert where == (slice(8, 16),)
    assert torch.equal(values, torch.arange(8.0))  # type: ignore[arg-type]
    values, where = layout.read_back("layers.0.attn.wo_b.weight") or (None, None)
    assert where == (slice(0, 128), slice(256, 512))
    assert torch.equal(values, full[:, 256:] * 0.5)  # type: ignore[arg-type]
    values, where = layout.read_back("layers.0.ffn.experts.1.w3.weight") or (None, None)
    assert where == (slice(128, 256), slice(0, 128))
    assert bool((values == 4.0).all())  # type: ignore[union-attr]
    values, where = layout.read_back("embed.weight") or (None, None)  # 36 rows, then padding
    assert where == (slice(64, 100), slice(0, 8))
    assert values.shape == (36, 8)  # type: ignore[union-attr]
    assert VllmLayout(model, expected, expert_rank=1).read_back("layers.0.ffn.experts.1.w3.weight") is None
    assert {name: v.shape for name, v in layout.scales()} == {
        "model.layers.0.attn.wo_b.weight_scale_inv": (128, 2),
        "model.layers.0.ffn.experts.w13_weight_scale_inv": (2, 2, 1),
    }
    assert kernel_scale(torch.tensor([[120]], dtype=torch.uint8), (128, 128)).item() == 2.0**-7
