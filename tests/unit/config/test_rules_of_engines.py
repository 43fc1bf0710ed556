"""Rules of vLLM engines: sleep, where they are, rolling out ahead, widths that their kernels can do."""

import pytest
from test_rules import GPU

from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.errors import UserError

OWN_GPUS = (
    "cluster.gpus_per_node=16",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=8",
)
POOL = "+policy.generation.vllm_kwargs.kv_cache_memory_bytes=1000000000"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*GPU, "policy.dsv4.engine_sleep=true"], "vllm_kwargs.kv_cache_memory_bytes is not set"),
        (
            [*GPU, *OWN_GPUS, "policy.dsv4.engine_sleep=true", POOL],
            "only vLLM engines that share the policy's GPUs sleep",
        ),
        (["policy.dsv4.engine_sleep=true"], "policy.generation.backend is reference"),
        ([*GPU, "policy.dsv4.trainer_sleep=true"], "policy.dsv4.engine_sleep is false: an engine that stays awake"),
        (
            [
                *GPU,
                "policy.dsv4.trainer_sleep=true",
                "policy.dsv4.engine_sleep=true",
                POOL,
                "policy.dtensor_cfg.cpu_offload=true",
            ],
            "trainer_sleep is true and policy.dtensor_cfg.cpu_offload too",
        ),
        *(
            (
                [*GPU, *sleep, f"{POOL.partition('=')[0]}={pool}"],
                f"kv_cache_memory_bytes is {shown}; wanted a whole number",
            )
            for sleep in ([], ["policy.dsv4.engine_sleep=true"])
            for pool, shown in (("abc", "'abc'"), ("-5", "-5"), ("0", "0"), ("true", "True"), ("1e9", "1000000000.0"))
        ),
    ],
)
def test_engines_sleep_only_where_they_can(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        validate(recipe(overrides), runs_here=False)
    validate(recipe([*GPU, "policy.dsv4.engine_sleep=true", POOL]), runs_here=False)
    both = ["policy.dsv4.engine_sleep=true", "policy.dsv4.trainer_sleep=true"]
    validate(recipe([*GPU, *both, POOL]), runs_here=False)


def test_cuda_ipc_to_engines_on_other_gpus_is_refused_before_the_run(recipe) -> None:
    """It was refused by the first refit, after the model and the engines had started."""
    with pytest.raises(UserError, match="transport is cuda_ipc, but policy.generation.colocated.enabled is false"):
        validate(recipe([*GPU, *OWN_GPUS, "policy.dsv4.refit.transport=cuda_ipc"]), runs_here=False)
    validate(recipe([*GPU, "policy.dsv4.refit.transport=cuda_ipc"]), runs_here=False)


NODES = ("cluster.num_nodes=4", "policy.train_global_batch_size=32")
OWN_NODES = (
    *NODES,
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.num_nodes=2",
)
FOLDER = "policy.dsv4.refit.transport=folder"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*NODES, "policy.generation.vllm_cfg.tensor_parallel_size=16"],
            "tensor_parallel_size is 16, which does not divide cluster.gpus_per_node = 8: the workers of one engine",
        ),
        ([*OWN_NODES, "policy.dsv4.refit.transport=shared_memory"], "generation has 2 nodes of its own"),
        ([*NODES, FOLDER], "transport is folder with cluster.num_nodes = 4, but policy.dsv4.refit.folder is null"),
        (
            [*NODES, FOLDER, "policy.dsv4.refit.folder=/dev/shm"],
            "'/dev/shm' with cluster.num_nodes = 4, which is memory",
        ),
        ([*NODES, FOLDER, "policy.dsv4.refit.folder=/dev/../dev/shm/a"], "which is memory of each host by itself"),
        (["policy.dsv4.refit.folder=/shared"], "folder is '/shared', but policy.dsv4.refit.transport is auto"),
    ],
)
def test_what_engines_of_several_nodes_cannot_do_is_refused_before_the_run(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        validate(recipe([*GPU, *overrides]), runs_here=False)


@pytest.mark.parametrize("overrides", [NODES, OWN_NODES, [*NODES, FOLDER, "policy.dsv4.refit.folder=shared"]])
def test_engines_of_several_nodes_are_accepted(recipe, overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    validate(recipe([*GPU, *overrides]), runs_here=False)


AHEAD = "grpo.async_grpo.enabled=true"
CORRECTED = "loss_fn.use_importance_sampling_correction=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([AHEAD, "loss_fn.use_importance_sampling_correction=false"], "use_importance_sampling_correction is false"),
        ([AHEAD, CORRECTED, "grpo.async_grpo.in_flight_weight_updates=true"], "in_flight_weight_updates is true"),
        ([*GPU, AHEAD, CORRECTED, "policy.dsv4.engine_sleep=true", POOL], "cannot sleep meanwhile"),
    ],
)
def test_rolling_out_ahead_needs_the_correction_and_awake_engines(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        validate(recipe(overrides), runs_here=False)
    validate(recipe([AHEAD, CORRECTED]), runs_here=False)


@pytest.mark.parametrize(("hidden_size", "multiple"), [(1024, 2048), (3072, 2048), (4608, 1024)])
def test_a_width_that_vllm_leaves_partly_unwritten_is_refused(recipe, hidden_size, multiple):
    """Decoding of fewer than 8 sequences read memory nobody wrote at width 1024: wrong logprobs, then NaN."""
    with pytest.raises(
        UserError, match=f"is {hidden_size}; vLLM's hyper-connection kernel needs a multiple of {multiple}"
    ):
        validate(recipe([*GPU, f"policy.dsv4.tiny.hidden_size={hidden_size}"]), runs_here=False)
    for fits in (2048, 4096, 7168):
        validate(recipe([*GPU, f"policy.dsv4.tiny.hidden_size={fits}"]), runs_here=False)


OWN = "+policy.generation.vllm_kwargs."
VARIABLE = "+policy.generation.vllm_cfg.env_vars."


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (OWN + "hf_overrides={swiglu_limit:5.0}", "hf_overrides is .*; the trainer would be another model"),
        (OWN + "speculative_config={method:mtp,num_speculative_tokens:1}", "a drafter is never refitted"),
        (OWN + "enable_eplb=true", "enable_eplb is True; experts would move"),
        (OWN + "enable_lora=true", "enable_lora is True; an adapter"),
        (OWN + "calculate_kv_scales=true", "calculate_kv_scales is True; the cache"),
        (OWN + "override_generation_config={temperature:0.3}", "sampling parameters are those of policy.generation"),
        (OWN + "logits_processors=[a.b]", "logits_processors is .*; tokens would be drawn"),
        (OWN + "distributed_executor_backend=ray", "distributed_executor_backend is 'ray'; engines are placed"),
        (OWN + "attention_config={use_fp4_indexer_cache:true}", "attention_config.use_fp4_indexer_cache is True"),
        (OWN + "data_parallel_rank=1", "data_parallel_rank is 1; every engine is one data-parallel rank"),
        (OWN + "hf_config_path=/tmp", "hf_config_path is '/tmp'; the trainer would be another model"),
        (OWN + "tokenizer=foo", "tokenizer is 'foo'; the engine reads the folder of policy.model_name"),
        (OWN + "revision=main", "revision is 'main'; the engine reads the folder of policy.model_name"),
        (OWN + "worker_cls=foo", "worker_cls is 'foo'; refits and the order of tokens"),
        (OWN + "scheduler_cls=x", "scheduler_cls is 'x'; refits and the order of tokens"),
        (OWN + "spec_method=mtp", "a drafter is never refitted"),
        (OWN + "nnodes=2", "nnodes is 2; engines are placed"),
        (OWN + "seed=7", r"seed is 7, but the engines' seed is grpo.seed \(42\); set it there and drop it here"),
        (VARIABLE + "CUDA_VISIBLE_DEVICES='3'", "CUDA_VISIBLE_DEVICES is '3'; engines get their GPUs by"),
        (VARIABLE + "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES='0'", "engines get their GPUs by"),
        (VARIABLE + "VLLM_TARGET_DEVICE=cpu", "VLLM_TARGET_DEVICE is 'cpu'; engines run on GPUs: drop the variable"),
        (VARIABLE + "VLLM_ALLOW_INSECURE_SERIALIZATION='1'", "VLLM_ALLOW_INSECURE_SERIALIZATION is '1'; nothing here"),
        ("+policy.generation.vllm_cfg.env_vars={A-B: x}", "env_vars has the name 'A-B'; wanted letters"),
        (VARIABLE + "VLLM_DP_SIZE='2'", "VLLM_DP_SIZE is '2'; every engine is one data-parallel rank"),
        (VARIABLE + "VLLM_DP_RANK='3'", "VLLM_DP_RANK is '3'"),
    ],
)
def test_what_would_make_another_rollout_behind_the_recipe_is_refused(recipe, override, message):
    """Cases C031, C040, C076, C089, C092 by other ways than those of the cases."""
    with pytest.raises(UserError, match=message):
        validate(recipe([*GPU, override]), runs_here=False)


