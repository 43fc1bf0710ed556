"""Which site of the model each rollout engine rounds, and how: data, one profile per engine and vendor.

Weights carry no amax floor: the exporter makes them, and a floor would lose blocks under 1e-7. Activation, KV and
indexer floors are the kernels' own. A row's source names project, version, file and function it was read in; "function
not verified" says that only the version is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from nemo_rl_dsv4.numerics.alignment import DIFFERENCES
from nemo_rl_dsv4.numerics.formats import NumericsError
from nemo_rl_dsv4.numerics.spec import QuantSpec

SITES = (
    "linear.weight",
    "linear.input",
    "o_proj.input",
    "expert.weight",
    "expert.input",
    "expert.hidden",
    "kv.swa",
    "kv.compressed",
    "indexer.q",
    "indexer.k",
)


@dataclass(frozen=True)
class Site:
    """One row of a profile: the rounding (None: not quantized), where it was read, and what to know about it."""

    spec: QuantSpec | None
    source: str
    note: str = ""


@dataclass(frozen=True)
class RolloutProfile:
    """Everything a trainer must copy from one rollout engine.

    routing_weight_after_down: the expert's routing weight multiplies the output of the down GEMM, not its input.
    hidden_bf16_steps, shared_hidden_bf16_steps: after which steps of clamp -> silu -> product the hidden state of a
    routed and of a shared expert is rounded to BF16.
    swiglu_clamp: gate <= limit and up in +-limit (the model's swiglu_limit) on routed experts.
    o_proj_bf16_after_rope: BF16 rounding between the inverse RoPE (FP32) and the o_proj quantization.
    kv_swa_, kv_compressed_, indexer_q_, indexer_k_bf16_steps: BF16 casts on the way to quantization, each
    after the named step. indexer_hadamard: Walsh-Hadamard transform of q and k before quantization.
    indexer_q_scale_in_head_weights: the q scale multiplies the FP32 head weights instead of the codes.
    yarn_on_window_layers: YaRN is also applied on ratio-0 layers.
    rope_fp32 to logits_bf16, and those fields above that are switches of `nemo_rl_dsv4.numerics.alignment`: what the
    engine computes otherwise than AutoModel does.
    """

    name: str
    title: str
    sites: Mapping[str, Site]
    routing_weight_after_down: bool = True
    hidden_bf16_steps: tuple[str, ...] = ("product",)
    shared_hidden_bf16_steps: tuple[str, ...] = ("clamp", "silu", "product")
    swiglu_clamp: bool = True
    o_proj_bf16_after_rope: bool = False
    kv_swa_bf16_steps: tuple[str, ...] = ("norm", "rope")
    kv_compressed_bf16_steps: tuple[str, ...] = ("nope",)
    indexer_q_bf16_steps: tuple[str, ...] = ("rope",)
    indexer_k_bf16_steps: tuple[str, ...] = ("rope",)
    indexer_hadamard: bool = False
    indexer_q_scale_in_head_weights: bool = True
    yarn_on_window_layers: bool = False
    rope_fp32: bool = True
    query_norm_fp32: bool = True
    attention_fp32: bool = True
    attention_probs_bf16: bool = False
    compressor_fp32: bool = True
    hc_mix_fp32: bool = True
    hc_tf32: bool = False
    hc_norm_fp32: bool = False
    gate_fp32: bool = True
    routing_weights_fp32: bool = True
    silu_bf16_steps: bool = True
    logits_bf16: bool = True

    @property
    def alignment(self) -> dict[str, bool]:
        """Switch of `nemo_rl_dsv4.numerics.alignment` -> whether this engine computes that way."""
        return {row.switch: getattr(self, row.switch) for row in DIFFERENCES}

    def site(self, name: str) -> QuantSpec | None:
        """Rounding of one site of :data:`SITES`, None where the engine does not quantize it."""
        return self.row(name).spec

    def row(self, name: str) -> Site:
        """The whole row of one site; NumericsError lists the valid names."""
        if name not in self.sites:
            raise NumericsError(f"unknown rounding site {name!r}; valid: {', '.join(SITES)}")
        return self.sites[name]

    def rows(self) -> list[dict[str, str]]:
        """The profile as table rows, sites first and then the rounding steps; every value is a string."""
        table = []
        for name in SITES:
            row = self.sites[name]
            cells = {"site": name, **_spec_cells(row.spec), "source": row.source, "note": row.note}
            table.append(cells)
        switches = {row.switch: row for row in DIFFERENCES}
        for step, value in self.steps().items():
            row = switches.get(step)
            source, note = (row.source, f"alignment; yes: {row.engine}; no: {row.automodel}") if row else ("", STEP)
            source = source if self.name != "bf16" else "by definition"
            table.append({"site": step, **dict.fromkeys(_CELLS, ""), "format": value, "source": source, "note": note})
        return table

    def steps(self) -> dict[str, str]:
        """The rounding steps around the sites, as printable values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "title", "sites")}
        return {k: ("yes" if v else "no") if isinstance(v, bool) else ", ".join(v) or "none" for k, v in values.items()}


