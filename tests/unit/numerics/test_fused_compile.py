"""Every kernel, as its wrapper launches it, compiles for a Hopper GPU without one; the interpreter checks no types."""

from typing import Any

import pytest
import torch

from nemo_rl_dsv4.numerics import QuantSpec, get_profile

triton = pytest.importorskip("triton")
HOPPER = get_profile("vllm-hopper")


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.uint8: "u8"}
        return "*" + names[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Kernels and named arguments of every launch, none of which happens."""
    from triton.runtime.jit import JITFunction

    seen: list[tuple[Any, dict[str, Any]]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert min(grid) > 0
        seen.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs))

    monkeypatch.setattr(JITFunction, "run", record)
    return seen


def test_every_kernel_compiles_for_hopper(launches, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nemo_rl_dsv4.numerics.fused import groups, kv, rotary, swiglu, weights

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    group, kv_spec, fnuz = HOPPER.site("linear.input"), HOPPER.site("kv.swa"), get_profile("vllm-rocm-gfx942")
    float_group = fnuz.site("linear.input")
    assert group and kv_spec and float_group
    x = torch.zeros(4, 512, dtype=torch.bfloat16)
    o, angle = torch.zeros(4, 2, 512, dtype=torch.bfloat16), torch.zeros(4, 32)
    groups.fake_quant_groups(x, group)
    groups.fake_quant_groups(x[:, :200], float_group)
    kv.fake_quant_kv(x, kv_spec)
    weights.fake_quant_tiles(x, QuantSpec())
    data, scale = weights.quantize_tiles(x.float(), QuantSpec("e4m3fnuz"))
    weights.dequantize_tiles(data, scale, QuantSpec("e4m3fnuz"), torch.bfloat16)
    swiglu.swiglu_forward(x, x, group, 10.0, HOPPER.hidden_bf16_steps)
    swiglu.swiglu_backward(x, x, x, 10.0, ("product",))
    rotary.inverse_rope_forward(o, angle, angle, group, 1)
    rotary.inverse_rope_backward(o, angle, angle)
    assert len(launches) == 10
    for kernel, arguments in launches:
        constants = {p.name for p in kernel.params if p.is_constexpr}
        types = {name: "constexpr" if name in constants else _type_of(arguments[name]) for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): arguments[name] for name in constants}
        options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
        source = ASTSource(kernel, types, values)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        # Rounded once: no approximate division, no flushing of subnormals outside the exp of SwiGLU.
        assert "div.full" not in ptx and "div.approx" not in ptx
        assert "mul.ftz" not in ptx and "add.ftz" not in ptx