@pytest.mark.parametrize(
    "override",
    ["speculative_config=null", "enable_eplb=false", "hf_overrides={}", "worker_cls=auto", "runner=generate"],
)
def test_arguments_that_ask_for_nothing_pass(recipe, override):
    validate(recipe([*GPU, OWN + override]), runs_here=False)


COUNT = "wanted a whole number, at least 1, or drop it"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        *(
            (f"max_num_seqs={value}", f"max_num_seqs is {shown}; {COUNT}")
            for value, shown in (
                ("abc", "'abc'"),
                ("0", "0"),
                ("-4", "-4"),
                ("null", "None"),
                ("1.5", "1.5"),
                ("true", "True"),
            )
        ),
        ("max_num_batched_tokens=abc", f"max_num_batched_tokens is 'abc'; {COUNT}"),
        ("max_num_batched_tokens=64", "max_num_batched_tokens is 64, less than max_num_seqs = 256"),
        ("max_logprobs=-2", r"max_logprobs is -2; wanted a whole number, at least -1 \(no limit\)"),
        ("kernel_config=abc", "kernel_config is 'abc'; wanted a mapping"),
        ("compilation_config=7", "compilation_config is 7; wanted a mapping, or a level from 0 to 3"),
        ("load_format=bogus", "load_format is 'bogus'; wanted one of auto, hf, safetensors"),
        ("load_format=pt", "load_format is 'pt'; wanted one of auto, hf, safetensors"),
        ("trust_remote_code=maybe", "trust_remote_code is 'maybe'; wanted true or false"),
        ("attention_backend=3", "attention_backend is 3; wanted text"),
        ("tokenizer_mode=null", "tokenizer_mode is None; wanted one of auto"),
        ("cpu_offload_gb=.inf", "cpu_offload_gb is .*; wanted a finite number"),
    ],
)
def test_values_that_vllm_does_not_take_are_refused_before_the_run(recipe, override, message):
    """An engine found them minutes later, in a traceback."""
    with pytest.raises(UserError, match=f"policy.generation.vllm_kwargs.{message}"):
        validate(recipe([*GPU, OWN + override]), runs_here=False)


