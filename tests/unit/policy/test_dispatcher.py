"""The dispatcher's check at start, with stand-ins for the libraries and the GPU."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.dispatcher import (
    NVLINK_DOMAIN_VARIABLE,
    check_dispatcher,
    check_hash_tables,
    permute_without_transformer_engine,
)

SIZES = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class FakeBuffer:
    """What AutoModel calls of DeepEP's Buffer, with the group sizes of the real one."""

    compiled = True

    @staticmethod
    def get_dispatch_config(ranks):
        assert ranks in SIZES, f"Unsupported number of EP ranks: {ranks}"

    get_combine_config = get_dispatch_config

    @classmethod
    def is_sm90_compiled(cls):
        return cls.compiled

    @staticmethod
    def set_num_sms(count):
        del count


def module(monkeypatch, name, **attributes):
    made = ModuleType(name)
    for key, value in attributes.items():
        setattr(made, key, value)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.delenv(NVLINK_DOMAIN_VARIABLE, raising=False)


def backend(name, experts="torch_mm"):
    return {"dispatcher": name, "experts": experts}


def refused(message, name, *, ranks=128, experts="torch_mm"):
    with pytest.raises(UserError, match=message) as caught:
        check_dispatcher(backend(name, experts), ranks=ranks, gpus_per_node=8)
    assert "\n" not in str(caught.value)


def test_torch_needs_nothing_up_to_8_ranks():
    report = check_dispatcher(backend("torch", "torch"), ranks=8, gpus_per_node=8)
    assert (report.library, report.spans_nodes) == (None, False)
    assert report.line() == "dispatcher torch, 8 expert-parallel ranks on one node"
    refused("is torch with expert_parallel_size 16: .* choose deepep, hybridep or uccl_ep", "torch", ranks=16)


def test_deepep_across_nodes(monkeypatch, hopper):
    module(monkeypatch, "deep_ep", Buffer=FakeBuffer, __version__="1.2.1")
    report = check_dispatcher(backend("deepep"), ranks=128, gpus_per_node=8)
    assert report.line() == "dispatcher deepep, 128 expert-parallel ranks on several nodes, deep_ep 1.2.1"
    refused("is 48, for which deep_ep 1.2.1 has no settings .*Unsupported number of EP ranks: 48", "deepep", ranks=48)


def test_a_missing_library_says_how_to_get_it(monkeypatch, hopper):
    for name, library, where in (
        ("deepep", "deep_ep", "build DeepEP with NVSHMEM from github.com/deepseek-ai/DeepEP"),
        ("hybridep", "deep_ep", "build the hybrid-ep branch"),
        ("uccl_ep", "uccl.ep", "github.com/uccl-project/uccl"),
    ):
        monkeypatch.setitem(sys.modules, library.partition(".")[0], None)
        refused(f"is {name}, but {library} cannot be imported .*{where}", name)


def test_a_package_that_only_has_the_name_is_not_the_library(monkeypatch, hopper):
    """Something called deep_ep without its Buffer would let AutoModel go on with dispatch functions of None."""
    module(monkeypatch, "deep_ep", __version__="1.0.0")
    refused("deep_ep 1.0.0 has no Buffer.get_dispatch_config", "deepep")
    refused("deep_ep 1.0.0 has no HybridEPBuffer", "hybridep")
    module(monkeypatch, "uccl", ep=module(monkeypatch, "uccl.ep", __version__="0"))
    refused("has no Config", "uccl_ep")


def test_deepep_without_nvshmem_stays_in_a_node(monkeypatch, hopper):
    module(monkeypatch, "deep_ep", Buffer=FakeBuffer)
    monkeypatch.setattr(FakeBuffer, "compiled", False)
    refused("built without NVSHMEM", "deepep", ranks=16)
    assert not check_dispatcher(backend("deepep"), ranks=8, gpus_per_node=8).spans_nodes


def test_hybridep_wants_its_nvlink_domain(monkeypatch, hopper):
    module(monkeypatch, "deep_ep", HybridEPBuffer=object, __version__="1.2.1")
    refused(f"{NVLINK_DOMAIN_VARIABLE} is not set", "hybridep")
    for wrong in ("0", "48", "many"):
        monkeypatch.setenv(NVLINK_DOMAIN_VARIABLE, wrong)
        refused(f"is '{wrong}'; wanted a divisor of .* = 128", "hybridep")
    monkeypatch.setenv(NVLINK_DOMAIN_VARIABLE, "64")
    assert check_dispatcher(backend("hybridep"), ranks=128, gpus_per_node=8).library == "deep_ep"
    monkeypatch.delenv(NVLINK_DOMAIN_VARIABLE)
    assert check_dispatcher(backend("hybridep"), ranks=8, gpus_per_node=8).version == "1.2.1"


def test_uccl_runs_on_amd_and_the_others_do_not(monkeypatch, hopper):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    module(monkeypatch, "uccl", ep=module(monkeypatch, "uccl.ep", Config=object, EventHandle=object))
    assert check_dispatcher(backend("uccl_ep"), ranks=32, gpus_per_node=8).library == "uccl.ep"
    refused("runs on NVIDIA GPUs only; .* use uccl_ep", "deepep")