STEP = "rounding step"
"""Note of the rows that are neither a site nor an alignment switch."""
COLUMNS = {
    "site": "where the engine rounds; below the sites, steps around them and alignment switches",
    "format": "number format and its largest value; for steps and switches their value",
    "groups": "rows x columns of one scale, over the last two dims",
    "scale": "ue8m0: the smallest power of two >= amax / max; float32: amax / max",
    "rounding": "bits: exact power of two from the float32 bits; log2f: exp2(ceil(log2f(x))), one octave lower a few "
    "ulp above a power of two",
    "amax floor": "the block maximum is clamped to this from below",
    "kept": "trailing channels that are not rounded (RoPE)",
    "source": "project, version, file and function the row was read in",
}
"""Column of a profile table -> what it means."""
_CELLS = ("format", "groups", "scale", "rounding", "amax floor", "kept")


def _spec_cells(spec: QuantSpec | None) -> dict[str, str]:
    if spec is None:
        return {**dict.fromkeys(_CELLS, "-"), "format": "not quantized"}
    fmt = f"{spec.fmt} (max {spec.max_value:g})"
    rounding = spec.scale_rounding if spec.scale == "ue8m0" else "-"
    groups = f"{spec.block[0]}x{spec.block[1]}"
    return dict(
        zip(_CELLS, (fmt, groups, spec.scale, rounding, f"{spec.amax_floor:g}", f"{spec.keep_last}"), strict=True)
    )


def diff(left: RolloutProfile, right: RolloutProfile) -> list[dict[str, str]]:
    """Where two profiles part: one row per differing cell, with keys site, field and the two profile names."""
    found = []
    for a, b in zip(left.rows(), right.rows(), strict=True):
        for cell in _CELLS:
            if a[cell] != b[cell]:
                found.append({"site": a["site"], "field": cell, left.name: a[cell], right.name: b[cell]})
    return found


_WEIGHT = QuantSpec("e4m3fn", (128, 128), "ue8m0")
_GROUP = QuantSpec("e4m3fn", (1, 128), "ue8m0", amax_floor=1e-10, scale_rounding="log2f")
_KV = QuantSpec("e4m3fn", (1, 64), "ue8m0", amax_floor=1e-4, keep_last=64, scale_rounding="log2f")
_INDEXER = QuantSpec("e4m3fn", (1, 128), "ue8m0", amax_floor=1e-4, scale_rounding="log2f")
# Clamping the scale at 1e-4 instead of amax: the smallest UE8M0 scale is 2^-13.
_KV_SCALE_FLOOR = replace(_KV, amax_floor=448 * 1e-4)
_VLLM = "vLLM 0.26.0"


_V4 = f"{_VLLM} vllm/models/deepseek_v4"
_LAYERS = f"{_VLLM} vllm/model_executor/layers"
_FP8 = f"{_LAYERS}/quantization/utils/fp8_utils.py"
_COMPRESS = f"{_V4}/common/ops/fused_compress_quant_cache.py"
_SWA = (
    "vLLM main 057dcc0 csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu "
    "fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel (0.26.0 calls it from vllm/models/deepseek_v4/attention.py)"
)