@pytest.mark.parametrize(
    "override",
    [
        "max_num_seqs=512",
        "max_num_batched_tokens=8480",
        "max_num_batched_tokens=null",
        "max_logprobs=0",  # what this package asks for is the sampled token's alone
        "enable_chunked_prefill=false",
        "trust_remote_code=true",
        "kernel_config={enable_flashinfer_autotune: false}",
        "compilation_config={cudagraph_mode: PIECEWISE}",
        "limit_mm_per_prompt={image: 2}",
        "mm_processor_cache_gb=0",
        "mamba_ssm_cache_dtype=float32",
        "of_another_version=abc",
    ],
)
def test_values_of_nemo_rls_recipes_pass(recipe, override):
    validate(recipe([*GPU, OWN + override]), runs_here=False)


PROCESSED = "policy.generation.vllm_cfg.logprobs_mode=processed_logprobs"


@pytest.mark.parametrize("key", ["temperature=0.5", "top_p=0.9", "top_k=20"])
def test_processed_logprobs_are_those_of_raw_logits_or_refused(recipe, key):
    """Case C092: the trainer's log-probabilities know of no temperature."""
    with pytest.raises(UserError, match="logprobs_mode is processed_logprobs, but the trainer's .* set logprobs_mode"):
        validate(recipe([*GPU, PROCESSED, f"policy.generation.{key}"]), runs_here=False)
    validate(recipe([*GPU, PROCESSED]), runs_here=False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["policy.dsv4.tiny.o_groups=2"],
            "the model's o_groups is 2, which .*_size = 8 does not divide",
        ),
        (["policy.dsv4.tiny.num_attention_heads=4"], "num_attention_heads"),
        (["policy.dsv4.tiny.head_dim=256"], "head_dim of policy.model_name is 256; vLLM's attention kernels take 512"),
        (["policy.dsv4.tiny.index_head_dim=64"], "index_head_dim of policy.model_name is 64; .* take 128 only"),
        (["policy.dsv4.tiny.q_lora_rank=96"], "q_lora_rank of policy.model_name is 96; .* multiples of 128 only"),
    ],
)
def test_sizes_that_vllms_kernels_do_not_take_are_refused_before_a_model_is_made(recipe, overrides, message):
    """Eight workers of two groups computed with none each; other sizes failed after the warm start."""
    eight = "policy.generation.vllm_cfg.tensor_parallel_size=8"
    validate(recipe([*GPU, eight]), runs_here=False)
    with pytest.raises(UserError, match=message):
        validate(recipe([*GPU, eight, *overrides]), runs_here=False)


