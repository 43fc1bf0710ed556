"""Rules between keys: each refusal names the keys and the fix, and the neighbouring allowed value passes."""

import json
import re

import pytest

from nemo_rl_dsv4.config import validate
from nemo_rl_dsv4.config.rules_of_run import check_writable
from nemo_rl_dsv4.config.runs_here import missing_here, not_implemented
from nemo_rl_dsv4.errors import UserError

PROCESSES = "policy.dsv4.cpu_processes"
CP, EP = "policy.dtensor_cfg.context_parallel_size", "policy.dtensor_cfg.expert_parallel_size"
ENGINE = "policy.generation.vllm_cfg"
PACKING = "policy.sequence_packing"
GPU = [
    "cluster.gpus_per_node=8",
    "policy.generation.backend=vllm",
    "policy.generation.vllm_cfg.max_model_len=256",
    "policy.dsv4.tiny.expert_format=fp8",
    "policy.dsv4.tiny.hidden_size=2048",
    "policy.dsv4.tiny.num_attention_heads=8",
    "policy.dsv4.tiny.o_groups=8",
    *(
        f"policy.dsv4.tiny.{key}={size}"
        for key, size in {
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "q_lora_rank": 128,
            "o_lora_rank": 128,
            "moe_intermediate_size": 128,
        }.items()
    ),
]