def _vllm_cuda(group: QuantSpec, quantize: str, hidden: str) -> dict[str, Site]:
    """Sites on NVIDIA; `quantize` and `hidden` name the GPU's functions of `fp8_utils.py`."""
    weight_note = "exported without a floor; the engine re-quantizes with floor 1e-4, lossless for power-of-two scales"
    tiny = "; the kernel also clamps the scale at 1e-10, seen only by groups whose amax is under 4.5e-8"
    requantized = f"{_FP8} requant_weight_ue8m0_inplace"
    return {
        "linear.weight": Site(_WEIGHT, requantized, weight_note),
        "linear.input": Site(group, f"{_FP8} {quantize}", "VLLM_USE_DEEP_GEMM_E8M0=1 (float scales with 0)" + tiny),
        "o_proj.input": Site(
            _GROUP,
            f"{_V4}/common/ops/fused_inv_rope_fp8_quant.py _fused_inv_rope_fp8_quant_per_head",
            "always UE8M0, by log2 on every GPU; FP32 inverse RoPE, no rounding before it is quantized",
        ),
        "expert.weight": Site(_WEIGHT, requantized, "expert_dtype fp8; a block never spans two experts"),
        "expert.input": Site(group, f"{_FP8} {quantize} via {_LAYERS}/fused_moe/utils.py _fp8_quantize"),
        "expert.hidden": Site(
            _GROUP, f"{_FP8} {hidden}", "after clamp and SwiGLU, before the down GEMM; by log2 on every GPU"
        ),
        "kv.swa": Site(_KV, _SWA, "fp8_ds_mla, last 64 RoPE dims stay BF16"),
        "kv.compressed": Site(
            _KV_SCALE_FLOOR,
            f"{_V4}/nvidia/ops/sparse_attn_compress_cutedsl.py compress_norm_rope_store_cutedsl",
            "C4 and C128 entries; scale clamped at 1e-4, so s >= 2^-13",
        ),
        "indexer.q": Site(
            _INDEXER, f"{_V4}/common/ops/fused_indexer_q.py _fused_indexer_q_rope_quant_kernel", "per head"
        ),
        "indexer.k": Site(
            _INDEXER,
            f"{_COMPRESS} _fused_kv_compress_norm_rope_insert_indexer_attn",
            "whole head, scale kept in float32",
        ),
    }


def _vllm_rocm(fmt: str) -> dict[str, Site]:
    def on(spec: QuantSpec) -> QuantSpec:
        return replace(spec, fmt=fmt, fnuz_max=224.0)

    group = QuantSpec("e4m3fn", (1, 128), "float32", amax_floor=1e-10)
    weight_note = "stored UE8M0 e4m3fn" + ("" if fmt == "e4m3fn" else ", read as fnuz with scale * 2: same values")
    unverified = f"{_VLLM}, function not verified"
    return {
        "linear.weight": Site(on(_WEIGHT), f"{_FP8} process_fp8_weight_block_strategy", weight_note),
        "linear.input": Site(on(group), unverified, "float scale, not a power of two"),
        "o_proj.input": Site(None, f"{_V4}/amd/rocm.py _o_proj (rocm_inv_rope_einsum)", "wo_a is a BF16 einsum"),
        "expert.weight": Site(on(_WEIGHT), unverified, weight_note),
        "expert.input": Site(on(group), unverified),
        "expert.hidden": Site(on(group), unverified),
        "kv.swa": Site(on(_KV), _SWA.replace(" (0.26.0", ", USE_ROCM (0.26.0"), "amax clamped at 1e-4"),
        "kv.compressed": Site(
            on(_KV),
            f"{_COMPRESS} _fused_kv_compress_norm_rope_insert_sparse_attn",
            "Triton form: amax, not the scale, is clamped at 1e-4",
        ),
        "indexer.q": Site(
            on(_INDEXER), f"{_V4}/common/ops/fused_indexer_q.py _fused_indexer_q_rope_quant_kernel", "per head"
        ),
        "indexer.k": Site(on(_INDEXER), f"{_COMPRESS} _fused_kv_compress_norm_rope_insert_indexer_attn", "whole head"),
    }


