"""Which profile a GPU's rollout has. Asked on the worker that owns the device: a driver without one has no answer."""

import torch

from nemo_rl_dsv4.numerics.formats import NumericsError
from nemo_rl_dsv4.numerics.profiles import RolloutProfile, get_profile

_BY_CAPABILITY_MAJOR = {9: "vllm-hopper", 10: "vllm-blackwell"}
_BY_ARCHITECTURE = {"gfx950": "vllm-rocm-gfx950", "gfx942": "vllm-rocm-gfx942"}


def profile_of_device(device: torch.device | str = "cuda") -> RolloutProfile:
    """The vLLM profile of the GPU ``device``; NumericsError where there is no GPU or no profile for it."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        raise NumericsError(
            f"no GPU at {device}: rollout_profile 'auto' is resolved on the worker that owns one; name a profile here"
        )
    properties = torch.cuda.get_device_properties(device)
    return profile_of_hardware((properties.major, properties.minor), getattr(properties, "gcnArchName", ""))


def profile_of_hardware(capability: tuple[int, int], architecture: str = "") -> RolloutProfile:
    """The vLLM profile of a CUDA compute capability, or of a ROCm architecture such as ``gfx950:sramecc+:xnack-``."""
    if architecture.startswith("gfx"):
        name = _BY_ARCHITECTURE.get(architecture.split(":")[0])
        found = architecture
    else:
        name = _BY_CAPABILITY_MAJOR.get(capability[0])
        found = f"compute capability {capability[0]}.{capability[1]}"
    if name is None:
        known = "9.x and 10.x, gfx942 and gfx950"
        raise NumericsError(f"no rollout profile for {found}; known: {known}; set policy.dsv4.rollout_profile by name")
    return get_profile(name)
