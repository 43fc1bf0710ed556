"""Where AutoModel 0.7.0 computes something else than the rollout engine, rounding sites apart: one row a switch.

`RolloutProfile.alignment` has a default for each; `policy.dsv4.alignment` overrides it; `nemo_rl_dsv4.model.alignment`
installs it. `docs/alignment.md` has the measured effect of each.
"""

from dataclasses import dataclass

_V4 = "vLLM 0.26.0 vllm/models/deepseek_v4"
_MHC = "vLLM 0.26.0 vllm/model_executor/kernels/mhc"
_FLASHMLA = "FlashMLA 9241ae3 csrc/sm90/decode/sparse_fp8"
_MOE = "vLLM 0.26.0 vllm/model_executor/layers/fused_moe"


@dataclass(frozen=True)
class Difference:
    """One difference between the engine and AutoModel.

    Attributes:
        switch: name of the key under `policy.dsv4.alignment`.
        engine: what the rollout does, and the trainer does too with the switch on.
        automodel: what AutoModel 0.7.0 does, and the trainer does with the switch off.
        source: project, version, file and function in which the engine's side was read.
        float32: the switch changes more than BF16 casts; the others change no bit of a float32 model.
    """

    switch: str
    engine: str
    automodel: str
    source: str
    float32: bool = False


DIFFERENCES = (
    Difference(
        "rope_fp32",
        "cos and sin are float32",
        "cos and sin are cast to the activations' dtype",
        "vLLM 0.26.0 vllm/model_executor/layers/rotary_embedding/deepseek_scaling_rope.py _compute_cos_sin_cache",
    ),
    Difference(
        "query_norm_fp32",
        "per-head query RMSNorm stays in float32 through RoPE, then one BF16 cast",
        "a BF16 cast after the norm and another after RoPE",
        "vLLM main 057dcc0 csrc/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu "
        "fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel",
    ),
    Difference(
        "attention_fp32",
        "attention logits and softmax in float32",
        "attn: sdpa rounds logits to BF16 before the softmax; attn: tilelang does not",
        f"{_FLASHMLA} splitkv_mla.cuh scale_softmax; sm90/prefill/sparse/phase1.cuh online_softmax_and_rescale_o",
    ),
    Difference(
        "attention_probs_bf16",
        "attention weights are rounded to BF16 relative to the running maximum of blocks of 64 keys, summed unrounded",
        "attn: sdpa rounds normalized weights to BF16 (with attention_fp32 nothing); attn: tilelang does as the engine",
        f"{_FLASHMLA} splitkv_mla.cuh scale_softmax; sm90/prefill/sparse/phase1.cuh online_softmax_and_rescale_o",
    ),
    Difference(
        "compressor_fp32",
        "compressed entries and indexer keys come from BF16 weights and stay in float32 from pooling through norm and "
        "RoPE, then one BF16 cast",
        "float32 weights; a BF16 cast after pooling, after the norm and after RoPE",
        f"{_V4}/common/ops/fused_compress_quant_cache.py _fused_kv_compress_norm_rope_insert_sparse_attn, "
        "_fused_kv_compress_norm_rope_insert_indexer_attn",
    ),
    Difference(
        "hc_mix_fp32",
        "hyper-connections mix streams with float32 coefficients and cast once",
        "coefficients are cast to the activations' dtype, and so are both products and their sum",
        f"{_MHC}/tilelang_kernels.py mhc_post_tilelang, mhc_fused_tilelang; torch.py mhc_post_torch",
    ),
    Difference(
        "hc_tf32",
        "hyper-connection coefficients come from TF32 weights; those of the first layer's attention from the TF32 sum "
        "of its weight over streams (in a batch of up to 16 tokens from float32 weights)",
        "float32 weights",
        f"{_MHC}/tilelang.py mhc_pre_tilelang, mhc_pre_broadcast_tilelang, mhc_fused_post_pre_tilelang; "
        "DeepGEMM csrc/jit_kernels/impls/sm90_tf32_hc_prenorm_gemm.hpp",
    ),
    Difference(
        "hc_norm_fp32",
        "the norm before attention and experts takes the mean square of the collapsed streams before their BF16 cast",
        "after their BF16 cast",
        f"{_MHC}/tilelang_kernels.py mhc_pre_big_fuse_with_norm_tilelang",
    ),
    Difference(
        "gate_fp32",
        "router logits in float32",
        "router logits in BF16 unless backend.gate_precision is float32; hash layers in float32",
        f"{_V4}/nvidia/model.py DeepseekV4MoE (GateLinear with out_dtype float32)",
    ),
    Difference(
        "routing_weights_fp32",
        "routing weights stay in float32 up to the sum over experts",
        "routing weights are cast to the activations' dtype",
        f"{_MOE}/deep_gemm_utils.py _fwd_kernel_ep_gather",
    ),
    Difference(
        "routing_weight_after_down",
        "the routing weight multiplies the output of the down projection",
        "it multiplies the hidden state before the down projection",
        f"{_MOE}/deep_gemm_utils.py _fwd_kernel_ep_gather",
        float32=True,
    ),
    Difference(
        "silu_bf16_steps",
        "the expert hidden state is rounded to BF16 after the profile's hidden_bf16_steps (routed) and "
        "shared_hidden_bf16_steps (shared)",
        "float32 from clamp to product, then one BF16 cast",
        "vLLM 0.26.0 vllm/model_executor/layers/quantization/utils/fp8_utils.py "
        "_silu_mul_per_token_group_quant_fp8_colmajor (Hopper), _silu_mul_quant_fp8_packed_kernel (Blackwell)",
    ),
    Difference(
        "logits_bf16",
        "lm_head multiplies in BF16 and leaves BF16 logits",
        "lm_head multiplies with its float32 weight; the logits are cast to BF16",
        "vLLM 0.26.0 vllm/model_executor/layers/logits_processor.py LogitsProcessor (head_dtype unset)",
    ),
    Difference(
        "yarn_on_window_layers",
        "vLLM up to 0.29 applies YaRN to ratio-0 layers as well, with their own theta",
        "ratio-0 layers have no YaRN",
        f"{_V4}/common/rope.py build_deepseek_v4_rope",
        float32=True,
    ),
)
SWITCHES = tuple(row.switch for row in DIFFERENCES)
