"""Rules between model, parallel sizes, batches and lengths."""

from __future__ import annotations

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.model_limits import TINY, model_limits
from nemo_rl_dsv4.config.rules import require, require_divides
from nemo_rl_dsv4.config.topology import WIDEST_COMPRESSION, packed_length, sequence_multiple


def check_model(config: MasterConfig) -> None:
    """The tiny model's sizes fit together, and the tokenizer fits the model."""
    name, tokenizer = config.policy.model_name, config.policy.tokenizer.name
    require(
        tokenizer != TINY or name == TINY,
        f"policy.tokenizer.name is tiny but policy.model_name is {name!r}; use the model's own tokenizer",
    )
    tiny = config.policy.dsv4.tiny
    if name != TINY or tiny is None:
        return
    where = "policy.dsv4.tiny"
    require(
        len(tiny.compress_ratios) == tiny.num_hidden_layers,
        f"{where}.compress_ratios has {len(tiny.compress_ratios)} entries but {where}.num_hidden_layers is "
        f"{tiny.num_hidden_layers}; give one ratio per layer",
    )
    require_divides(
        tiny.o_groups, f"{where}.o_groups", tiny.num_attention_heads, f"{where}.num_attention_heads", "change one"
    )
    for smaller, larger in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("num_hash_layers", "num_hidden_layers"),
        ("qk_rope_head_dim", "head_dim"),
        ("qk_rope_head_dim", "index_head_dim"),
    ):
        low, high = getattr(tiny, smaller), getattr(tiny, larger)
        require(low <= high, f"{where}.{smaller} is {low}, more than {where}.{larger} = {high}")
    require(
        tiny.qk_rope_head_dim % 2 == 0,
        f"{where}.qk_rope_head_dim is {tiny.qk_rope_head_dim}; RoPE turns pairs of channels, so it must be even",
    )


def check_layout(config: MasterConfig) -> None:
    """Parallel sizes divide the processes and the experts."""
    if config.cluster.gpus_per_node and not config.policy.generation.colocated.enabled:
        _check_own_gpus(config)
    layout, where = config.policy.dtensor_cfg, "policy.dtensor_cfg"
    world = config.world_size
    own = " less the GPUs of policy.generation.colocated.resources" if config.rollout_gpus else ""
    world_name = (
        "policy.dsv4.cpu_processes (the number of policy processes)"
        if config.cluster.gpus_per_node == 0
        else f"cluster.gpus_per_node * cluster.num_nodes{own} (the number of policy processes)"
    )
    require(
        layout.tensor_parallel_size == 1,
        f"{where}.tensor_parallel_size is {layout.tensor_parallel_size}, wanted 1: DeepSeek-V4 has no tensor-parallel "
        "plan; use context_parallel_size and expert_parallel_size",
    )
    require_divides(
        layout.context_parallel_size, f"{where}.context_parallel_size", world, world_name, "change one of them"
    )
    require_divides(
        layout.expert_parallel_size, f"{where}.expert_parallel_size", world, world_name, "change one of them"
    )
    require_divides(
        layout.dp_replicate_size,
        f"{where}.dp_replicate_size",
        config.data_parallel_size,
        "the data-parallel size (processes / context_parallel_size)",
        "change one of them",
    )
    require(
        layout.dp_replicate_size == 1
        or (
            layout.dp_replicate_size == config.data_parallel_size
            and layout.context_parallel_size == 1
            and layout.expert_parallel_size == 1
        ),
        f"{where}.dp_replicate_size is {layout.dp_replicate_size}; wanted 1 (sharded), or all "
        f"{config.data_parallel_size} data-parallel ranks with neither context nor expert parallelism",
    )
    experts = model_limits(config).n_routed_experts
    if experts is not None:
        require(
            layout.expert_parallel_size <= experts,
            f"{where}.expert_parallel_size is {layout.expert_parallel_size}, more than the model's {experts} routed "
            "experts; a rank would hold none, choose a divisor of their number",
        )
        require_divides(
            layout.expert_parallel_size,
            f"{where}.expert_parallel_size",
            experts,
            "the model's number of routed experts",
            "choose a divisor of it",
        )


def check_batches(config: MasterConfig) -> None:
    """Batch sizes divide over updates and ranks."""
    grpo, policy = config.grpo, config.policy
    rollouts = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    require_divides(
        policy.train_global_batch_size,
        "policy.train_global_batch_size",
        rollouts,
        f"grpo.num_prompts_per_step * grpo.num_generations_per_prompt ({grpo.num_prompts_per_step} * "
        f"{grpo.num_generations_per_prompt})",
        f"set train_global_batch_size to {rollouts} or a divisor of it",
    )
    require_divides(
        config.data_parallel_size,
        "the data-parallel size (processes / context_parallel_size)",
        policy.train_global_batch_size,
        "policy.train_global_batch_size",
        "choose a multiple of it",
    )


