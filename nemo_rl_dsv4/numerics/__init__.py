"""What a rollout engine rounds, as data and pure functions: the one source of truth for QAT, refit and reports."""

from nemo_rl_dsv4.numerics.blockwise import Quantized, dequantize, quantize
from nemo_rl_dsv4.numerics.conversions import e4m3fn_to_fnuz, merge_fp4_to_fp8
from nemo_rl_dsv4.numerics.devices import profile_of_device
from nemo_rl_dsv4.numerics.fake_quant import fake_quant
from nemo_rl_dsv4.numerics.formats import (
    NumericsError,
    e8m0_bytes_to_scale,
    pack_e2m1,
    scale_to_e8m0_bytes,
    unpack_e2m1,
)
from nemo_rl_dsv4.numerics.hadamard import hadamard
from nemo_rl_dsv4.numerics.packing import pack_ue8m0, unpack_ue8m0
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
    "e4m3fn_to_fnuz",
    "e8m0_bytes_to_scale",
    "fake_quant",
    "get_profile",
    "hadamard",
    "merge_fp4_to_fp8",
    "pack_e2m1",
    "pack_ue8m0",
    "profile_of_device",
    "quantize",
    "scale_to_e8m0_bytes",
    "unpack_e2m1",
    "unpack_ue8m0",
]
