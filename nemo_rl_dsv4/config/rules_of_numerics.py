"""Rules between training mode, rounding, rollout and hardware."""

from __future__ import annotations

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.rules import require, require_divides


def check_numerics(config: MasterConfig) -> None:
    """The training mode fits the rounding flags and the rollout."""
    dsv4 = config.policy.dsv4
    rounded = dsv4.fake_quant.resolved(dsv4.train_mode)
    if dsv4.train_mode == "qat":
        require(
            any(rounded.values()),
            "policy.dsv4.train_mode is qat but every policy.dsv4.fake_quant flag is false, so nothing is rounded; "
            "use train_mode bf16",
        )
        require(
            dsv4.rollout_profile != "bf16",
            "policy.dsv4.train_mode is qat but policy.dsv4.rollout_profile is bf16, which rounds nothing; "
            "use train_mode bf16 or the profile of an FP8 rollout",
        )
    if dsv4.train_mode == "bf16":
        products = [name for name in ("weights", "linear_inputs", "o_proj", "experts") if rounded[name]]
        require(
            not products,
            f"policy.dsv4.train_mode is bf16 but policy.dsv4.fake_quant.{products[0] if products else ''} is true; "
            "bf16 rounds at most kv and indexer: use train_mode qat and set the other flags to false",
        )
    if dsv4.train_mode == "fp8":
        missing = [name for name in ("weights", "linear_inputs", "o_proj", "experts") if not rounded[name]]
        require(
            not missing,
            f"policy.dsv4.train_mode is fp8 but policy.dsv4.fake_quant.{missing[0] if missing else ''} is false; FP8 "
            "products need both operands rounded: use qat to leave some out",
        )
        require(
            dsv4.rollout_profile != "bf16",
            "policy.dsv4.train_mode is fp8 but policy.dsv4.rollout_profile is bf16, which rounds nothing; "
            "use train_mode bf16 or the profile of an FP8 rollout",
        )
    require(
        not (rounded["experts"] and dsv4.alignment.routing_weight_after_down is False),
        "policy.dsv4.alignment.routing_weight_after_down is false, but policy.dsv4.fake_quant.experts is on, which "
        "needs the routing weight after the down projection, where the rollout has it; set it to null",
    )


def check_routes(config: MasterConfig) -> None:
    """An engine that is asked for its routes returns them."""
    dsv4, generation = config.policy.dsv4, config.policy.generation
    asking = [key for key in ("router_replay", "router_overlap_metrics") if getattr(dsv4, key)]
    require(
        not asking or generation.backend != "vllm" or generation.vllm_cfg.enable_return_routed_experts,
        f"policy.dsv4.{' and '.join(asking)} needs the rollout's experts, but "
        "policy.generation.vllm_cfg.enable_return_routed_experts is false; set it to true",
    )


def check_available(config: MasterConfig) -> None:
    """What the schema knows but this version cannot do is refused rather than ignored."""
    policy = config.policy
    require(
        policy.dsv4.rollout_profile != "deepseek-reference",
        "policy.dsv4.rollout_profile is deepseek-reference, whose FP4 indexer with a Hadamard transform is a table "
        "to compare with (nemo-rl-dsv4 profiles), not a rollout of this version; take a vllm profile",
    )
    require(
        policy.tokenizer.chat_template == "deepseek_v4",
        f"policy.tokenizer.chat_template is {policy.tokenizer.chat_template!r}; wanted deepseek_v4, the one encoding "
        "of this model",
    )
    chat = dict(policy.tokenizer.chat_template_kwargs or {})
    thinking, effort = chat.pop("thinking", False), chat.pop("reasoning_effort", None)
    require(
        not chat,
        f"policy.tokenizer.chat_template_kwargs has unknown keys {sorted(chat)}; wanted thinking, reasoning_effort",
    )
    require(
        isinstance(thinking, bool),
        f"policy.tokenizer.chat_template_kwargs.thinking is {thinking!r}; wanted true or false",
    )
    require(
        effort in (None, "low", "high", "max") and (effort is None or thinking),
        f"policy.tokenizer.chat_template_kwargs.reasoning_effort is {effort!r} with thinking {thinking}; wanted "
        "null, or low, high or max with thinking true",
    )
    if config.cluster.gpus_per_node > 0:
        return
    ignored = {
        "policy.offload_optimizer_for_logprob": policy.offload_optimizer_for_logprob,
        "policy.dtensor_cfg.clear_cache_every_n_steps": policy.dtensor_cfg.clear_cache_every_n_steps is not None,
        "policy.dtensor_cfg.env_vars": bool(policy.dtensor_cfg.env_vars),
    }
    for key, is_set in ignored.items():
        require(
            not is_set,
            f"{key} is set, but training on CPUs (cluster.gpus_per_node: 0) does not use it; leave it at its default",
        )


def check_hardware(config: MasterConfig) -> None:
    """GPU settings go with GPUs, CPU settings with CPUs."""
    policy, backend = config.policy, config.policy.dtensor_cfg.automodel_kwargs.backend
    if config.cluster.gpus_per_node > 0:
        require(
            policy.dsv4.cpu_processes == 1,
            f"policy.dsv4.cpu_processes is {policy.dsv4.cpu_processes} but cluster.gpus_per_node is "
            f"{config.cluster.gpus_per_node}; leave it at 1, or set gpus_per_node to 0 to run on CPUs",
        )
        require(
            policy.generation.backend == "vllm",
            "policy.generation.backend is reference, which runs on CPUs, but cluster.gpus_per_node is "
            f"{config.cluster.gpus_per_node}; use vllm, or set gpus_per_node to 0",
        )
        return
    cpu = "and cluster.gpus_per_node is 0 (CPU)"
    require(
        policy.generation.backend == "reference",
        f"policy.generation.backend is vllm {cpu}; use reference, or give GPUs",
    )
    require(
        policy.dsv4.rollout_profile != "auto",
        f"policy.dsv4.rollout_profile is auto {cpu}, so no GPU decides; name a profile, such as vllm-hopper",
    )
    require_divides(
        config.cluster.num_nodes,
        "cluster.num_nodes",
        policy.dsv4.cpu_processes,
        "policy.dsv4.cpu_processes (the number of policy processes)",
        "choose a multiple of it",
    )
    allowed = {
        "attn": ("sdpa", "eager"),
        "linear": ("torch",),
        "rms_norm": ("torch_fp32", "torch"),
        "experts": ("torch", "torch_mm"),
        "dispatcher": ("torch",),
        "rope_fusion": (False,),
        "enable_deepep": (None, False),
    }
    for name, values in allowed.items():
        found = getattr(backend, name)
        wanted = " or ".join(str(v) for v in values if v is not None)
        require(
            found in values,
            f"policy.dtensor_cfg.automodel_kwargs.backend.{name} is {found} {cpu}; use {wanted}",
        )
    require(
        not policy.dtensor_cfg.cpu_offload, f"policy.dtensor_cfg.cpu_offload is true {cpu}; there is nothing to offload"
    )