def _bf16_weights(quantized: dict[str, Site]) -> dict[str, Site]:
    """The same engine serving BF16 weights: products see no rounded operand, KV cache and indexer stay FP8."""
    kept = ("kv.swa", "kv.compressed", "indexer.q", "indexer.k")
    return {
        name: row if name in kept else Site(None, "BF16 weights: no product is quantized (function not verified)")
        for name, row in quantized.items()
    }


def _deepseek_reference() -> dict[str, Site]:
    source = "DeepSeek-V4-Flash inference code, function not verified"
    group = QuantSpec("e4m3fn", (1, 128), "ue8m0", amax_floor=1e-4)
    fp4 = QuantSpec("e2m1", (1, 32), "ue8m0", amax_floor=6 * 2.0**-126)
    return {
        "linear.weight": Site(_WEIGHT, source),
        "linear.input": Site(group, source),
        "o_proj.input": Site(None, source, "wo_a runs in BF16 [?]"),
        "expert.weight": Site(QuantSpec("e2m1", (1, 32), "ue8m0"), source, "Flash; Flash-Base has FP8 128x128"),
        "expert.input": Site(group, source),
        "expert.hidden": Site(group, source),
        "kv.swa": Site(replace(_KV, scale_rounding="bits"), source),
        "kv.compressed": Site(replace(_KV, scale_rounding="bits"), source),
        "indexer.q": Site(fp4, source, "Hadamard (scale d^-0.5) first"),
        "indexer.k": Site(fp4, source, "Hadamard (scale d^-0.5) first"),
    }


_BITS_GROUP = replace(_GROUP, scale_rounding="bits")

PROFILES: dict[str, RolloutProfile] = {
    profile.name: profile
    for profile in (
        RolloutProfile(
            "bf16",
            "BF16 rollout: nothing is quantized",
            {name: Site(None, "by definition") for name in SITES},
        ),
        RolloutProfile(
            "vllm-hopper",
            "vLLM 0.26.0 with DeepGEMM on H100/H200",
            _vllm_cuda(_GROUP, "per_token_group_quant_fp8", "_silu_mul_per_token_group_quant_fp8_colmajor"),
            hidden_bf16_steps=("clamp", "silu", "product"),
            yarn_on_window_layers=True,
            attention_probs_bf16=True,
            hc_tf32=True,
            hc_norm_fp32=True,
        ),
        RolloutProfile(
            "vllm-blackwell",
            "vLLM 0.26.0 with DeepGEMM on B200/B300",
            _vllm_cuda(
                _BITS_GROUP,
                "per_token_group_quant_fp8_packed_for_deepgemm",
                "_silu_mul_quant_fp8_packed_kernel",
            ),
            yarn_on_window_layers=True,
            hc_tf32=True,
            hc_norm_fp32=True,
        ),
        RolloutProfile(
            "vllm-rocm-gfx950",
            "vLLM 0.26.0 on MI355X (OCP FP8)",
            _vllm_rocm("e4m3fn"),
            yarn_on_window_layers=True,
        ),
        RolloutProfile(
            "vllm-rocm-gfx950-bf16",
            "vLLM 0.26.0 on MI355X with BF16 weights; KV cache and indexer FP8",
            _bf16_weights(_vllm_rocm("e4m3fn")),
            yarn_on_window_layers=True,
        ),
        RolloutProfile(
            "vllm-rocm-gfx942",
            "vLLM 0.26.0 on MI300X/MI325X (FNUZ FP8, max 224)",
            _vllm_rocm("e4m3fnuz"),
            yarn_on_window_layers=True,
        ),
        RolloutProfile(
            "deepseek-reference",
            "DeepSeek's own inference code",
            _deepseek_reference(),
            routing_weight_after_down=False,
            indexer_hadamard=True,
            indexer_q_scale_in_head_weights=False,
        ),
    )
}


def get_profile(name: str) -> RolloutProfile:
    """The profile called ``name``; NumericsError lists the valid ones. ``auto`` must be resolved where the GPU is."""
    if name not in PROFILES:
        hint = "; 'auto' is resolved on the worker that owns the device, not here" if name == "auto" else ""
        raise NumericsError(f"unknown rollout profile {name!r}; valid: {', '.join(PROFILES)}{hint}")
    return PROFILES[name]
