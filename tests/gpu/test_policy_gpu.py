"""A policy rank on a GPU computes what it does on a CPU in float32."""

from __future__ import annotations

import pytest
import torch
from nemo_automodel.components.models.deepseek_v4.layers import DeepseekV4RotaryEmbedding

from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.packing import Packing
from nemo_rl_dsv4.policy.parallel import Meshes, ParallelSizes
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.tiny.demonstrations import DemonstrationLoss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def float32_products():
    """TF32 would round products to 10 bits."""
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = previous


def worker(config, state, device, **kwargs):
    model = build_model(automodel_config(config), backend=CPU_BACKEND, device=torch.device(device))
    model.load_state_dict(state)
    return PolicyWorker(
        model,
        Meshes(ParallelSizes(1)),
        profile=get_profile("vllm-hopper"),
        fake_quant=dict.fromkeys(SWITCHES, False),
        micro_batch_size=2,
        logprob_batch_size=2,
        optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}},
        **kwargs,
    )


def batch():
    lengths = torch.tensor([140, 30, 28, 133])
    inside = torch.arange(140) < lengths.unsqueeze(1)
    ids = torch.randint(3, 160, (4, 140), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": torch.where(inside, ids, 1),
        "input_lengths": lengths,
        "token_mask": inside.float(),
        "sample_mask": torch.ones(4),
    }


def step(policy):
    data = batch()
    logprobs = policy.get_logprobs(data)["logprobs"]
    out = policy.train(data, DemonstrationLoss(), global_valid_seqs=4.0, global_valid_tokens=327.0)
    return logprobs, out["loss"], out["grad_norm"]


@pytest.mark.parametrize(
    "kwargs", [{}, {"logprob_chunk_size": 64}, {"packing": Packing(1024, 1024), "offload_optimizer_for_logprob": True}]
)
def test_a_step_on_a_gpu_is_the_one_on_a_cpu(config_once, training_once, kwargs):
    expected = step(worker(config_once, training_once, "cpu"))
    found = step(worker(config_once, training_once, "cuda", **kwargs))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-4)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert found[2] == pytest.approx(expected[2], rel=1e-4)


def test_optimizer_state_leaves_the_gpu_while_scoring_and_comes_back(config_once, training_once):
    policy = worker(config_once, training_once, "cuda", offload_optimizer_for_logprob=True)
    step(policy)
    moments = [state["exp_avg"] for state in policy.optimizer.state.values()]
    assert all(moment.is_cuda for moment in moments)
    policy.get_logprobs(batch())
    assert not any(moment.untyped_storage().nbytes() for moment in moments)
    step(policy)
    assert all(moment.untyped_storage().nbytes() for moment in moments)


def test_a_rank_that_sleeps_leaves_the_gpu_and_goes_on_where_it_was(config_once, training_once):
    found = []
    for sleeps in (False, True):
        policy = worker(config_once, training_once, "cuda", keep_reference=True)
        numbers = list(step(policy))
        if sleeps:
            before = torch.cuda.memory_allocated()
            moved = policy.sleep()
            assert moved > 1e6 and before - torch.cuda.memory_allocated() >= moved
        numbers += [policy.get_reference_logprobs(batch())["reference_logprobs"], *step(policy)]
        found.append(numbers)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one), rtol=1e-5, atol=1e-5)


def test_rotary_frequencies_are_those_that_a_gpu_computes(config_once, training_once):
    """An engine makes its tables there; a CPU's powers differ in the last bit."""
    rotary = worker(config_once, training_once, "cuda").model.model.rotary_emb_compress
    config = automodel_config(config_once)
    with torch.device("cuda"):
        wanted = DeepseekV4RotaryEmbedding(
            rope_theta=float(config.compress_rope_theta),
            head_dim=config.head_dim,
            partial_rotary_factor=config.qk_rope_head_dim / config.head_dim,
            rope_scaling=config.rope_scaling,
        )
    assert torch.equal(rotary.inv_freq, wanted.inv_freq)
