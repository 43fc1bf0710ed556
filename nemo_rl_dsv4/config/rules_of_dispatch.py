"""Rules between expert parallelism, its dispatcher and the expert products, and of context-parallel lengths.

AutoModel 0.7.0 falls back without an error in several of these cases (`moe/layers.py`, `models/common/utils.py`): they
are refused here, before a weight is loaded. What only the machine can answer (library, GPU) is checked by
`nemo_rl_dsv4.policy.dispatcher` when a worker starts.
"""

from __future__ import annotations

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.rules import require
from nemo_rl_dsv4.config.topology import WIDEST_COMPRESSION

TORCH_DISPATCH_RANKS = 8
"""The `torch` dispatcher gathers every token of the expert-parallel group on every rank: usable within one node."""


def check_dispatch(config: MasterConfig) -> None:
    """The dispatcher fits the number of expert-parallel ranks, and AutoModel would really use what is named."""
    layout = config.policy.dtensor_cfg
    backend, where = layout.automodel_kwargs.backend, "policy.dtensor_cfg.automodel_kwargs.backend"
    ranks, ranks_name = layout.expert_parallel_size, "policy.dtensor_cfg.expert_parallel_size"
    require(
        backend.enable_deepep is None,
        f"{where}.enable_deepep is {str(backend.enable_deepep).lower()}, which AutoModel 0.7.0 ignores; set it to null "
        f"and choose {where}.dispatcher",
    )
    require(
        not backend.rope_fusion,
        f"{where}.rope_fusion is true, which AutoModel 0.7.0 switches off again; set it to false",
    )
    require(
        backend.experts != "gmm",
        f"{where}.experts is gmm, AutoModel's old name; write torch_mm",
    )
    if backend.dispatcher == "torch":
        require(
            ranks <= TORCH_DISPATCH_RANKS,
            f"{where}.dispatcher is torch with {ranks_name} = {ranks}: it gathers every token of the group on every "
            f"rank, which is refused above {TORCH_DISPATCH_RANKS} ranks; set {where}.dispatcher to deepep (NVLink "
            "within, RDMA between nodes), hybridep (large NVLink domains) or uccl_ep (other network cards)",
        )
        require(
            backend.experts != "te",
            f"{where}.experts is te with dispatcher torch, for which AutoModel 0.7.0 quietly takes torch_mm; write "
            "torch_mm, or choose another dispatcher",
        )
        return
    require(
        ranks > 1,
        f"{where}.dispatcher is {backend.dispatcher} with {ranks_name} = 1: there is nobody to send tokens to, and "
        "AutoModel 0.7.0 would set up no dispatcher; use torch",
    )
    require(
        backend.experts in ("torch_mm", "te"),
        f"{where}.experts is {backend.experts} with dispatcher {backend.dispatcher}, for which AutoModel 0.7.0 quietly "
        "takes TransformerEngine's; write torch_mm (or te)",
    )
    if backend.dispatcher == "hybridep":
        _check_equal_token_counts(config)


def _check_equal_token_counts(config: MasterConfig) -> None:
    """HybridEP wants the same number of tokens from every rank of the group; data-parallel ranks see other rows."""
    policy, where = config.policy, "policy.dtensor_cfg.automodel_kwargs.backend"
    if config.data_parallel_size == 1:
        return
    longest = policy.max_total_sequence_length
    require(
        policy.make_sequence_length_divisible_by % longest == 0,
        f"{where}.dispatcher is hybridep, which needs equally many tokens on every rank, but "
        f"policy.make_sequence_length_divisible_by is {policy.make_sequence_length_divisible_by}; set it to "
        f"policy.max_total_sequence_length = {longest}, so that all rows are padded to one length",
    )
    for key in ("train_micro_batch_size", "logprob_batch_size"):
        require(
            getattr(policy, key) == 1,
            f"{where}.dispatcher is hybridep, which needs equally many tokens on every rank, but policy.{key} is "
            f"{getattr(policy, key)}; set it to 1",
        )


def check_context_parallel(config: MasterConfig) -> None:
    """A full-length row divides into whole compressor windows on every context-parallel rank."""
    ranks = config.policy.dtensor_cfg.context_parallel_size
    if ranks == 1:
        return
    longest, multiple = config.policy.max_total_sequence_length, ranks * WIDEST_COMPRESSION
    rounded_up = -(-longest // multiple) * multiple
    require(
        longest % multiple == 0,
        f"policy.max_total_sequence_length is {longest} with policy.dtensor_cfg.context_parallel_size = {ranks}; "
        f"wanted a multiple of {ranks} x {WIDEST_COMPRESSION} = {multiple}, such as {rounded_up}",
    )
