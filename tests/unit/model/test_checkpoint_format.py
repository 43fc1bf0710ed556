"""Official, AutoModel and transformers names describe the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import (
    AUTOMODEL,
    TRANSFORMERS,
    Layout,
    Slot,
    automodel_config,
    transformers_config,
)
from nemo_rl_dsv4.model.hf_config import config_problems, read_config
from nemo_rl_dsv4.model.known_models import KNOWN_MODELS
from nemo_rl_dsv4.model.official_names import (
    check_names,
    expected_tensors,
    export_order,
    fused_group,
    mtp_kind,
    tensor_kind,
)

CPU_BACKEND = {
    "attn": "sdpa",
    "linear": "torch",
    "rms_norm": "torch_fp32",
    "experts": "torch",
    "dispatcher": "torch",
    "rope_fusion": False,
}


def build_automodel(config: dict[str, Any]) -> torch.nn.Module:
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(automodel_config(config), backend=BackendConfig(**CPU_BACKEND))
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    return model.eval()


def build_transformers(config: dict[str, Any]) -> torch.nn.Module:
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

    return DeepseekV4ForCausalLM(transformers_config(config)).eval()


BUILDERS = [(AUTOMODEL, build_automodel), (TRANSFORMERS, build_transformers)]


def load(model: torch.nn.Module, layout: Layout, official: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    for name, value in official.items():
        slot = layout.slot(name)
        layout.view(state[slot.key], slot).copy_(value)


@pytest.mark.parametrize(("layout", "build"), BUILDERS, ids=["automodel", "transformers"])
def test_complete_state_dict_maps_both_ways(layout: Layout, build: Any, tiny_config: dict[str, Any]) -> None:
    """Case C030: bare V4 names were mapped with V3 rules and nothing was loaded."""
    state = build(tiny_config).state_dict()
    split = dict(layout.split(state))
    assert list(split) == list(expected_tensors(tiny_config))
    assert {slot.key for slot in split.values()} == set(state)
    for name, shape in expected_tensors(tiny_config).items():
        slot = layout.slot(name)
        assert name in layout.official_names(slot.key, tiny_config["n_routed_experts"])
        assert tuple(layout.view(state[slot.key], slot).shape) == shape, name


def test_both_models_agree_on_the_same_official_weights(
    tiny_config: dict[str, Any], random_official: dict[str, torch.Tensor]
) -> None:
    """Measured: 7.2e-6 on 200 tokens (long enough for one ratio-128 entry), logits of standard deviation 1."""
    tokens = torch.randint(2, 160, (2, 200), generator=torch.Generator().manual_seed(1))
    logits = []
    for layout, build in BUILDERS:
        model = build(tiny_config)
        load(model, layout, random_official)
        with torch.no_grad():
            logits.append(model(input_ids=tokens).logits)
    assert logits[0].std() > 0.1
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=0)


def test_a_loss_coefficient_of_none_is_not_multiplied(tiny_config: dict[str, Any]) -> None:
    """Case C081: a field whose default is None hid the fallback of `getattr` and reached a product."""
    small = {"num_hidden_layers": 1, "compress_ratios": [4], "dsa_indexer_loss_coeff": None}
    model = build_automodel(tiny_config | small).train()
    assert bool(model(input_ids=torch.arange(3, 23)[None]).logits.isfinite().all())


def test_expert_slices_have_official_orientation() -> None:
    """Gate and up are contiguous halves, not interleaved; AutoModel keeps them transposed."""
    gate, up = torch.arange(6.0).reshape(2, 3), 10 + torch.arange(6.0).reshape(2, 3)
    rows = torch.cat([gate, up]).unsqueeze(0)
    for layout, stack in ((AUTOMODEL, rows.transpose(1, 2).contiguous()), (TRANSFORMERS, rows)):
        assert torch.equal(layout.view(stack, Slot("", 0, "gate")), gate)
        assert torch.equal(layout.view(stack, Slot("", 0, "up")), up)


def test_rope_is_the_same_flat_nested_and_in_both_models(tiny_config: dict[str, Any]) -> None:
    """Case C076: nested RoPE settings lost YaRN on compressed layers and used the wrong base."""
    compress = {**tiny_config["rope_scaling"], "rope_theta": 160000.0}
    nested = {k: v for k, v in tiny_config.items() if k not in ("rope_theta", "compress_rope_theta", "rope_scaling")}
    nested["rope_parameters"] = {"main": {"rope_type": "default", "rope_theta": 10000.0}, "compress": compress}
    plain = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    scaled = 160000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    for config in (tiny_config, nested):
        ours, theirs = build_automodel(config).model, build_transformers(config).model.rotary_emb
        for window, pooled in (
            (ours.rotary_emb.inv_freq, ours.rotary_emb_compress.inv_freq),
            (theirs.main_inv_freq, theirs.compress_inv_freq),
        ):
            torch.testing.assert_close(window.double(), plain, rtol=1e-6, atol=0)
            # YaRN divides the slowest frequency by its factor and leaves the fastest alone.
            torch.testing.assert_close(pooled[0].double(), scaled[0], rtol=1e-6, atol=0)
            torch.testing.assert_close(pooled[-1].double(), scaled[-1] / 16, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.rotary_emb_compress.inv_freq, theirs.compress_inv_freq, rtol=1e-6, atol=0)
        assert theirs.compress_attention_scaling == 1.0


def test_only_the_released_linears_are_quantized() -> None:
    """Cases C033 and C036: substring lists quantized the router, the head or the compressor, or spared a projection."""
    quantized = ["attn.wq_a", "attn.wkv", "attn.wq_b", "attn.wo_a", "attn.wo_b", "attn.indexer.wq_b"]
    quantized += [f"ffn.shared_experts.w{i}" for i in (1, 2, 3)]
    plain = ["attn.compressor.wkv", "attn.compressor.wgate", "attn.indexer.compressor.wkv"]
    plain += ["attn.indexer.compressor.wgate", "attn.indexer.weights_proj", "ffn.gate", "attn_norm", "attn.q_norm"]
    assert {tensor_kind(f"layers.3.{name}.weight") for name in quantized} == {"linear.weight"}
    assert {tensor_kind(f"layers.3.{name}.weight") for name in plain} == {"bf16"}
    assert {tensor_kind(name) for name in ("embed.weight", "head.weight", "norm.weight")} == {"bf16"}
    assert tensor_kind("layers.3.ffn.experts.7.w2.weight") == "expert.weight"
    assert tensor_kind("layers.0.ffn.gate.tid2eid") == "integer"
    with pytest.raises(UserError, match=r"ffn\.gate_proj\.weight"):
        tensor_kind("layers.3.ffn.gate_proj.weight")


@pytest.mark.parametrize("pair", [("attn.wq_a", "attn.wkv"), ("ffn.shared_experts.w1", "ffn.shared_experts.w3")])
def test_fused_partners_are_neighbours(pair: tuple[str, str], tiny_config: dict[str, Any]) -> None:
    names = list(expected_tensors(tiny_config))
    first, second = (f"layers.2.{module}.weight" for module in pair)
    assert names.index(second) == names.index(first) + 1
    assert fused_group(first) == fused_group(second) == fused_group(first.replace(".weight", ".scale"))
    assert fused_group(first) != fused_group(first.replace("layers.2", "layers.3"))
    assert export_order(first) < export_order(second)


def test_foreign_names_are_refused_with_an_example(tiny_config: dict[str, Any]) -> None:
    """Case C030: a checkpoint with other names loaded no tensor and reported success."""
    wanted = expected_tensors(tiny_config)
    with pytest.raises(UserError, match=r"none of the \d+ DeepSeek-V4 tensors.*model\.layers\.0"):
        check_names(["model.layers.0.self_attn.q_a_proj.weight"], wanted, "weights")
    with pytest.raises(UserError, match=r"'head\.weight' missing"):
        check_names(set(wanted) - {"head.weight"}, wanted, "weights")
    with pytest.raises(UserError, match=r"'layers\.9\.attn_norm\.weight' unexpected"):
        check_names([*wanted, "layers.9.attn_norm.weight"], wanted, "weights")


@pytest.mark.parametrize("layout", [AUTOMODEL, TRANSFORMERS], ids=lambda layout: layout.title)
@pytest.mark.parametrize("key", ["model.layers.0.self_attn.q_proj.weight", "model.rotary_emb.inv_freq", "embed.weight"])
def test_unknown_model_names_are_refused(layout: Layout, key: str) -> None:
    with pytest.raises(UserError, match=key):
        layout.official_names(key, 8)


def test_mtp_is_told_by_its_keys_not_its_prefix() -> None:
    """Case C031: the three-block drafter of Flash-0731 was half-loaded as multi-token prediction."""
    drafter = [f"mtp.{i}.attn.wq_a.weight" for i in range(3)]
    assert mtp_kind(drafter) == "drafter"
    assert mtp_kind([*drafter, "mtp.0.enorm.weight", "mtp.0.hnorm.weight"]) == "next_token"
    assert mtp_kind(["layers.0.attn_norm.weight"]) == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"hidden_size": "128"}, "hidden_size is '128'; wanted a whole number, 1 to 16777216"),
        ({"compress_ratios": [0, 0, 4]}, "compress_ratios .* wanted one of 0, 4, 128 for each of 5 layers"),
        ({"compress_ratios": [0, 0, 4, 64, 4]}, "compress_ratios holds 64"),
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds n_routed_experts 8"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ({"num_hash_layers": 6}, "num_hash_layers is 6; wanted 0 to 5"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim 15"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE scaling type is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "rope_scaling.original_max_position_embeddings is None"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor is None; wanted a positive number, or leave the key"),
        ({"swiglu_limit": None}, "swiglu_limit is None; wanted a positive number"),
        ({"norm_topk_prob": None}, "norm_topk_prob is None; wanted true, or leave the key"),
        ({"scoring_func": None}, 'scoring_func is None; wanted "sqrtsoftplus"'),
        ({"n_routed_experts": 2**40}, "n_routed_experts is 1099511627776; wanted a whole number, 1 to 262144"),
        ({"n_routed_experts": 2**17}, "n_routed_experts is 131072 in each of 5 layers; wanted at most 262144 in all"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers is 1025; wanted a whole number, 1 to 1024"),
        ({"num_nextn_predict_layers": 2**40}, "num_nextn_predict_layers is 1099511627776; wanted a whole number, 0"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776; wanted a whole number, 1 to 16777216"),
        ({"hidden_act": "bogus"}, "hidden_act is 'bogus'; wanted \"silu\", or leave the key out"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; wanted \"sqrtsoftplus\""),
        ({"topk_method": "x"}, "topk_method is 'x'; wanted \"noaux_tc\""),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; wanted true"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; wanted 1"),
        ({"attention_bias": True}, "attention_bias is True; wanted false"),
        ({"attention_bias": None}, "attention_bias is None; wanted false"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0; wanted false"),
        ({"expert_dtype": "int4"}, 'expert_dtype is \'int4\'; wanted "fp4" or "fp8"'),
        ({"torch_dtype": "bogus"}, 'torch_dtype is \'bogus\'; wanted "bfloat16" or "float16" or "float32"'),
        ({"dtype": 16}, 'dtype is 16; wanted "bfloat16"'),
        ({"swiglu_limit": 0}, "swiglu_limit is 0; wanted a positive number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; wanted a positive number"),
        ({"initializer_range": 0.0}, "initializer_range is 0.0; wanted a positive number"),
        ({"hc_eps": 10**400}, "hc_eps is 1000"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0; wanted a whole number, 1 to 1000"),
        ({"hc_sinkhorn_iters": -1}, "hc_sinkhorn_iters is -1; wanted a whole number, 1 to 1000"),
        ({"compress_rope_theta": 1}, "compress_rope_theta is 1; wanted a number above 1"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"bos_token_id": 2**40}, "bos_token_id is 1099511627776; wanted a token of the vocabulary, 0 to"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\]; wanted a token of the vocabulary"),
        ({"pad_token_id": True}, "pad_token_id is True; wanted a token of the vocabulary"),
    ],
)
def test_wrong_configs_name_the_key(change: dict[str, Any], message: str, tiny_config: dict[str, Any]) -> None:
    for build in (automodel_config, transformers_config):
        with pytest.raises(UserError, match=message):
            build({**tiny_config, **change})


def test_whole_numbers_are_numbers_and_a_null_is_the_default(tiny_config: dict[str, Any]) -> None:
    """transformers ended in its own traceback for `swiglu_limit: 10`, and for a dropout of null."""
    change = {"swiglu_limit": 10, "routed_scaling_factor": 2, "attention_dropout": None, "eos_token_id": [1, 2]}
    for build in (automodel_config, transformers_config):
        config = build({**tiny_config, **change, "bos_token_id": None, "torch_dtype": "torch.bfloat16"})
        assert (config.swiglu_limit, config.routed_scaling_factor, config.attention_dropout) == (10.0, 2.0, 0.0)
        assert type(config.swiglu_limit) is float and config.eos_token_id == [1, 2] and config.bos_token_id is None


@pytest.mark.parametrize("name", sorted(KNOWN_MODELS))
def test_the_released_configs_have_no_problem(name: str) -> None:
    assert config_problems(KNOWN_MODELS[name], for_training=False) == []


def test_a_config_file_that_is_wrong_is_named(tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config, "hidden_act": "bogus"}), encoding="utf-8")
    with pytest.raises(UserError, match=f"^{tmp_path}/config.json: hidden_act is 'bogus'; wanted"):
        read_config(tmp_path)
