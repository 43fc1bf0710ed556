"""Whether this process can run the dispatcher of `backend.dispatcher`; asked when a worker starts, before any weight.

AutoModel 0.7.0 imports the libraries behind its dispatchers lazily and goes on without them: a missing one shows up
minutes later as a call of `None`, or not at all. What each needs, from AutoModel's `moe/megatron/fused_a2a.py` and the
libraries' own documentation:

| dispatcher | library | GPU | beyond one node |
|---|---|---|---|
| torch | none | any | refused above 8 ranks |
| deepep | `deep_ep.Buffer` | NVIDIA, sm_80; sm_90 beyond one node | built with NVSHMEM (`Buffer.is_sm90_compiled()`) |
| hybridep | `deep_ep.HybridEPBuffer` | NVIDIA, sm_90 | group is a multiple of the ranks in one NVLink domain |
| uccl_ep | `uccl.ep` | NVIDIA or AMD | RDMA or TCP network cards of any maker |
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError

log = logging.getLogger(__name__)

TORCH_DISPATCH_RANKS = 8
NVLINK_DOMAIN_VARIABLE = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
KEY = "policy.dtensor_cfg.automodel_kwargs.backend.dispatcher"
INSTALL = {
    "deepep": "build DeepEP with NVSHMEM from github.com/deepseek-ai/DeepEP (its README; `pip install .` in a checkout)"
    " into the training environment",
    "hybridep": "build the hybrid-ep branch of github.com/deepseek-ai/DeepEP (`pip install .` in a checkout; "
    "HYBRID_EP_MULTINODE=1 for several NVLink domains) into the training environment",
    "uccl_ep": "install UCCL's expert-parallel part from github.com/uccl-project/uccl (directory ep) into the training "
    "environment",
}


@dataclass(frozen=True)
class DispatcherReport:
    """What was found. `library` and `version` are None for `torch`; `spans_nodes` is whether tokens leave a node."""

    name: str
    ranks: int
    library: str | None
    version: str | None
    spans_nodes: bool

    def line(self) -> str:
        """One line for a log."""
        reach = "several nodes" if self.spans_nodes else "one node"
        library = "" if self.library is None else f", {self.library} {self.version}"
        return f"dispatcher {self.name}, {self.ranks} expert-parallel ranks on {reach}{library}"


def check_dispatcher(backend: Mapping[str, Any], *, ranks: int, gpus_per_node: int) -> DispatcherReport:
    """Check the dispatcher of an AutoModel backend on this machine.

    Args:
        backend: `BackendConfig` fields; `dispatcher` (default `torch`) and `experts` are read.
        ranks: expert-parallel size.
        gpus_per_node: processes on one node, each with its GPU; on CPUs all processes.

    Returns:
        What was found.

    Raises:
        UserError: the dispatcher is unknown, its library cannot be imported or lacks what AutoModel calls, no GPU or an
            unsupported one, a group size that the library has no settings for, or expert products that AutoModel would
            replace by others. There is no fall-back to another dispatcher.
    """
    name = str(backend.get("dispatcher", "torch"))
    spans_nodes = ranks > max(gpus_per_node, 1)
    if name == "torch":
        if ranks > TORCH_DISPATCH_RANKS:
            raise UserError(
                f"{KEY} is torch with expert_parallel_size {ranks}: it gathers every token of the group on every rank "
                f"and is refused above {TORCH_DISPATCH_RANKS}; choose deepep, hybridep or uccl_ep"
            )
        return DispatcherReport(name, ranks, None, None, spans_nodes)
    if name not in INSTALL:
        raise UserError(f"{KEY} is {name!r}; wanted one of torch, {', '.join(INSTALL)}")
    if ranks < 2:
        raise UserError(f"{KEY} is {name} with expert_parallel_size {ranks}; it needs 2 ranks or more, use torch")
    if backend.get("experts") not in ("torch_mm", "te"):
        raise UserError(
            f"backend.experts is {backend.get('experts')!r} with {KEY} {name}: AutoModel would take "
            "TransformerEngine's; wanted torch_mm or te"
        )
    _check_gpu(name, spans_nodes)
    check = {"deepep": _check_deepep, "hybridep": _check_hybridep, "uccl_ep": _check_uccl}[name]
    library, version = check(ranks, gpus_per_node, spans_nodes)
    return DispatcherReport(name, ranks, library, version, spans_nodes)


def _check_gpu(name: str, spans_nodes: bool) -> None:
    if not torch.cuda.is_available():
        raise UserError(f"{KEY} is {name}, but torch sees no GPU in this process; use torch, or start on a GPU")
    if name == "uccl_ep":
        return
    if torch.version.hip is not None:
        raise UserError(f"{KEY} is {name}, which runs on NVIDIA GPUs only; this is an AMD GPU, use uccl_ep")
    capability = torch.cuda.get_device_capability()
    wanted = (9, 0) if name == "hybridep" or spans_nodes else (8, 0)
    if capability < wanted:
        raise UserError(
            f"{KEY} is {name}{' across nodes' if spans_nodes else ''}, which needs compute capability "
            f"{wanted[0]}.{wanted[1]}; this GPU has {capability[0]}.{capability[1]}"
        )


def _import(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{KEY} is {name}, but {module} cannot be imported ({reason}); {INSTALL[name]}") from error


def _need(module: ModuleType, attributes: tuple[str, ...], name: str, distribution: str) -> str:
    """The version of `module`, after checking that it has what AutoModel 0.7.0 calls."""
    version = _version(module, distribution)
    found: Any = module
    for attribute in attributes:
        found = module
        for part in attribute.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise UserError(
                f"{KEY} is {name}, but {module.__name__} {version} has no {attribute}, which AutoModel 0.7.0 calls; "
                f"{INSTALL[name]}"
            )
    return version


def _version(module: ModuleType, distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", "of unknown version"))


def _check_deepep(ranks: int, gpus_per_node: int, spans_nodes: bool) -> tuple[str, str]:
    module = _import("deep_ep", "deepep")
    wanted = (
        "Buffer.get_dispatch_config",
        "Buffer.get_combine_config",
        "Buffer.is_sm90_compiled",
        "Buffer.set_num_sms",
    )
    version = _need(module, wanted, "deepep", "deep_ep")
    try:
        module.Buffer.get_dispatch_config(ranks)
        module.Buffer.get_combine_config(ranks)
    except AssertionError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"policy.dtensor_cfg.expert_parallel_size is {ranks}, for which deep_ep {version} has no settings "
            f"({reason}); choose 2, 4, 8, 16, 32, 64 or 128"
        ) from error
    if (spans_nodes or ranks > TORCH_DISPATCH_RANKS) and not module.Buffer.is_sm90_compiled():
        raise UserError(
            f"{KEY} is deepep with {ranks} ranks over several nodes, but deep_ep {version} was built without NVSHMEM; "
            f"{INSTALL['deepep']}"
        )
    if spans_nodes and ranks % gpus_per_node:
        raise UserError(
            f"policy.dtensor_cfg.expert_parallel_size is {ranks}, no multiple of the {gpus_per_node} GPUs of a node; "
            "DeepEP sends between GPUs of the same place on each node"
        )
    return "deep_ep", version


def _check_hybridep(ranks: int, gpus_per_node: int, spans_nodes: bool) -> tuple[str, str]:
    del spans_nodes
    module = _import("deep_ep", "hybridep")
    version = _need(module, ("HybridEPBuffer",), "hybridep", "deep_ep")
    text = os.environ.get(NVLINK_DOMAIN_VARIABLE)
    if text is None and ranks <= gpus_per_node:
        return "deep_ep", version
    if text is None:
        raise UserError(
            f"{KEY} is hybridep with {ranks} ranks on nodes of {gpus_per_node} GPUs, and {NVLINK_DOMAIN_VARIABLE} is "
            "not set; put the number of these ranks that share one NVLink domain into policy.dtensor_cfg.env_vars (8 "
            "for separate 8-GPU nodes)"
        )
    domain = int(text) if text.isdecimal() else 0
    if domain < 1 or ranks % domain:
        raise UserError(
            f"{NVLINK_DOMAIN_VARIABLE} is {text!r}; wanted a divisor of "
            f"policy.dtensor_cfg.expert_parallel_size = {ranks}"
        )
    return "deep_ep", version


def _check_uccl(ranks: int, gpus_per_node: int, spans_nodes: bool) -> tuple[str, str]:
    # AutoModel also accepts any installed package called `ep`, whatever it is.
    del ranks, gpus_per_node, spans_nodes
    module = _import("uccl.ep", "uccl_ep")
    return "uccl.ep", _need(module, ("Config", "EventHandle"), "uccl_ep", "uccl")


def permute_without_transformer_engine(model: torch.nn.Module) -> int:
    """Let tokens that DeepEP or UCCL-EP brought be sorted by expert with torch, where TransformerEngine is missing.

    AutoModel 0.7.0 always asks these two for TransformerEngine's fused permutation and fails in the first forward pass
    without it ("moe_permute_with_probs is not available"). Its own unfused permutation sorts alike and adds the parts
    of a token in the activations' dtype. Call it when the model's dispatchers exist.

    Returns:
        Number of expert layers that were changed; 0 where TransformerEngine is installed.
    """
    from nemo_automodel.components.moe.megatron import moe_utils
    from nemo_automodel.components.moe.megatron.token_dispatcher import MoEFlexTokenDispatcher, _DeepepManager

    if moe_utils.HAS_TE:
        return 0
    changed = 0
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, MoEFlexTokenDispatcher) and isinstance(dispatcher._comm_manager, _DeepepManager):
            dispatcher._comm_manager.permute_fusion = False  # often one manager for all layers
            changed += 1
    if changed:
        log.info("%d expert layers sort dispatched tokens with torch: TransformerEngine is not installed", changed)
    return changed


def check_hash_tables(model: torch.nn.Module, dispatcher: str) -> None:
    """Refuse hash tables that name an expert twice for one token, where tokens are dispatched by a library.

    DeepEP and UCCL-EP count such a token twice and AutoModel sorts it once, so the products of the experts behind it
    would read rows that are not there: a device-side assertion in the first forward pass.

    Args:
        model: with its weights.
        dispatcher: `backend.dispatcher`.

    Raises:
        UserError: such a table; the first token is named.
    """
    if dispatcher == "torch":
        return
    for name, module in model.named_modules():
        table = getattr(module, "tid2eid", None)
        if not isinstance(table, torch.Tensor):
            continue
        ordered = table.sort(dim=-1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)
        if bool(twice.any()):
            token = int(twice.nonzero()[0])
            raise UserError(
                f"{name}.tid2eid sends token {token} to experts {table[token].tolist()}, one of them twice "
                f"({int(twice.sum())} tokens of {len(table)}); {KEY} {dispatcher} cannot dispatch that: give each "
                "token different experts, or use torch"
            )
