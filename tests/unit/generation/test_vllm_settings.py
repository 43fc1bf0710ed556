"""Settings of a vLLM engine follow from the profile; a recipe that says otherwise is refused with both keys."""

from dataclasses import replace

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.rollout_facts import FACTS, PROFILE_OF_GPU
from nemo_rl_dsv4.generation.vllm_settings import VllmSpec, engine_arguments, engine_environment, engine_findings
from nemo_rl_dsv4.numerics import PROFILES, get_profile

HOPPER, ROCM, BF16 = (get_profile(name) for name in ("vllm-hopper", "vllm-rocm-gfx950", "bf16"))
SPEC = VllmSpec(model="model", profile="vllm-hopper", kv_cache_dtype="fp8_ds_mla")


def test_environment_of_each_vendor() -> None:
    hopper, rocm = engine_environment(HOPPER, {"HF_HOME": "/cache"}), engine_environment(ROCM, {})
    names = ("VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER")
    assert [hopper[name] for name in names] == ["1", "1", "0"]
    assert [rocm[name] for name in names] == ["0", "0", "0"]
    assert hopper["HF_HOME"] == "/cache"


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_USE_DEEP_GEMM_E8M0", "0"), ("VLLM_USE_DEEP_GEMM", "0"), ("VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "1")],
)
def test_a_variable_that_changes_the_rounding_is_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name} is '{value}', but rollout profile vllm-hopper needs"):
        engine_environment(HOPPER, {name: value})


def test_arguments_of_the_reference_recipe() -> None:
    arguments = engine_arguments(replace(SPEC, tensor_parallel_size=8, engine_arguments={"max_num_seqs": 64}), HOPPER)
    assert arguments["tensor_parallel_size"] == 8
    assert arguments["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in engine_arguments(SPEC, HOPPER)
    assert arguments["max_num_seqs"] == 64
    assert (arguments["kv_cache_dtype"], arguments["block_size"]) == ("fp8_ds_mla", 256)
    assert arguments["enable_prefix_caching"] is False
    assert arguments["skip_tokenizer_init"] is True
    with_text = engine_arguments(replace(SPEC, tokenizer="folder", tokenizer_mode="deepseek_v4"), HOPPER)
    assert (with_text["tokenizer"], with_text["skip_tokenizer_init"]) == ("folder", False)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"precision": "bfloat16"}, "precision is bfloat16"),
        ({"use_deep_gemm": False}, "use_deep_gemm is false"),
        ({"pow2_weight_scales": False}, "pow2_weight_scaling_factors is false"),
        ({"pow2_activation_scales": False}, "pow2_activation_scaling_factors is false"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype is auto"),
        ({"engine_arguments": {"kv_cache_dtype": "auto"}}, "vllm_kwargs.kv_cache_dtype is set"),
    ],
)
def test_a_recipe_that_contradicts_its_profile_names_both_keys(change: dict, key: str) -> None:
    """Case C010: each pair once disagreed in a real system: E8M0 off, float weight scales, a BF16 KV cache."""
    with pytest.raises(UserError, match=key):
        engine_arguments(replace(SPEC, **change), HOPPER)


def test_a_bf16_rollout_and_a_rocm_rollout_are_possible() -> None:
    bf16 = replace(SPEC, precision="bfloat16", kv_cache_dtype="auto", use_deep_gemm=False)
    assert engine_arguments(bf16, BF16)["dtype"] == "bfloat16"
    with pytest.raises(UserError, match="kv_cache_dtype is fp8_ds_mla but policy.dsv4.rollout_profile is bf16"):
        engine_arguments(replace(bf16, kv_cache_dtype="fp8_ds_mla"), BF16)
    engine_arguments(replace(SPEC, use_deep_gemm=False, pow2_activation_scales=False), ROCM)


def test_findings_of_a_running_engine() -> None:
    reported = {
        "vllm": "0.26.0",
        "kv_cache_dtype": "fp8_ds_mla",
        "logprobs_mode": "raw_logprobs",
        "environment": engine_environment(HOPPER, {}),
        "capability": [9, 0],
        "architecture": "",
    }
    assert engine_findings(reported, HOPPER) == []
    wrong_gpu = engine_findings({**reported, "capability": [10, 0]}, HOPPER)
    assert len(wrong_gpu) == 1 and "vllm-blackwell" in wrong_gpu[0]
    without = {k: v for k, v in reported["environment"].items() if k != "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"}
    assert (
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=None" in engine_findings({**reported, "environment": without}, HOPPER)[0]
    )
    for name, value in (("VLLM_TEST_FORCE_FP8_MARLIN", "1"), ("VLLM_DP_SIZE", "2"), ("VLLM_MOE_USE_DEEP_GEMM", "0")):
        inherited = {**reported["environment"], name: value}
        (finding,) = engine_findings({**reported, "environment": inherited}, HOPPER)
        assert finding.startswith(f"the engine's process has.{name} is '{value}'")
    assert "KV cache is auto" in engine_findings({**reported, "kv_cache_dtype": "auto"}, HOPPER)[0]


def test_the_light_table_says_what_the_profiles_say() -> None:
    assert set(FACTS) == set(PROFILES) and set(PROFILE_OF_GPU.values()) <= set(PROFILES)
    for name, profile in PROFILES.items():
        inputs = profile.site("linear.input")
        facts = FACTS[name]
        found = (facts.quantized, facts.deep_gemm, facts.fp8_kv, facts.fp8_o_proj)
        assert found == (
            profile.site("linear.weight") is not None,
            inputs is not None and inputs.scale == "ue8m0",
            profile.site("kv.swa") is not None,
            profile.site("o_proj.input") is not None,
        ), name


def test_switches_of_the_machine_reach_every_process() -> None:
    """A host may forbid NVLink multicast by these variables: what we set must not hide them, nor start from nothing."""
    from nemo_rl_dsv4.utils.ray_calls import CPU_WORKER_OPTIONS, GPU_WORKER_OPTIONS

    machine = {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"}
    for options in (CPU_WORKER_OPTIONS, GPU_WORKER_OPTIONS):
        runtime = options["runtime_env"]
        assert runtime.keys() == {"env_vars"}  # Ray adds these to the variables that the cluster was started with
        assert not machine & runtime["env_vars"].keys()
    assert not machine & engine_environment(HOPPER, {}).keys()
