"""Triton kernels with the signatures and the bits of the torch reference, chosen for tensors on a GPU.

Importing this package imports Triton; the reference does so only when a GPU tensor arrives. A shape or format that no
kernel covers runs the reference on the GPU: slower, same bits.
"""

from nemo_rl_dsv4.numerics.fused.dispatch import dequantize, fake_quant, quantize
from nemo_rl_dsv4.numerics.fused.hyper_connections import mix_streams_backward, mix_streams_forward
from nemo_rl_dsv4.numerics.fused.rotary import inverse_rope_backward, inverse_rope_forward
from nemo_rl_dsv4.numerics.fused.swiglu import swiglu_backward, swiglu_forward

__all__ = [
    "dequantize",
    "fake_quant",
    "inverse_rope_backward",
    "inverse_rope_forward",
    "mix_streams_backward",
    "mix_streams_forward",
    "quantize",
    "swiglu_backward",
    "swiglu_forward",
]
