"""Official DeepSeek-V4 tensor names: one table row per tensor, with its names in two model implementations.

A row is: official name, AutoModel name, transformers name, storage kind, shape. Names map by exact match, never by
substring (`ffn.gate` is not a prefix of anything here). Row order is export order: tensors that a rollout engine fuses
(`wq_a`+`wkv`, a compressor's `wkv`+`wgate`, shared `w1`+`w3`) are neighbours. Routed experts are one official tensor
each and slices of a stack in both models; `checkpoint_format` knows how.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.hf_config import validate_config

Kind = Literal["linear.weight", "expert.weight", "bf16", "fp32", "integer"]
"""How a release stores a tensor: a quantization site of a rollout profile, or a plain dtype."""

Part = Literal["gate", "up", "down"]


@dataclass(frozen=True)
class Row:
    """`layers`: which layers have the tensor: all, compressed (ratio > 0), ratio4, hashed, scored."""

    official: str
    automodel: str
    transformers: str
    kind: Kind
    shape: tuple[str, ...]
    layers: str = "all"


MODEL_ROWS = (
    Row("embed.weight", "model.embed_tokens.weight", "model.embed_tokens.weight", "bf16", ("vocab", "hidden")),
    Row("norm.weight", "model.norm.weight", "model.norm.weight", "bf16", ("hidden",)),
    Row("head.weight", "lm_head.weight", "lm_head.weight", "bf16", ("vocab", "hidden")),
    Row("hc_head_fn", "model.hc_head.hc_fn", "model.hc_head.hc_fn", "fp32", ("hc", "hc_hidden")),
    Row("hc_head_base", "model.hc_head.hc_base", "model.hc_head.hc_base", "fp32", ("hc",)),
    Row("hc_head_scale", "model.hc_head.hc_scale", "model.hc_head.hc_scale", "fp32", ("one",)),
)


def _compressor(official: str, module: str, width: str, head: str, layers: str) -> tuple[Row, ...]:
    """Rows of one compressor; `module` is its place under `self_attn` in both models."""
    return (
        Row(
            f"{official}.wkv.weight",
            f"{module}.wkv.weight",
            f"{module}.kv_proj.weight",
            "bf16",
            (width, "hidden"),
            layers,
        ),
        Row(
            f"{official}.wgate.weight",
            f"{module}.wgate.weight",
            f"{module}.gate_proj.weight",
            "bf16",
            (width, "hidden"),
            layers,
        ),
        Row(f"{official}.norm.weight", f"{module}.kv_norm.weight", f"{module}.kv_norm.weight", "bf16", (head,), layers),
        Row(
            f"{official}.ape", f"{module}.ape_param.weight", f"{module}.position_bias", "fp32", ("ratio", width), layers
        ),
    )


def _attention() -> tuple[Row, ...]:
    indexer = "self_attn.compressor.indexer"
    linear: Kind = "linear.weight"
    return (
        Row("attn.wq_a.weight", "self_attn.wq_a.weight", "self_attn.q_a_proj.weight", linear, ("q_lora", "hidden")),
        Row("attn.wkv.weight", "self_attn.wkv.weight", "self_attn.kv_proj.weight", linear, ("head_dim", "hidden")),
        Row("attn.q_norm.weight", "self_attn.q_norm.weight", "self_attn.q_a_norm.weight", "bf16", ("q_lora",)),
        Row("attn.kv_norm.weight", "self_attn.kv_norm.weight", "self_attn.kv_norm.weight", "bf16", ("head_dim",)),
        Row("attn.wq_b.weight", "self_attn.wq_b.weight", "self_attn.q_b_proj.weight", linear, ("q_out", "q_lora")),
        Row("attn.wo_a.weight", "self_attn.wo_a.weight", "self_attn.o_a_proj.weight", linear, ("o_low", "o_in")),
        Row("attn.wo_b.weight", "self_attn.wo_b.weight", "self_attn.o_b_proj.weight", linear, ("hidden", "o_low")),
        Row("attn.attn_sink", "self_attn.sinks_param.weight", "self_attn.sinks", "fp32", ("heads",)),
        *_compressor("attn.compressor", "self_attn.compressor", "pooled", "head_dim", "compressed"),
        *_compressor("attn.indexer.compressor", indexer, "index_pooled", "index_dim", "ratio4"),
        Row(
            "attn.indexer.wq_b.weight",
            f"{indexer}.wq_b.weight",
            f"{indexer}.q_b_proj.weight",
            linear,
            ("index_out", "q_lora"),
            "ratio4",
        ),
        Row(
            "attn.indexer.weights_proj.weight",
            f"{indexer}.weights_proj.weight",
            f"{indexer}.scorer.weights_proj.weight",
            "bf16",
            ("index_heads", "hidden"),
            "ratio4",
        ),
    )


def _feed_forward() -> tuple[Row, ...]:
    gate, bias = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
    shared = (
        ("w1", "gate_proj", "shared", "hidden"),
        ("w3", "up_proj", "shared", "hidden"),
        ("w2", "down_proj", "hidden", "shared"),
    )
    return (
        Row("ffn.gate.weight", gate, gate, "bf16", ("experts", "hidden")),
        Row("ffn.gate.bias", bias, bias, "fp32", ("experts",), "scored"),
        Row("ffn.gate.tid2eid", "mlp.gate.tid2eid", "mlp.gate.tid2eid", "integer", ("vocab", "top_k"), "hashed"),
        *(
            Row(
                f"ffn.shared_experts.{w}.weight",
                f"mlp.shared_experts.{module}.weight",
                f"mlp.shared_experts.{module}.weight",
                "linear.weight",
                (rows, cols),
            )
            for w, module, rows, cols in shared
        ),
    )


def _around() -> tuple[Row, ...]:
    return tuple(
        Row(f"hc_{site}_{leaf}", f"{site}_hc.{leaf}", f"{site}_hc.{leaf}", "fp32", shape)
        for site in ("attn", "ffn")
        for leaf, shape in (("fn", ("hc_mix", "hc_hidden")), ("base", ("hc_mix",)), ("scale", ("three",)))
    )


LAYER_ROWS = (
    Row("attn_norm.weight", "input_layernorm.weight", "input_layernorm.weight", "bf16", ("hidden",)),
    *_attention(),
    Row("ffn_norm.weight", "post_attention_layernorm.weight", "post_attention_layernorm.weight", "bf16", ("hidden",)),
    *_around(),
    *_feed_forward(),
)
EXPERT_PARTS: dict[str, Part] = {"w1": "gate", "w3": "up", "w2": "down"}
_EXPERT_SHAPES = {"w1": ("expert", "hidden"), "w3": ("expert", "hidden"), "w2": ("hidden", "expert")}
_FUSED = (
    {"attn.wq_a", "attn.wkv"},
    {"attn.compressor.wkv", "attn.compressor.wgate"},
    {"attn.indexer.compressor.wkv", "attn.indexer.compressor.wgate"},
    {"ffn.shared_experts.w1", "ffn.shared_experts.w3"},
)

OFFICIAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
OFFICIAL_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
MODEL_INDEX = {row.official: i for i, row in enumerate(MODEL_ROWS)}
LAYER_INDEX = {row.official: i for i, row in enumerate(LAYER_ROWS)}


def unknown_name(name: str, wanted: str) -> UserError:
    return UserError(f"tensor {name!r} is not {wanted} name of DeepSeek-V4; check which format these weights are in")


def tensor_kind(official_name: str) -> Kind:
    """Return how a release stores the tensor with this official name (scales have no kind of their own).

    Raises:
        UserError: the name is not an official one.
    """
    layer = OFFICIAL_LAYER.fullmatch(official_name)
    if layer is None:
        if official_name in MODEL_INDEX:
            return MODEL_ROWS[MODEL_INDEX[official_name]].kind
    elif layer[2] in LAYER_INDEX:
        return LAYER_ROWS[LAYER_INDEX[layer[2]]].kind
    elif OFFICIAL_EXPERT.fullmatch(layer[2]):
        return "expert.weight"
    raise unknown_name(official_name, "an official")


def export_order(official_name: str) -> tuple[int, ...]:
    """Sort key: embedding first, layers in order with fused partners adjacent, then norm and head."""
    layer = OFFICIAL_LAYER.fullmatch(official_name)
    if layer is None:
        if official_name not in MODEL_INDEX:
            raise unknown_name(official_name, "an official")
        return (-1 if official_name == "embed.weight" else 2**31, MODEL_INDEX[official_name])
    if layer[2] in LAYER_INDEX:
        return (int(layer[1]), LAYER_INDEX[layer[2]])
    expert = OFFICIAL_EXPERT.fullmatch(layer[2])
    if expert is None:
        raise unknown_name(official_name, "an official")
    return (int(layer[1]), len(LAYER_ROWS), int(expert[1]), list(EXPERT_PARTS).index(expert[2]))


def fused_group(official_name: str) -> str:
    """Return a label shared by tensors that must reach a rollout engine in one bucket.

    A weight and its scale share it, so do fused partners; a routed expert's w1 and w3 do as well.
    """
    module = official_name.removesuffix(".weight").removesuffix(".scale")
    layer = OFFICIAL_LAYER.fullmatch(module)
    if layer is None:
        return module
    for partners in _FUSED:
        if layer[2] in partners:
            return f"layers.{layer[1]}." + "+".join(sorted(partners))
    expert = re.fullmatch(r"ffn\.experts\.(\d+)\.w[13]", layer[2])
    return f"layers.{layer[1]}.ffn.experts.{expert[1]}.w1+w3" if expert else module


def _dims(config: Mapping[str, Any]) -> dict[str, int]:
    heads, head_dim, hidden, hc = (config[k] for k in ("num_attention_heads", "head_dim", "hidden_size", "hc_mult"))
    return {
        "one": 1,
        "three": 3,
        "vocab": config["vocab_size"],
        "hidden": hidden,
        "hc": hc,
        "hc_hidden": hc * hidden,
        "hc_mix": (2 + hc) * hc,
        "heads": heads,
        "head_dim": head_dim,
        "q_lora": config["q_lora_rank"],
        "q_out": heads * head_dim,
        "o_low": config["o_groups"] * config["o_lora_rank"],
        "o_in": heads * head_dim // config["o_groups"],
        "index_heads": config["index_n_heads"],
        "index_dim": config["index_head_dim"],
        "index_out": config["index_n_heads"] * config["index_head_dim"],
        "experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert": config["moe_intermediate_size"],
        "shared": config["n_shared_experts"] * config["moe_intermediate_size"],
    }


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every official tensor of a model with its unquantized shape, in export order, without scales and MTP.

    Raises:
        UserError: see `validate_config`.
    """
    validate_config(config, for_training=False)
    dims = _dims(config)
    shapes = {row.official: tuple(dims[d] for d in row.shape) for row in MODEL_ROWS}
    for layer in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][layer]
        overlap = 2 if ratio == 4 else 1
        here = dims | {
            "ratio": ratio,
            "pooled": overlap * dims["head_dim"],
            "index_pooled": overlap * dims["index_dim"],
        }
        hashed = layer < config["num_hash_layers"]
        present = {"all": True, "compressed": ratio > 0, "ratio4": ratio == 4, "hashed": hashed, "scored": not hashed}
        for row in LAYER_ROWS:
            if present[row.layers]:
                shapes[f"layers.{layer}.{row.official}"] = tuple(here[d] for d in row.shape)
        for expert in range(config["n_routed_experts"]):
            for w, shape in _EXPERT_SHAPES.items():
                shapes[f"layers.{layer}.ffn.experts.{expert}.{w}.weight"] = tuple(here[d] for d in shape)
    return {name: shapes[name] for name in sorted(shapes, key=export_order)}


def check_names(found: Iterable[str], wanted: Iterable[str], where: str) -> None:
    """Compare two sets of tensor names; `where` begins the message.

    Raises:
        UserError: nothing matches (the weights are in another format), a tensor is missing, or one is left over.
    """
    found, wanted = set(found), set(wanted)
    if not found & wanted:
        example = min(found, default="no tensors at all")
        raise UserError(
            f"{where}: none of the {len(wanted)} DeepSeek-V4 tensors is here (found {example!r}); wrong format?"
        )
    for names, problem in ((wanted - found, "missing"), (found - wanted, "unexpected")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{where}: tensor {min(names)!r}{more} {problem}; the config and the weights do not agree")


def mtp_kind(names: Iterable[str]) -> Literal["none", "next_token", "drafter"]:
    """Tell what the `mtp.` tensors of a checkpoint are: multi-token prediction has enorm and hnorm, a drafter has not.

    The prefix alone does not tell: Flash-0731 stores a three-block drafter under it.
    """
    leaves = {name.split(".")[2] for name in names if re.match(r"mtp\.\d+\..", name)}
    if not leaves:
        return "none"
    return "next_token" if {"enorm", "hnorm"} <= leaves else "drafter"
