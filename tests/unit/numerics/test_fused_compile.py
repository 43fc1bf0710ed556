"""Every kernel, as its wrapper launches it, compiles for a Hopper GPU without one; the interpreter checks no types."""

from typing import Any

import pytest
import torch

from nemo_rl_dsv4.numerics import QuantSpec, get_profile

triton = pytest.importorskip("triton")
HOPPER = get_profile("vllm-hopper")


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8"}
        names |= {torch.int32: "i32", torch.int64: "i64"}
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


@pytest.mark.parametrize("native", [True, False])
def test_every_kernel_compiles_for_hopper(native: bool, launches, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nemo_rl_dsv4.numerics.fused import groups, kv, rotary, rounding, stacks, swiglu, weights, word_sums

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(rounding, "NATIVE", native)
    group, kv_spec = HOPPER.site("linear.input"), HOPPER.site("kv.swa")
    float_group, fnuz = (get_profile(f"vllm-rocm-gfx{n}").site("linear.input") for n in (950, 942))
    assert group and kv_spec and float_group and fnuz
    x = torch.zeros(4, 512, dtype=torch.bfloat16)
    o, angle = torch.zeros(4, 2, 512, dtype=torch.bfloat16), torch.zeros(4, 32)
    groups.fake_quant_groups(x, group)
    data, scale = weights.quantize_tiles(x, QuantSpec())
    swiglu.swiglu_forward(x, x, group, 10.0, HOPPER.hidden_bf16_steps)
    weights.dequantize_tiles(data, scale, QuantSpec(), torch.bfloat16)
    square, codes = torch.zeros(1, 128, 256, dtype=torch.bfloat16), torch.empty(1, 256, 128, dtype=torch.uint8)
    damaged = torch.zeros(1, dtype=torch.int32)
    stacks.quantize_stack(square.transpose(1, 2), QuantSpec(), codes, torch.empty(1, 2, 1), damaged)
    rounds_to_fp8 = 4
    if native:
        kv.fake_quant_kv(x, kv_spec)
        groups.fake_quant_groups(x[:, :200], float_group)
        weights.fake_quant_tiles(x, QuantSpec())
        rotary.inverse_rope_forward(o, angle, angle, group, 1)
        rounds_to_fp8 += 4
        swiglu.swiglu_backward(x, x, x, float("inf"), ("clamp", "product"))
        rotary.inverse_rope_backward(o, angle, angle)
        groups.fake_quant_groups(x, fnuz)
        weights.dequantize_tiles(data, scale, QuantSpec("e4m3fnuz"), torch.bfloat16)
        scale, source = torch.empty(1, 1, 2), torch.ones(1, 1, 2)
        stacks.quantize_stack(square, QuantSpec(), codes.view(1, 128, 256), scale, damaged)
        stacks.quantize_stack(square, QuantSpec(), codes.view(1, 128, 256), scale, damaged, source=source)
        rounds_to_fp8 += 2
        word_sums.word_sums(torch.zeros(64, dtype=torch.int32), [0, 16], [16, 40])
    assert len(launches) == (16 if native else 5)
    converted = 0
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
        converted += "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert converted == (rounds_to_fp8 if native else 0)


def test_text_constants_of_kernels_survive_torch_compile() -> None:
    """torch.compile copies a kernel's text constants between double quotes: a line break broke compiled callers."""
    from nemo_rl_dsv4.numerics.fused import groups, kv, rotary, rounding, swiglu, weights

    texts = [
        value.value
        for module in (groups, kv, rotary, rounding, swiglu, weights)
        for value in vars(module).values()
        if isinstance(value, triton.language.constexpr) and isinstance(value.value, str)
    ]
    assert texts
    for text in texts:
        assert eval(f'"{text}"') == text