REFUSED = {
    "a profile to read only": (["policy.dsv4.rollout_profile=deepseek-reference"], "not a rollout of this version"),
    "another chat template": (
        ["policy.tokenizer.chat_template=llama3"],
        "chat_template is 'llama3'; wanted deepseek_v4",
    ),
    "unknown chat argument": (
        ["policy.tokenizer.chat_template_kwargs={thinking_mode:chat}"],
        "unknown keys .'thinking_mode'.; wanted thinking",
    ),
    "thinking maybe": (["policy.tokenizer.chat_template_kwargs={thinking:maybe}"], "thinking is 'maybe'; wanted true"),
    "effort without thinking": (
        ["policy.tokenizer.chat_template_kwargs={reasoning_effort:max}"],
        "reasoning_effort is 'max' with thinking False",
    ),
    "a transport to engines in Ray": (
        ["policy.dsv4.refit.transport=folder"],
        "refit.transport is folder, but policy.generation.backend is reference.* set it to auto",
    ),
    "two ends of NCCL on one GPU": (
        [
            *GPU[1:],
            "cluster.gpus_per_node=1",
            "policy.dtensor_cfg.dp_replicate_size=1",
            "policy.generation.vllm_cfg.tensor_parallel_size=1",
            "policy.dsv4.refit.transport=broadcast",
        ],
        "refit.transport is broadcast, but the one policy rank shares its GPU with the engine.* set it to auto",
    ),
    "routes that vLLM does not return": (
        [*GPU, "policy.dsv4.router_overlap_metrics=true"],
        "router_overlap_metrics needs .*vllm_cfg.enable_return_routed_experts is false; set it to true",
    ),
    "cp does not divide the processes": ([f"{CP}=2"], f"cpu_processes .* is 1, which {CP} = 2 does not divide"),
    "ep does not divide the processes": ([f"{PROCESSES}=2", f"{EP}=4"], f"is 2, which {EP} = 4 does not divide"),
    "ep does not divide the experts": (
        [f"{PROCESSES}=3", f"{EP}=3", "policy.train_global_batch_size=32"],
        f"routed experts is 8, which {EP} = 3 does not divide",
    ),
    "a misspelt argument of AdamW": (
        ["+policy.optimizer.kwargs.weight_decoy=0.1"],
        "unknown key policy.optimizer.kwargs.weight_decoy; did you mean weight_decay",
    ),
    "one beta": (["policy.optimizer.kwargs.betas=[0.9]"], "kwargs.betas is .0.9.: list should have at least 2 items"),
    "no learning rate": (["policy.optimizer.kwargs.lr=0"], "kwargs.lr is 0; wanted a number above 0"),
    "an optimizer that is no path": (["policy.optimizer.name=AdamW"], "name is 'AdamW'; wanted a class path"),
    "packing into less than a row": (
        [f"{PACKING}.enabled=true", f"{PACKING}.train_mb_tokens=100"],
        f"{PACKING}.train_mb_tokens is 100, but a row of .* takes 256; raise it",
    ),
    "packed rows padded to another multiple": (
        [f"{PACKING}.enabled=true", f"{PACKING}.sequence_length_round=96"],
        "sequence_length_round is 96; .* give a divisor",
    ),
    "no tensor parallelism": ([f"{PROCESSES}=2", "policy.dtensor_cfg.tensor_parallel_size=2"], "wanted 1"),
    "replicas do not divide": ([f"{PROCESSES}=2", "policy.dtensor_cfg.dp_replicate_size=3"], "dp_replicate_size = 3"),
    "replicas of shards": (
        [f"{PROCESSES}=4", "policy.dtensor_cfg.dp_replicate_size=2"],
        "dp_replicate_size is 2; wanted 1 .sharded., or all 4 data-parallel ranks",
    ),
    "update does not divide the rollouts": (
        ["policy.train_global_batch_size=100"],
        "set train_global_batch_size to 128",
    ),
    "ranks do not divide the update": (
        [f"{PROCESSES}=3", "policy.train_global_batch_size=64"],
        "train_global_batch_size is 64, which the data-parallel size .* = 3 does not divide",
    ),
    "one update per step": (
        ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=64"],
        "train_global_batch_size.*force_on_policy_ratio",
    ),
    "longer than the model": (
        ["policy.max_total_sequence_length=1025", "data.max_input_seq_length=200"],
        "1025, longer than the model's max_position_embeddings 1024",
    ),
    "longer than the model once padded": (
        [
            "policy.make_sequence_length_divisible_by=256",
            "policy.max_total_sequence_length=1000",
            "policy.dsv4.tiny.max_position_embeddings=1000",
        ],
        r"1000 \(1024 after padding to a multiple of 256\)",
    ),
    "response longer than the sequence": (["policy.generation.max_new_tokens=257"], "max_new_tokens is 257"),
    "prompt longer than the sequence": (["data.max_input_seq_length=257"], "max_input_seq_length is 257"),
    "engine shorter than the sequence": (
        [*GPU[:2], "policy.generation.vllm_cfg.max_model_len=255"],
        "max_model_len is 255",
    ),
    "qat without rounding": (
        [
            f"policy.dsv4.fake_quant.{s}=false"
            for s in ("weights", "linear_inputs", "o_proj", "experts", "kv", "indexer")
        ],
        "nothing is rounded; use train_mode bf16",
    ),
    "qat against a BF16 rollout": (
        ["policy.dsv4.rollout_profile=bf16"],
        "rollout_profile is bf16, which rounds nothing",
    ),
    "bf16 with rounded products": (
        ["policy.dsv4.train_mode=bf16", "policy.dsv4.fake_quant.experts=true"],
        "fake_quant.experts is true; bf16 rounds at most kv and indexer",
    ),
    "fp8 with an operand left out": (
        ["policy.dsv4.train_mode=fp8", "policy.dsv4.fake_quant.o_proj=false"],
        "train_mode is fp8 but policy.dsv4.fake_quant.o_proj is false",
    ),
    "fp8 against a BF16 rollout": (
        ["policy.dsv4.train_mode=fp8", "policy.dsv4.rollout_profile=bf16"],
        "train_mode is fp8 but policy.dsv4.rollout_profile is bf16",
    ),
    "vllm without GPUs": (["policy.generation.backend=vllm"], "backend is vllm .*; use reference"),
    "reference with GPUs": (["cluster.gpus_per_node=8"], "backend is reference"),
    "CPU processes with GPUs": ([*GPU, f"{PROCESSES}=2"], "cpu_processes is 2"),
    "auto without a GPU": (["policy.dsv4.rollout_profile=auto"], "name a profile, such as vllm-hopper"),
    "a GPU kernel on a CPU": (["policy.dtensor_cfg.automodel_kwargs.backend.attn=tilelang"], "use sdpa or eager"),
    "DeepEP on a CPU": (["policy.dtensor_cfg.automodel_kwargs.backend.dispatcher=deepep"], "use torch"),
    "offloading on a CPU": (["policy.dtensor_cfg.cpu_offload=true"], "nothing to offload"),
    "nodes on a CPU": (["cluster.num_nodes=2"], r"cpu_processes .* is 1, which cluster.num_nodes = 2 does not divide"),
    "engine does not divide the GPUs": (
        [*GPU, "policy.generation.vllm_cfg.tensor_parallel_size=3"],
        "= 3 does not divide",
    ),
    "own GPUs for the rollout, but none": (
        [*GPU, "policy.generation.colocated.enabled=false"],
        r"enabled is false but .*resources.gpus_per_node is null; .*below cluster.gpus_per_node = 8",
    ),
    "truncation without a bound": (
        ["loss_fn.truncated_importance_sampling_ratio=null"],
        "truncated_importance_sampling_ratio",
    ),
    "penalty without reference": (
        ["grpo.skip_reference_policy_logprobs_calculation=true", "loss_fn.reference_policy_kl_penalty=0.1"],
        "skip_reference_policy_logprobs_calculation",
    ),
    "multiplier without dynamic sampling": (["grpo.batch_multiplier=2"], "use_dynamic_sampling is false"),
    "empty training set": (["data.train.size=0"], "data.train.size is 0: an empty dataset"),
    "empty validation set": (["data.validation.size=0"], "data.validation.size is 0: an empty dataset"),
    "unnamed data set": (["data.train.dataset_name=null"], "dataset_name is null"),
    "training set smaller than a step": (["data.train.size=15"], "fewer than grpo.num_prompts_per_step = 16"),
    "validation without data": (["data.validation=null"], "give a validation set"),
    "ranking by validation that is off": (
        ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"],
        "metric_name is val:accuracy but validation is off",
    ),
    "one ratio per layer": (["policy.dsv4.tiny.num_hidden_layers=4"], "has 5 entries but .* is 4"),
    "more experts a token than experts": (["policy.dsv4.tiny.num_experts_per_tok=9"], "is 9, more than"),
    "odd RoPE": (["policy.dsv4.tiny.qk_rope_head_dim=15"], "must be even"),
    "output groups": (["policy.dsv4.tiny.o_groups=3"], "o_groups = 3 does not divide"),
    "tiny without sizes": (["policy.dsv4.tiny=null"], "policy.dsv4.tiny is null"),
    "no such checkpoint": (["policy.model_name=./nowhere"], "no such folder"),
    "another model with the tiny tokenizer": (
        ["policy.model_name=a/b", "policy.tokenizer.name=tiny"],
        "tokenizer.name is tiny",
    ),
    "milestones that do not fit": (
        ["policy.scheduler=[{name:torch.optim.lr_scheduler.ConstantLR},{milestones:[5]}]"],
        "wanted 0",
    ),
    "a schedule that is no path": (
        ["policy.scheduler=[{name:LinearLR}]"],
        "policy.scheduler.0.name is 'LinearLR'; wanted a class path",
    ),
    "a part that is both": (["policy.scheduler=[{kwargs:{}}]"], "either a name"),
    "layers of the rollout in BF16": (
        [*GPU, f"{ENGINE}.num_last_layers_in_bf16=2"],
        "num_last_layers_in_bf16 is 2, which the embedded runtime does not do; set it to 0",
    ),
    "first layers of the rollout in BF16": (
        [*GPU, f"{ENGINE}.num_first_layers_in_bf16=1"],
        "num_first_layers_in_bf16 is 1, which the embedded runtime does not do",
    ),
    "pipeline stages of the rollout": (
        [*GPU, f"{ENGINE}.tensor_parallel_size=1", f"{ENGINE}.pipeline_parallel_size=2"],
        "pipeline_parallel_size is 2, which the embedded runtime does not do; set it to 1",
    ),
    "a BF16 engine under an FP8 profile": (
        [*GPU, f"{ENGINE}.precision=bfloat16"],
        "precision is bfloat16 but policy.dsv4.rollout_profile is vllm-hopper, whose products are FP8",
    ),
    "a BF16 engine on any GPU": (
        [*GPU, "policy.dsv4.rollout_profile=auto", f"{ENGINE}.precision=bfloat16"],
        "precision is bfloat16 but policy.dsv4.rollout_profile is auto, whose products are FP8",
    ),
    "no DeepGEMM on the GPU that the recipe names": (
        [*GPU, "policy.dsv4.rollout_profile=auto", "policy.dsv4.gpu=b200", f"{ENGINE}.use_deep_gemm=false"],
        r"use_deep_gemm is false but .* is auto .vllm-blackwell: policy.dsv4.gpu is b200.",
    ),
    "a BF16 cache under an FP8 profile": ([*GPU, f"{ENGINE}.kv_cache_dtype=auto"], "kv_cache_dtype is auto but"),
    "float weight scales": ([*GPU, f"{ENGINE}.pow2_weight_scaling_factors=false"], "scaling_factors is false but"),
    "float activation scales by a variable": (
        [*GPU, f"+{ENGINE}.env_vars.VLLM_USE_DEEP_GEMM_E8M0='0'"],
        "env_vars.VLLM_USE_DEEP_GEMM_E8M0 is '0', but rollout profile vllm-hopper needs '1'",
    ),
    "experts without DeepGEMM": (
        [*GPU, f"+{ENGINE}.env_vars.VLLM_MOE_USE_DEEP_GEMM='0'"],
        "env_vars.VLLM_MOE_USE_DEEP_GEMM is '0', but policy.dsv4.rollout_profile is vllm-hopper",
    ),
    "Marlin products": (
        [*GPU, "policy.dsv4.rollout_profile=auto", f"+{ENGINE}.env_vars.VLLM_TEST_FORCE_FP8_MARLIN='1'"],
        "VLLM_TEST_FORCE_FP8_MARLIN is '1', .* Marlin multiplies unrounded activations; drop",
    ),
    "simulated routing": (
        [*GPU, f"+{ENGINE}.env_vars.VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random"],
        "experts that the router did not choose",
    ),
    "an argument that has a key": (
        [*GPU, "+policy.generation.vllm_kwargs.enforce_eager=false"],
        "vllm_kwargs.enforce_eager is set, but it follows from policy.generation.vllm_cfg",
    ),
    "random weights": ([*GPU, "+policy.generation.vllm_kwargs.load_format=dummy"], "load_format is 'dummy', which"),
    "nested quantization": (
        [*GPU, "+policy.generation.vllm_kwargs.hf_overrides={quantization_config:{quant_method:fp8}}"],
        "vllm_kwargs.hf_overrides is .*quantization_config.*; the trainer would be another model",
    ),
    "nested expert products": (
        [*GPU, "+policy.generation.vllm_kwargs.kernel_config={moe_backend:triton}"],
        "vllm_kwargs.kernel_config.moe_backend is 'triton'",
    ),
    **{
        f"{key} behind the recipe": (
            [*GPU, f"+policy.generation.vllm_kwargs.{key}={value}"],
            f"vllm_kwargs.{key} is .*{value}.*drop it",
        )
        for key, value in {
            "quantization": "mxfp8",
            "dtype": "float16",
            "moe_backend": "triton",
            "linear_backend": "cutlass",
            "model_impl": "transformers",
            "data_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "decode_context_parallel_size": 2,
        }.items()
    },
    "a profile of another GPU": (
        [*GPU, "policy.dsv4.gpu=mi355x"],
        "rollout_profile is vllm-hopper but policy.dsv4.gpu is mi355x, whose rollout is vllm-rocm-gfx950",
    ),
    "another class for the backend": (
        ["policy.dtensor_cfg.automodel_kwargs.backend._target_=os.system"],
        "backend._target_ is 'os.system'; wanted nemo_automodel",
    ),
    "a group of one": (
        ["grpo.num_generations_per_prompt=1", "policy.train_global_batch_size=16"],
        "num_generations_per_prompt is 1: .* all would be 0",
    ),
    "numbers without end": (["data.train.max_number=1000000000"], "max_number is 1000000000; wanted at most 100000"),
    "dots for an optimizer": (["policy.optimizer.name=...."], "name is '....'; wanted a class path"),
    "a function for an optimizer": (["policy.optimizer.name=os.system"], "name is 'os.system'; wanted a class path"),
    "an optimizer with a closure": (["policy.optimizer.name=torch.optim.LBFGS"], "through a closure"),
    "two implementations of AdamW": (
        ["policy.optimizer.kwargs.foreach=true", "policy.optimizer.kwargs.fused=true"],
        "kwargs.foreach and policy.optimizer.kwargs.fused are both true",
    ),
    "a schedule that wants a metric": (
        ["policy.scheduler=[{name:torch.optim.lr_scheduler.ReduceLROnPlateau}]"],
        "policy.scheduler.0.name is .*ReduceLROnPlateau, which wants a metric",
    ),
    "a stair of no steps": (
        ["policy.scheduler=[{name:torch.optim.lr_scheduler.StepLR,kwargs:{step_size:0}}]"],
        "policy.scheduler.0.kwargs.step_size is 0; wanted a whole number of 1 or more",
    ),
    "an override that breaks the model": (
        ["policy.model_name=deepseek-ai/DeepSeek-V4-Flash", "+policy.hf_config_overrides.o_groups=7"],
        "hf_config_overrides .'o_groups'. on config.json of policy.model_name: num_attention_heads 64 is not a multi",
    ),
    "an override of the tiny model": (
        ["+policy.hf_config_overrides.num_hash_layers=99"],
        "num_hash_layers is 99; wanted 0 to 5",
    ),
    "tracker that is not installed": (["logger.wandb_enabled=true"], "wandb is not installed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_combination_that_cannot_work_is_refused(recipe, case, monkeypatch):
    overrides, message = REFUSED[case]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message) as caught:
        validate(recipe(overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{PROCESSES}=4", f"{CP}=2", f"{EP}=4"],
        [f"{PROCESSES}=2", f"{EP}=2", "policy.dtensor_cfg.dp_replicate_size=1"],
        [f"{PROCESSES}=2", "policy.dtensor_cfg.dp_replicate_size=2"],
        ["policy.train_global_batch_size=64"],
        ["policy.train_micro_batch_size=100"],
        ["policy.max_total_sequence_length=1024"],
        ["policy.dsv4.train_mode=bf16", "policy.dsv4.fake_quant.kv=true", "policy.dsv4.fake_quant.indexer=true"],
        ["policy.dsv4.train_mode=bf16", "policy.dsv4.rollout_profile=bf16"],
        ["policy.dsv4.fake_quant.o_proj=false"],
        ["loss_fn.force_on_policy_ratio=true"],
        ["policy.scheduler=null"],
        ["policy.scheduler=[{name:torch.optim.lr_scheduler.ConstantLR,kwargs:{factor:1.0}}]"],
        [*GPU, "policy.dsv4.rollout_profile=auto"],
        [*GPU, "policy.dsv4.rollout_profile=auto", "policy.dsv4.gpu=mi300x", f"{ENGINE}.use_deep_gemm=false"],
        [*GPU, "policy.dsv4.gpu=h200", f"+{ENGINE}.env_vars.VLLM_MOE_USE_DEEP_GEMM='1'"],
        [*GPU, "+policy.generation.vllm_kwargs={moe_backend:auto,data_parallel_size:1,max_num_seqs:8}"],
        ["checkpointing.enabled=false"],
        ["policy.dsv4.router_replay=true"],
        [*GPU, "policy.dsv4.router_replay=true"],  # the base recipe lets vLLM's capture follow this key
        [f"{PACKING}.enabled=true", f"{PACKING}.train_mb_tokens=256"],
        ["policy.optimizer.name=torch.optim.SGD", "+policy.optimizer.kwargs.momentum=0.9"],
    ],
    ids=lambda overrides: " ".join(overrides) or "as it is",
)
def test_neighbouring_combinations_are_allowed(recipe, overrides):
    assert validate(recipe(overrides)) == "embedded"


def test_rollout_with_data_parallel_ranks_is_refused(recipe):
    """C089: a vLLM engine with expert ranks beyond its tensor ranks has data-parallel ranks, and generation hangs."""
    engine = "policy.generation.vllm_cfg"
    overrides = [*GPU, f"{engine}.tensor_parallel_size=4", f"{engine}.expert_parallel_size=8"]
    with pytest.raises(UserError, match="2 data-parallel ranks in lockstep, which hangs; use at most 4"):
        validate(recipe(overrides))
    assert validate(recipe([*GPU, f"{engine}.tensor_parallel_size=8", f"{engine}.expert_parallel_size=1"]))


TILELANG = "policy.dtensor_cfg.automodel_kwargs.backend.attn=tilelang"


@pytest.fixture
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernels take one width; these rules are of the trainer's."""
    monkeypatch.setattr("nemo_rl_dsv4.config.rules_of_rollout.check_kernel_shapes", lambda *_: None)


@pytest.mark.parametrize(
    ("heads", "width", "left"),
    [(24, 512, 8), (24, 128, 24), (72, 128, 8), (40, 256, 8), (8, 80, None)],
)
def test_heads_that_do_not_fill_a_block_of_the_kernels_are_refused(recipe, any_width, heads, width, left):
    """C072: the padded head index of AutoModel's TileLang kernels was used on tensors without that padding."""
    sizes = [f"policy.dsv4.tiny.num_attention_heads={heads}", f"policy.dsv4.tiny.head_dim={width}"]
    message = f"num_attention_heads is {heads}: .*leaves {left} where" if left else f"head_dim is {width}; .* power of"
    with pytest.raises(UserError, match=message):
        validate(recipe([*GPU, TILELANG, *sizes]))
    validate(recipe([*GPU, *sizes]))


@pytest.mark.parametrize(("heads", "width"), [(8, 512), (16, 512), (64, 512), (96, 512), (32, 128), (96, 128)])
def test_heads_that_fill_the_blocks_are_allowed(recipe, any_width, heads, width):
    """C072: fewer than 16 heads are padded by AutoModel itself, 96 are six blocks of 16, or one of 64 and one of 32."""
    sizes = [f"policy.dsv4.tiny.num_attention_heads={heads}", f"policy.dsv4.tiny.head_dim={width}"]
    assert validate(recipe([*GPU, TILELANG, *sizes])) == "embedded"


@pytest.mark.parametrize("profile", ["vllm-rocm-gfx942", "vllm-rocm-gfx950"])
def test_nvidia_kernels_with_an_amd_rollout_are_refused(recipe, profile):
    """C073: tiles of 141,312 bytes of shared memory, where an MI300X has 65,536."""
    amd = [*GPU, f"policy.dsv4.rollout_profile={profile}", "policy.dsv4.tiny.head_dim=128"]
    with pytest.raises(UserError, match=f"attn is tilelang but policy.dsv4.rollout_profile is {profile}"):
        validate(recipe([*amd, TILELANG]))
    assert validate(recipe(amd)) == "embedded"


def test_limits_come_from_a_checkpoint_folder(recipe, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 200, "n_routed_experts": 8}))
    overrides = [f"policy.model_name={folder}"]
    with pytest.raises(UserError, match="longer than the model's max_position_embeddings 200"):
        validate(recipe(overrides))
    validate(recipe([*overrides, "+policy.hf_config_overrides.max_position_embeddings=256"]))


