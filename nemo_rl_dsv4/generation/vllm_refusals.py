"""Arguments and environment variables of vLLM that would change the rollout's numbers or its layout behind the recipe.

Names and meanings: vLLM 0.26.0 `vllm/engine/arg_utils.py` EngineArgs, `vllm/envs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.rollout_facts import RolloutFacts
from nemo_rl_dsv4.generation.vllm_arguments import ARGUMENTS

VARIABLES = "policy.generation.vllm_cfg.env_vars"

HARMLESS: dict[str, tuple[Any, ...]] = {
    "quantization": (None,),
    "quantization_config": (None,),
    "dtype": (),
    "moe_backend": (None, "auto"),
    "linear_backend": (None, "auto"),
    "model_impl": (None, "auto", "vllm"),
    "use_fp4_indexer_cache": (None, False),
    "override_attention_dtype": (None,),
    "kv_cache_dtype_skip_layers": (None, []),
}
"""Argument that decides how the engine computes -> values that leave it as it is."""
_OTHER_MODEL = "the trainer would be another model: change config.json of the model's folder"
_OTHER_PARTS = "refits and the order of tokens are those of vLLM's own"
_FOLDER = "the engine reads the folder of policy.model_name and nothing else"
_DRAFTER = "a drafter is never refitted"
_PLACES = "engines are placed by policy.generation and cluster"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hf_overrides": ((None, {}), _OTHER_MODEL),
    "hf_config_path": ((None,), _OTHER_MODEL),
    "config_format": (("auto", "hf"), _OTHER_MODEL),
    "model_class_overrides": ((None, {}), _OTHER_MODEL),
    "disable_sliding_window": ((False,), _OTHER_MODEL),
    "runner": (("auto", "generate"), "the engine would not generate"),
    "convert": (("auto", "none"), "the engine would not generate"),
    "model_weights": ((None, ""), _FOLDER),
    "revision": ((None,), _FOLDER),
    "code_revision": ((None,), _FOLDER),
    "tokenizer": ((None,), _FOLDER),
    "tokenizer_revision": ((None,), _FOLDER),
    "worker_cls": ((None, "auto"), _OTHER_PARTS),
    "scheduler_cls": ((None,), _OTHER_PARTS),
    "speculative_config": ((None,), _DRAFTER),
    "spec_method": ((None,), _DRAFTER),
    "spec_model": ((None,), _DRAFTER),
    "spec_tokens": ((None,), _DRAFTER),
    "diffusion_config": ((None,), "tokens would be drawn in another order than the trainer scores them"),
    "enable_eplb": ((None, False), "experts would move away from where refits put them"),
    "enable_elastic_ep": ((False,), "experts would move away from where refits put them"),
    "enable_lora": ((None, False), "an adapter is never refitted"),
    "calculate_kv_scales": ((None, False), "the cache would have other scales than the trainer rounds by"),
    "kv_sharing_fast_prefill": ((False,), "layers would be skipped that the trainer computes"),
    "kv_transfer_config": ((None,), "the cache would hold entries of other weights after a refit"),
    "ec_transfer_config": ((None,), "the cache would hold entries of other weights after a refit"),
    "weight_transfer_config": ((None,), "weights come by policy.dsv4.refit"),
    "override_generation_config": ((None, {}), "sampling parameters are those of policy.generation"),
    "logits_processors": ((None, []), "tokens would be drawn from other logits than the trainer's"),
    "distributed_executor_backend": ((None, "mp", "uni"), _PLACES),
    "device_ids": ((None,), _PLACES),
    "nnodes": ((1,), _PLACES),
    "node_rank": ((0,), _PLACES),
}
"""Argument -> values that ask for nothing, and why others are refused."""
PARALLEL_PREFIX = "data_parallel_"
DATA_PARALLEL = {"VLLM_DP_SIZE": ("", "1"), "VLLM_DP_RANK": ("", "0"), "VLLM_DP_RANK_LOCAL": ("", "0", "-1")}
"""Variable that vLLM takes for an argument of that name -> values of an engine without data parallelism."""
OFF = ("", "0", "false", "none")
"""Values of a variable that ask for nothing."""
UNUSABLE_VARIABLES = {
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "tokens would go to experts that the router did not choose",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "sums over ranks would be quantized, which no profile has",
}
FP8_VARIABLES = {
    "VLLM_TEST_FORCE_FP8_MARLIN": "Marlin multiplies unrounded activations",
    "VLLM_MARLIN_INPUT_DTYPE": "Marlin rounds activations by another rule",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": "Humming rounds activations by another rule",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": "Humming quantizes weights by another rule",
}
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Which GPUs a process sees, and how it numbers them."""
LEFT_TO_THE_PACKAGE = {
    **dict.fromkeys(GPU_VARIABLES, ((), "engines get their GPUs by policy.generation.colocated and cluster")),
    "VLLM_TARGET_DEVICE": (("cuda", "rocm"), "engines run on GPUs"),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": (OFF, "nothing here unpickles what a socket sends"),
    "VLLM_MODEL_REDIRECT_PATH": (("",), "the trainer would be another model"),
}
"""Variable that a recipe may not set -> values that ask for nothing, and why others are refused."""
NOSET = "RAY_EXPERIMENTAL_NOSET_"
"""Beginning of the variables by which Ray leaves a process its GPUs."""


