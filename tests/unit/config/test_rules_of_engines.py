"""Rules of vLLM engines: sleep, where they are, rolling out ahead, widths that their kernels can do."""

import pytest
from test_rules import GPU

from nemo_rl_dsv4.config import validate
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