def check_packing(config: MasterConfig) -> None:
    """The longest row fits into a packed sequence, and padding to 128 is padding to the recipe's multiple."""
    packing, where = config.policy.sequence_packing, "policy.sequence_packing"
    if not packing.enabled:
        return
    require(
        WIDEST_COMPRESSION % packing.sequence_length_round == 0,
        f"{where}.sequence_length_round is {packing.sequence_length_round}; packed rows are padded to a multiple of "
        f"{WIDEST_COMPRESSION} (the widest compressor window): give a divisor of it",
    )
    longest = packed_length(config)
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens = getattr(packing, key)
        require(
            tokens is None or tokens >= longest,
            f"{where}.{key} is {tokens}, but a row of policy.max_total_sequence_length = "
            f"{config.policy.max_total_sequence_length} tokens takes {longest}; raise it",
        )
    backend = config.policy.dtensor_cfg.automodel_kwargs.backend
    require(
        backend.dispatcher != "hybridep" or config.data_parallel_size == 1,
        f"{where}.enabled is true with backend.dispatcher hybridep, which needs equally many tokens on every rank; "
        "turn packing off, or choose deepep",
    )


def check_lengths(config: MasterConfig) -> None:
    """Sequence limits fit each other and the model."""
    policy, generation = config.policy, config.policy.generation
    total = policy.max_total_sequence_length
    limit = model_limits(config).max_position_embeddings
    if limit is not None:
        multiple = sequence_multiple(config)
        padded = -(-total // multiple) * multiple
        padding = f" ({padded} after padding to a multiple of {multiple})" if padded != total else ""
        require(
            padded <= limit,
            f"policy.max_total_sequence_length is {total}{padding}, longer than the model's max_position_embeddings "
            f"{limit}; lower it",
        )
    require(
        generation.max_new_tokens <= total,
        f"policy.generation.max_new_tokens is {generation.max_new_tokens}, more than policy.max_total_sequence_length "
        f"= {total}; lower it",
    )
    prompt = config.data.max_input_seq_length
    require(
        prompt is None or prompt <= total,
        f"data.max_input_seq_length is {prompt}, more than policy.max_total_sequence_length = {total}; lower it",
    )
    engine = generation.vllm_cfg.max_model_len
    require(
        generation.backend != "vllm" or engine is None or engine >= total,
        f"policy.generation.vllm_cfg.max_model_len is {engine}, less than policy.max_total_sequence_length = {total}; "
        "the engine would cut sequences that the trainer accepts",
    )
    require(
        generation.backend != "vllm" or engine is None or limit is None or engine <= limit,
        f"policy.generation.vllm_cfg.max_model_len is {engine}, more than the model's max_position_embeddings {limit}; "
        f"lower it, for policy.max_total_sequence_length is {total}",
    )


def check_rollout_layout(config: MasterConfig) -> None:
    """The rollout engine's ranks fit the GPUs, and its data-parallel size is 1."""
    generation, where = config.policy.generation, "policy.generation.vllm_cfg"
    if generation.backend != "vllm":
        return
    engine = generation.vllm_cfg
    tensor, expert = engine.tensor_parallel_size, engine.expert_parallel_size
    # vLLM's expert ranks are data x tensor ranks. With data ranks of its own an engine waits for dummy batches.
    require(
        expert <= tensor,
        f"{where}.expert_parallel_size is {expert}, more than {where}.tensor_parallel_size = {tensor}: vLLM would run "
        f"{expert // tensor} data-parallel ranks in lockstep, which hangs; use at most {tensor}",
    )
    if config.cluster.num_nodes > 1:
        per_node = config.cluster.gpus_per_node
        require(
            per_node % tensor == 0,
            f"{where}.tensor_parallel_size is {tensor}, which does not divide cluster.gpus_per_node = {per_node}: the "
            "workers of one engine share a host, an engine over several is not supported; choose a divisor",
        )
    if generation.colocated.enabled:
        require_divides(
            tensor * engine.pipeline_parallel_size,
            f"{where}.tensor_parallel_size * pipeline_parallel_size",
            config.world_size,
            "cluster.gpus_per_node * cluster.num_nodes",
            "change one of them",
        )


def _check_own_gpus(config: MasterConfig) -> None:
    """A rollout with GPUs of its own: how many is said, some are left for training, and its engines fill them."""
    where, cluster = "policy.generation.colocated.resources", config.cluster
    resources, engine = config.policy.generation.colocated.resources, config.policy.generation.vllm_cfg
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    limit = getattr(cluster, key)
    require(
        config.rollout_gpus > 0,
        f"policy.generation.colocated.enabled is false but {where}.{key} is null; with cluster.num_nodes = "
        f"{cluster.num_nodes} it says what generation gets: set it, below cluster.{key} = {limit}",
    )
    require(
        getattr(resources, key) < limit,
        f"{where}.{key} is {getattr(resources, key)}, which leaves nothing of cluster.{key} = {limit} for training; "
        "lower it",
    )
    require(
        cluster.num_nodes == 1 or resources.gpus_per_node in (None, cluster.gpus_per_node),
        f"{where}.gpus_per_node is {resources.gpus_per_node} but cluster.gpus_per_node is {cluster.gpus_per_node}: "
        "with several nodes generation gets whole ones; set it to the same number, or null",
    )
    require_divides(
        engine.tensor_parallel_size * engine.pipeline_parallel_size,
        "policy.generation.vllm_cfg.tensor_parallel_size * pipeline_parallel_size",
        config.rollout_gpus,
        f"the number of GPUs that {where}.{key} gives generation",
        "change one of them",
    )