def test_dropout_is_refused_where_the_recipe_is_read(recipe):
    with pytest.raises(UserError, match="attention_dropout is 0.1; wanted 0, since an engine drops nothing"):
        validate(recipe([*GPU, "+policy.hf_config_overrides.attention_dropout=0.1"]), runs_here=False)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "vllm_cfg.max_model_len=9999999",
            "max_model_len is 9999999, more than the model's max_position_embeddings 1024",
        ),
        (
            "vllm_cfg.refit_buffer_size_gb=0.000001",
            "refit_buffer_size_gb is 1e-06, and attn.wq_b.weight of policy.model_name alone takes 524288 bytes; wanted "
            "at least 0.001",
        ),
    ],
)
def test_lengths_and_buffers_fit_the_model(recipe, override, message):
    with pytest.raises(UserError, match=message):
        validate(recipe([*GPU, f"policy.generation.{override}"]), runs_here=False)
    fits = ("vllm_cfg.max_model_len=1024", "vllm_cfg.refit_buffer_size_gb=0.001", "vllm_cfg.refit_buffer_size_gb=4")
    for accepted in fits:
        validate(recipe([*GPU, f"policy.generation.{accepted}"]), runs_here=False)


def test_a_buffer_holds_the_embedding_of_a_released_model(tiny):
    """129,280 tokens of 4096 in BF16 take 0.987 GiB: the first refit found it, after model and engines had started."""
    flash = tiny.parent / "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128-qat.yaml"
    size = "policy.generation.vllm_cfg.refit_buffer_size_gb"
    with pytest.raises(UserError, match="0.5, and embed.weight .* takes 1059061760 bytes; wanted at least 0.987"):
        validate(load_config(flash, [f"{size}=0.5"]), runs_here=False)
    validate(load_config(flash, [f"{size}=0.987"]), runs_here=False)
    with pytest.raises(UserError, match="stop_token_ids holds 129280, .*: policy.model_name has 129280 tokens"):
        validate(load_config(flash, ["policy.generation.stop_token_ids=[1,129280]"]), runs_here=False)
    validate(load_config(flash, ["policy.generation.stop_token_ids=[1,129279]"]), runs_here=False)
