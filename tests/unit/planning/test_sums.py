"""Formulas of memory, traffic and the engine's share, against numbers worked out otherwise."""

import itertools
import math

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.known_models import KNOWN_MODELS, known_config
from nemo_rl_dsv4.planning import communication as comm
from nemo_rl_dsv4.planning import memory as mem
from nemo_rl_dsv4.planning.engine import kv_bytes, plan_engine, weight_bytes_per_rank
from nemo_rl_dsv4.planning.forward import BlockMemory
from nemo_rl_dsv4.planning.hardware import GIB, RUNTIME_BYTES, gpu_bytes
from nemo_rl_dsv4.planning.plan import stored_parameters

FLASH = {**(known_config("deepseek-ai/DeepSeek-V4-Flash") or {}), "num_nextn_predict_layers": 0}
ONE = comm.Passes(training=1, scoring=0, recomputes=False)


def test_known_models_are_flash():
    """43 layers and 284 B parameters, sizes as AutoModel's configuration has them by default."""
    from nemo_automodel.components.models.deepseek_v4.config import DeepseekV4Config

    defaults = DeepseekV4Config()
    for name, config in KNOWN_MODELS.items():
        for key, value in config.items():
            if hasattr(defaults, key) and key not in ("architectures", "compress_ratios", "rope_scaling"):
                assert getattr(defaults, key) == value, (name, key)
        assert len(config["compress_ratios"]) == config["num_hidden_layers"] == 43
    assert round(stored_parameters(FLASH) / 1e9) == 284


def test_distinct_groups_by_counting():
    experts, groups, top_k = 12, 4, 3
    choices = list(itertools.combinations(range(experts), top_k))
    counted = sum(len({expert // 3 for expert in choice}) for choice in choices) / len(choices)
    assert math.isclose(comm.distinct_groups(groups, experts, top_k), counted)
    assert comm.distinct_groups(1, experts, top_k) == 1


def test_expert_traffic_of_a_small_layout():
    """Two ranks, every token visits all experts: half of what is dispatched and combined goes to the other rank."""
    config = {"hidden_size": 8, "num_experts_per_tok": 2, "n_routed_experts": 2, "num_hidden_layers": 3}
    sent = comm.expert_traffic(config, ONE, dispatcher="deepep", ranks=2, tokens=10, gpus_per_node=8)
    assert sent.sent == 3 * 2 * 2 * 10 * 8 * 2 * 1 and sent.between_nodes == 0
    again = comm.expert_traffic(
        config, comm.Passes(1, 1, True), dispatcher="deepep", ranks=2, tokens=10, gpus_per_node=1
    )
    assert again.sent == 2 * sent.sent and again.between_nodes == again.sent
    gathered = comm.expert_traffic(config, ONE, dispatcher="torch", ranks=2, tokens=10, gpus_per_node=8)
    assert gathered.sent == 3 * 2 * (10 * 8 * 2 + 2 * 10 * 2 * 8 * 4)


def test_context_traffic_of_a_small_layout():
    config = {"head_dim": 16, "index_head_dim": 4, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    sent = comm.context_traffic(config, ONE, ranks=2, tokens=128, gpus_per_node=2).sent
    keys = 128 * 16 * 2 * 3 + 32 * 16 * 2 + 1 * 16 * 2
    assert sent == keys + 32 * 4 * 2 + 2 * keys
    assert comm.context_traffic(config, ONE, ranks=1, tokens=128, gpus_per_node=2).sent == 0


def test_ring_hops_that_leave_a_node():
    assert comm.share_outside_node(8, 8) == 0.0
    assert comm.share_outside_node(128, 8) == 1 / 8
    assert comm.share_outside_node(16, 8, stride=8) == 1.0


def test_activations_with_and_without_checkpointing():
    blocks = (BlockMemory("a", 3, 10, 70, 100, 20), BlockMemory("b", 1, 10, 90, 95, 30))
    assert mem.activation_bytes(blocks, checkpointing=True) == 4 * 10 + 100
    assert mem.activation_bytes(blocks, checkpointing=False) == 3 * 70 + 90 + 30
    assert mem.scoring_bytes(blocks) == 40


def test_logits_in_chunks():
    whole = mem.logits_bytes(3072, 129280, None, training=True)
    assert whole == 3072 * 129280 * 8
    assert mem.logits_bytes(3072, 129280, 1024, training=True) * 3 == whole
    assert mem.logits_bytes(384, 129280, 1024, training=False) == 384 * 129280 * 4


def test_kv_bytes_follow_the_layers():
    per_token, per_sequence = kv_bytes({**FLASH, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}, fp8=True)
    assert math.isclose(per_token, (584 + 132) / 4 + 584 / 128) and per_sequence == 3 * 128 * 584


def test_engine_weights_of_flash():
    """284 B parameters, nearly all of them one byte in FP8; eight ranks hold an eighth and what is not divided."""
    alone = weight_bytes_per_rank(FLASH, fp8=True, tensor_parallel=1)
    assert 284e9 < alone < 290e9
    assert weight_bytes_per_rank(FLASH, fp8=False, tensor_parallel=1) > 1.95 * alone
    shared = weight_bytes_per_rank(FLASH, fp8=True, tensor_parallel=8)
    assert alone / 8 < shared < alone / 8 + 2e9


def test_engine_pool_is_what_the_weights_leave():
    settings = {"tensor_parallel": 8, "engines": 16, "sequences": 512, "length": 3072, "fp8_weights": True}
    small, large = (
        plan_engine(FLASH, gpu=80 * GIB, utilization=share, pool=None, fp8_kv=True, **settings) for share in (0.4, 0.6)
    )
    assert small.kv_pool < 0 < large.kv_pool and small.tokens_held == 0
    assert large.weights + RUNTIME_BYTES + large.kv_pool == large.budget == int(0.6 * 80 * GIB)
    assert large.sequences_per_engine == 32 and large.tokens_wanted == 32 * 3072
    assert large.kv_pool - small.kv_pool == pytest.approx(0.2 * 80 * GIB, rel=1e-6)


def test_a_stated_pool_is_the_pool_whatever_the_share():
    """It was ignored, and the pool worked out from the share. Windows of at most 256 sequences are part of it."""
    settings = {"tensor_parallel": 8, "engines": 1, "sequences": 512, "length": 3072, "fp8_weights": True}
    made = [
        plan_engine(FLASH, gpu=gpu, utilization=share, pool=4_000_000_000, fp8_kv=True, **settings)
        for gpu, share in ((80 * GIB, 0.1), (80 * GIB, 0.9), (None, 0.6))
    ]
    assert made[0] == made[1] == made[2]
    assert made[0].kv_pool == 4_000_000_000 and made[0].kv_windows == 256 * 43 * 128 * 584
    assert made[0].budget == made[0].weights + RUNTIME_BYTES + 4_000_000_000
    assert made[0].tokens_held == int((4_000_000_000 - 256 * 43 * 128 * 584) / made[0].kv_bytes_per_token)


def test_gpus_by_name_and_by_size():
    assert gpu_bytes("96") == 96 * GIB and gpu_bytes("h100") < gpu_bytes("h200") < gpu_bytes("mi355x")
    for wrong in ("h1000", "0", "-8", "nan"):
        with pytest.raises(UserError, match="wanted one of h100, h200"):
            gpu_bytes(wrong)
