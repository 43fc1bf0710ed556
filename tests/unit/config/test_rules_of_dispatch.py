"""Dispatcher, expert products and context-parallel lengths: refused before any weight is loaded."""

import pytest

from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.errors import UserError

BACKEND = "policy.dtensor_cfg.automodel_kwargs.backend"
EP, CP = "policy.dtensor_cfg.expert_parallel_size", "policy.dtensor_cfg.context_parallel_size"
ONE_NODE = ["cluster.num_nodes=1", f"{EP}=8"]

REFUSED = {
    "all-gather over many ranks": (
        [f"{BACKEND}.dispatcher=torch"],
        r"dispatcher is torch with .*expert_parallel_size = 128: .* above 8 ranks; set .*dispatcher to deepep",
    ),
    "old switch": ([f"+{BACKEND}.enable_deepep=true"], "enable_deepep is true, which AutoModel 0.7.0 ignores"),
    "fused RoPE": ([f"{BACKEND}.rope_fusion=true"], "rope_fusion is true, which AutoModel 0.7.0 switches off"),
    "old expert name": ([f"{BACKEND}.experts=gmm"], "write torch_mm"),
    "loop experts with DeepEP": ([f"{BACKEND}.experts=torch"], "quietly takes TransformerEngine's"),
    "TransformerEngine experts without": (
        [*ONE_NODE, f"{BACKEND}.dispatcher=torch", f"{BACKEND}.experts=te"],
        "experts is te with dispatcher torch, for which AutoModel 0.7.0 quietly takes torch_mm",
    ),
    "DeepEP alone": ([f"{EP}=1"], "dispatcher is deepep with .*expert_parallel_size = 1: .*use torch"),
    "unequal tokens": (
        [f"{BACKEND}.dispatcher=hybridep"],
        "equally many tokens on every rank, but policy.make_sequence_length_divisible_by is 64; set it to .* = 3072",
    ),
    "unequal rows": (
        [
            f"{BACKEND}.dispatcher=hybridep",
            "policy.make_sequence_length_divisible_by=3072",
            "policy.train_micro_batch_size=2",
        ],
        "policy.train_micro_batch_size is 2; set it to 1",
    ),
    "unknown dispatcher": ([f"{BACKEND}.dispatcher=nccl"], "dispatcher.* is 'nccl', wanted one of 'torch', 'deepep'"),
    "more ranks than experts": (
        ["cluster.num_nodes=64", f"{EP}=512"],
        "expert_parallel_size is 512, more than the model's 256 routed experts",
    ),
    "experts do not divide": (["cluster.num_nodes=12", f"{EP}=96"], "routed experts is 256, which .* = 96"),
    "ranks do not divide": (["cluster.num_nodes=15", f"{EP}=16", f"{CP}=16"], "which .*context_parallel_size = 16"),
    "rows that leave a part of a window": (
        ["policy.max_total_sequence_length=3000"],
        "max_total_sequence_length is 3000 with .*context_parallel_size = 8; wanted a multiple of 8 x 128 = 1024, such "
        "as 3072",
    ),
}


@pytest.fixture
def recipe(tiny, tmp_path):
    """The reference recipe of 128 GPUs, writing nowhere else."""
    path = tiny.parent / "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128.yaml"
    places = [f"logger.log_dir={tmp_path}/logs", f"checkpointing.checkpoint_dir={tmp_path}/c", "runtime=embedded"]

    def load(overrides):
        return validate(load_config(path, [*places, *overrides]), runs_here=False)

    return load


@pytest.mark.parametrize("case", REFUSED)
def test_dispatch_that_cannot_work_is_refused(recipe, case):
    """C088, C090: nothing is dispatched over many ranks, or by another library, than the recipe says."""
    overrides, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        recipe(overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*ONE_NODE, f"{BACKEND}.dispatcher=torch"],
        [*ONE_NODE, f"{BACKEND}.dispatcher=torch", f"{BACKEND}.experts=torch"],
        [f"{BACKEND}.dispatcher=uccl_ep"],
        [f"{BACKEND}.experts=te"],
        [f"{BACKEND}.dispatcher=hybridep", "policy.make_sequence_length_divisible_by=3072"],
        ["policy.max_total_sequence_length=10240"],
        [f"{EP}=64"],
    ],
    ids=lambda overrides: " ".join(overrides) or "as it is",
)
def test_neighbouring_layouts_are_allowed(recipe, overrides):
    assert recipe(overrides) == "embedded"