def test_gpu_is_there_and_new_enough(monkeypatch, hopper):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    refused("deepep across nodes, which needs compute capability 9.0; this GPU has 8.0", "deepep")
    refused("is hybridep, which needs compute capability 9.0", "hybridep", ranks=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("torch sees no GPU", "uccl_ep")


def test_names_and_products_that_automodel_would_replace(hopper):
    refused("is 'mok'; wanted one of torch, deepep, hybridep, uccl_ep", "mok")
    refused("it needs 2 ranks or more", "deepep", ranks=1)
    refused("AutoModel would take TransformerEngine's", "deepep", experts="torch")


def test_automodel_knows_these_dispatchers_and_still_falls_back():
    """The facts about AutoModel 0.7.0 that the refusals rest on."""
    from typing import get_args, get_type_hints

    utils = importlib.import_module("nemo_automodel.components.models.common.utils")
    names = get_args(get_type_hints(utils.BackendConfig)["dispatcher"])
    assert set(names) == {"torch", "deepep", "hybridep", "uccl_ep", "mok"}
    quiet = utils.BackendConfig(experts="te", dispatcher="torch", attn="sdpa", linear="torch")
    assert (quiet.experts, quiet.dispatcher) == ("torch_mm", "torch")
    assert utils.BackendConfig(rope_fusion=True).rope_fusion is False


def test_the_worker_checks_before_it_builds(monkeypatch):
    """No weight is read when the dispatcher cannot run."""
    from nemo_rl_dsv4.policy import spec as module_under_test
    from nemo_rl_dsv4.policy.parallel import ParallelSizes

    monkeypatch.setattr(module_under_test, "build_model", lambda *_, **__: pytest.fail("built before the check"))
    spec = SimpleNamespace(backend=backend("deepep"), sizes=ParallelSizes(2, ep=2), profile="bf16", checkpoint=None)
    with pytest.raises(UserError, match="torch sees no GPU"):
        module_under_test.build_worker(spec)  # pyright: ignore[reportArgumentType]


def test_dispatched_tokens_are_sorted_without_transformer_engine(monkeypatch):
    """Seen on two H200: DeepEP brought the tokens, then AutoModel raised "Please install TE >= 2.1.0"."""
    from nemo_automodel.components.moe.megatron import moe_utils
    from nemo_automodel.components.moe.megatron.token_dispatcher import MoEFlexTokenDispatcher, _DeepepManager

    def dispatch(x, indices, probs, experts, group, **options):
        counts = torch.bincount(indices[indices >= 0], minlength=experts)
        return x, indices, probs, counts, None

    manager = _DeepepManager(
        group=None,
        router_topk=2,
        permute_fusion=True,
        num_experts=4,
        num_local_experts=4,
        _dispatch_fn=dispatch,
        _combine_fn=lambda x, *_, **__: (x, None),
    )
    layer = torch.nn.Module()
    layer.token_dispatcher = MoEFlexTokenDispatcher.__new__(MoEFlexTokenDispatcher)
    layer.token_dispatcher._comm_manager = manager
    model = torch.nn.Sequential(layer, torch.nn.Linear(1, 1))
    x = torch.arange(12.0).view(3, 4)
    manager.token_indices = torch.tensor([[0, 2], [2, 3], [1, 0]])
    manager.token_probs = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 2.0]])

    monkeypatch.setattr(moe_utils, "HAS_TE", True)
    assert permute_without_transformer_engine(model) == 0
    monkeypatch.setattr(moe_utils, "HAS_TE", False)
    with pytest.raises(ValueError, match="Please install TE"):
        moe_utils.permute(x, torch.ones(3, 4).bool(), probs=torch.ones(3, 4), fused=manager.permute_fusion)
    assert permute_without_transformer_engine(model) == 1
    sorted_x, probs = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
    assert torch.equal(sorted_x, x[[0, 2, 2, 0, 1, 1]])  # experts 0, 0, 1, 2, 2, 3
    assert probs.tolist() == [0.25, 2.0, 1.0, 0.75, 0.5, 0.5]
    restored = manager.combine(manager.get_restored_hidden_states_by_experts(sorted_x * probs.unsqueeze(-1)))
    assert torch.equal(restored, x * manager.token_probs.sum(-1, keepdim=True))


def test_a_hash_table_that_names_an_expert_twice_is_refused_before_a_library_dispatches_it():
    """Seen on two H200 with DeepEP: "expected offset to be less than tensor size", asserted on the device."""
    gate = torch.nn.Module()
    gate.tid2eid = torch.tensor([[0, 1, 2], [3, 1, 0], [2, 3, 2]])
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), gate)
    check_hash_tables(model, "torch")  # each product is added, as often as the table says
    with pytest.raises(
        UserError, match=r"1\.tid2eid sends token 2 to experts \[2, 3, 2\].*1 tokens of 3.*deepep cannot"
    ):
        check_hash_tables(model, "deepep")
    gate.tid2eid[2, 2] = 0
    check_hash_tables(model, "deepep")