@pytest.mark.parametrize(
    ("content", "message"), [(None, "holds no config.json"), ("{", "not valid JSON"), ("3", "wanted a mapping")]
)
def test_a_broken_checkpoint_folder_is_named(recipe, tmp_path, content, message):
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        validate(recipe([f"policy.model_name={folder}"]))


def test_a_folder_that_cannot_be_written_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"logger.log_dir is '.*', but .*file is a file"):
        check_writable(str(tmp_path / "file" / "logs"), "logger.log_dir")
    with pytest.raises(UserError, match="logger.log_dir is '/proc/logs': cannot write in /proc"):
        check_writable("/proc/logs", "logger.log_dir")
    check_writable(str(tmp_path / "a" / "b"), "logger.log_dir")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nemo_rl_is_found_by_its_source_and_not_by_the_placeholder(recipe, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").write_text("raise RuntimeError('must not be imported to be found')")
    assert validate(recipe(["runtime=auto"])) == "embedded"
    with pytest.raises(UserError, match="put its checkout on PYTHONPATH"):
        validate(recipe(["runtime=nemo_rl"]))
    (tmp_path / "nemo_rl" / "algorithms").mkdir()
    (tmp_path / "nemo_rl" / "algorithms" / "grpo.py").write_text("")
    assert validate(recipe(["runtime=auto"])) == "nemo_rl"
    assert validate(recipe(["runtime=embedded"])) == "embedded"


def test_a_dry_run_names_a_python_of_vllm_that_is_missing(recipe, tmp_path):
    lines = missing_here(recipe([*GPU, "policy.dsv4.vllm_python=/nowhere/python"]))
    assert any("policy.dsv4.vllm_python is '/nowhere/python', no such file" in line for line in lines)
    own = tmp_path / "python"
    own.write_text("#!/bin/sh\necho python\n")
    own.chmod(0o755)
    assert not any("vllm" in line for line in missing_here(recipe([*GPU, f"policy.dsv4.vllm_python={own}"])))
    lines = missing_here(recipe([*GPU, "policy.dsv4.vllm_python=/bin/ls"]))
    assert any("policy.dsv4.vllm_python is '/bin/ls', no Python: it does not run" in line for line in lines)


@pytest.mark.parametrize("runtime", ["embedded", "nemo_rl"])
def test_a_dry_run_says_which_engines_do_not_run(recipe, runtime):
    assert not_implemented(recipe([*GPU, "cluster.num_nodes=2"]), runtime) == []
    (line,) = not_implemented(recipe([*GPU, "policy.generation.vllm_cfg.async_engine=true"]), runtime)
    assert "async_engine is true" in line


def test_a_dry_run_of_several_nodes_asks_for_a_cluster(recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("nemo_rl_dsv4.config.runs_here.RAY_CLUSTER_FILE", str(tmp_path / "cluster"))
    two = recipe([*GPU, "cluster.num_nodes=2"])
    assert any("a Ray cluster of 2 nodes; none was started here" in line for line in missing_here(two))
    assert not any("Ray cluster" in line for line in missing_here(recipe(GPU)))
    (tmp_path / "cluster").write_text("10.0.0.1:6379")
    assert not any("Ray cluster" in line for line in missing_here(two))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.async_grpo.enabled=true"], "async_grpo.enabled is true; only NeMo-RL's synchronous"),
        (["grpo.max_val_samples=100", "grpo.val_batch_size=64"], "max_val_samples 100 is no multiple of .* 64"),
        (["checkpointing.save_optimizer=false"], "save_optimizer is false"),
    ],
)
def test_a_dry_run_says_what_grpo_train_does_not_do(recipe, overrides, message):
    assert not_implemented(recipe([]), "nemo_rl") == []
    (line,) = not_implemented(recipe(overrides), "nemo_rl")
    assert re.search(message, line)