def check_own_variables(own: Mapping[str, str]) -> None:
    """The recipe's own environment variables have names, and leave GPUs and processes to this package.

    Args:
        own: `policy.generation.vllm_cfg.env_vars`.

    Raises:
        UserError: the variable, its value and the reason.
    """
    for name, value in own.items():
        if not name.isidentifier() or not name.isascii():
            raise UserError(f"{VARIABLES} has the name {name!r}; wanted letters, digits and underscores: rename it")
        allowed, reason = LEFT_TO_THE_PACKAGE.get(name, ((value.strip().lower(),), ""))
        if name.startswith(NOSET):
            allowed, reason = LEFT_TO_THE_PACKAGE[GPU_VARIABLES[0]]
        if value.strip().lower() not in allowed:
            raise UserError(f"{VARIABLES}.{name} is {value!r}; {reason}: drop the variable")


def check_arguments(own: Mapping[str, Any]) -> None:
    """The recipe's own engine arguments leave numbers and parallel sizes to the keys that decide them.

    Args:
        own: `policy.generation.vllm_kwargs`.

    Raises:
        UserError: the argument, its value and where the setting belongs.
    """
    for key, value in own.items():
        if key.endswith("_parallel_size") and value != 1:
            raise UserError(
                f"{ARGUMENTS}.{key} is {value!r}; parallel sizes are those of policy.generation.vllm_cfg "
                "(tensor_parallel_size, expert_parallel_size): drop it here"
            )
        if key == "load_format" and value == "dummy":
            raise UserError(f"{ARGUMENTS}.load_format is 'dummy', which rolls out with random weights; drop it")
        if key.startswith(PARALLEL_PREFIX) and value not in (None, 0, 1 if "size" in key else 0):
            raise UserError(f"{ARGUMENTS}.{key} is {value!r}; every engine is one data-parallel rank: drop it")
        harmless, reason = REFUSED.get(key, ((value,), ""))
        if value not in harmless:
            raise UserError(f"{ARGUMENTS}.{key} is {value!r}; {reason}: drop it here")
        _check_numeric(key, f"{ARGUMENTS}.{key}", value)
    for group, inner in (
        ("kernel_config", ("moe_backend", "linear_backend")),
        ("attention_config", ("use_fp4_indexer_cache",)),
    ):
        nested = own.get(group)
        if not isinstance(nested, Mapping):
            continue
        for key in inner:
            if key in nested and nested[key] not in HARMLESS.get(key, ()):
                _refuse_numeric(f"{ARGUMENTS}.{group}.{key}", nested[key])


def _check_numeric(key: str, where: str, value: Any) -> None:
    if key in HARMLESS and value not in HARMLESS[key]:
        _refuse_numeric(where, value)


def _refuse_numeric(where: str, value: Any) -> None:
    raise UserError(
        f"{where} is {value!r}; how the engine computes follows from policy.generation.vllm_cfg.precision, the "
        "checkpoint and policy.dsv4.rollout_profile, which the trainer rounds by: drop it"
    )


def check_variables(own: Mapping[str, str], facts: RolloutFacts) -> None:
    """The recipe's own environment variables, or those of an engine's process, leave the kernels to the profile.

    Args:
        own: `policy.generation.vllm_cfg.env_vars`, or what the process has.
        facts: of the rollout profile.

    Raises:
        UserError: the variable, its value, and what it would change.
    """
    reasons = UNUSABLE_VARIABLES | (FP8_VARIABLES if facts.quantized else {})
    for name, value in own.items():
        is_off = value.strip().lower() in OFF
        if name in DATA_PARALLEL and value.strip() not in DATA_PARALLEL[name]:
            raise UserError(
                f"{VARIABLES}.{name} is {value!r}; every engine is one data-parallel rank: drop the variable"
            )
        if name in reasons and not is_off:
            raise UserError(
                f"{VARIABLES}.{name} is {value!r}, but policy.dsv4.rollout_profile is {facts.name}: {reasons[name]}; "
                "drop the variable"
            )
        if name == "VLLM_MOE_USE_DEEP_GEMM" and is_off and facts.deep_gemm:
            raise UserError(
                f"{VARIABLES}.{name} is {value!r}, but policy.dsv4.rollout_profile is {facts.name}, whose experts "
                "take DeepGEMM's power-of-two activation scales; drop the variable"
            )
