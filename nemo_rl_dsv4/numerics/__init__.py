"""What a rollout engine rounds, as data and pure functions: the one source of truth for QAT, refit and reports."""

from nemo_rl_dsv4.numerics.blockwise import Quantized, dequantize, quantize
from nemo_rl_dsv4.numerics.fake_quant import fake_quant
from nemo_rl_dsv4.numerics.formats import (
    NumericsError,
    e8m0_bytes_to_scale,
    pack_e2m1,
    scale_to_e8m0_bytes,
    unpack_e2m1,
)
from nemo_rl_dsv4.numerics.profiles import PROFILES, SITES, RolloutProfile, diff, get_profile
from nemo_rl_dsv4.numerics.spec import QuantSpec

__all__ = [
    "PROFILES",
    "SITES",
    "NumericsError",
    "QuantSpec",
    "Quantized",
    "RolloutProfile",
    "dequantize",
    "diff",
    "e8m0_bytes_to_scale",
    "fake_quant",
    "get_profile",
    "pack_e2m1",
    "quantize",
    "scale_to_e8m0_bytes",
    "unpack_e2m1",
]
