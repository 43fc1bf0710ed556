"""Weights quantized once an update, with the bytes that the refit sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model import weight_rounding
from nemo_rl_dsv4.model.quantized_weights import refresh_quantized, weight_roundings
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec, dequantize, fake_quant, get_profile, quantize

SPEC = QuantSpec("e4m3fn", (128, 128), "ue8m0")


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the tensors that a rounding quantized."""
    seen: list[torch.Size] = []
    monkeypatch.setattr(weight_rounding, "quantize", lambda x, spec: seen.append(x.shape) or quantize(x, spec))
    return seen


def random_weight(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter((torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)).to(dtype))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [256, 192])
def test_halves_never_share_a_block(transposed, width):
    """Gate and up stand side by side in one matrix; with a width of 192 a shared grid would mix them."""
    weight = random_weight(3, 160, 2 * width)
    rounding = WeightRounding(SPEC, halves=2, transposed=transposed)
    stored = rounding.quantized(weight)
    assert stored.data.shape == weight.shape
    assert stored.scale.shape == (3, 2, 4)
    wanted = [fake_quant(part, SPEC) for part in weight.detach().chunk(2, -1)]
    torch.testing.assert_close(rounding.round(weight), torch.cat(wanted, -1), rtol=0, atol=0)
    for half, data, scale in zip(
        weight.detach().chunk(2, -1), stored.data.chunk(2, -1), stored.scale.chunk(2, -1), strict=True
    ):
        expected = quantize(half.transpose(-1, -2), SPEC)  # official orientation
        assert torch.equal(data.transpose(-1, -2).view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(scale.transpose(-1, -2), expected.scale)
    assert stored.data.transpose(-1, -2).is_contiguous() == transposed


def test_values_are_kept_only_when_asked(calls):
    weight = random_weight(130, 200)
    for keep in (True, False):
        rounding = WeightRounding(SPEC, keep_values=keep)
        first, second = rounding.round(weight), rounding.round(weight)
        assert (first.data_ptr() == second.data_ptr()) == keep
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len(calls) == 2


def test_codes_are_those_of_the_compute_dtype():
    """FSDP gathers BF16 copies of float32 weights: one process must quantize the same values."""
    weight = random_weight(200, 130)
    rounding = WeightRounding(SPEC)
    rounding.compute_dtype = torch.bfloat16
    out = rounding(weight)
    assert out.dtype == torch.bfloat16
    expected = quantize(weight.detach().bfloat16(), SPEC)
    torch.testing.assert_close(out, dequantize(expected, torch.bfloat16), rtol=0, atol=0)
    out.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, torch.ones_like(weight), rtol=0, atol=0)


def test_fnuz_weights_have_the_values_of_their_checkpoint_twin():
    spec = get_profile("vllm-rocm-gfx942").site("linear.weight")
    weight = random_weight(130, 260)
    torch.testing.assert_close(WeightRounding(spec).round(weight), fake_quant(weight.detach(), spec), rtol=0, atol=0)


def test_replacing_the_parameter_or_its_values_requantizes(calls):
    weight, rounding = random_weight(64, 64), WeightRounding(SPEC)
    rounding.round(weight)
    rounding.round(weight)
    assert len(calls) == 1
    with torch.no_grad():
        weight.mul_(3.0)
    torch.testing.assert_close(rounding.round(weight), fake_quant(weight.detach(), SPEC), rtol=0, atol=0)
    other = random_weight(64, 64, seed=1)
    torch.testing.assert_close(rounding.round(other), fake_quant(other.detach(), SPEC), rtol=0, atol=0)
    assert len(calls) == 3


class _Rounded(nn.Module):
    """A linear layer of 200 x 130 and a stack of 4 experts that round like the policy's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = random_weight(200, 130)
        self.bias = nn.Parameter(torch.zeros(200))
        self._weight_rounding = {"weight": WeightRounding(SPEC)}

    def forward(self, x):
        return x @ self._weight_rounding["weight"](self.weight).T + self.bias


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = random_weight(4, 130, 2 * 192, seed=2)
        self._weight_rounding = {"stack": WeightRounding(SPEC, halves=2, transposed=True)}

    def forward(self, x):
        weight = self._weight_rounding["stack"](self.stack)
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return (x @ local).sum()


def _codes(model):
    """Key -> bytes and scales in this rank's cache."""
    refresh_quantized(model)
    return {
        key: (rounding.stored.data.view(torch.uint8).clone(), rounding.stored.scale.clone())
        for key, _, _, rounding in weight_roundings(model)
    }


def _sharded(rank: int, rendezvous: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.ModuleDict({"linear": _Rounded(), "experts": _Experts()})
    experts = model["experts"]
    experts.stack = nn.Parameter(distribute_tensor(experts.stack.detach(), mesh, [Shard(0)]))
    experts._weight_rounding["stack"].compute_dtype = torch.bfloat16
    fully_shard(
        model["linear"],
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
    )
    counts = []
    original = quantize
    weight_rounding.quantize = lambda x, spec: counts.append(x.shape) or original(x, spec)
    x = torch.ones(3, 130, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sent = []
    for step in range(2):
        sent.append(_codes(model))  # the refit comes before the first forward pass of a step
        for _ in range(3):  # micro-batches
            (model["linear"](x).float().sum() + model["experts"](x).float()).backward()
        again = _codes(model)
        for key, (data, _) in sent[-1].items():
            assert torch.equal(data, again[key][0])
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            for part in model.values():
                for rounding in part._weight_rounding.values():
                    rounding.invalidate()
    assert len(counts) == 2 * 3, counts  # 2 steps; the linear weight, gate and up
    if rank == 0:
        torch.save(sent, results)
    assert experts._weight_rounding["stack"].first_expert == 2 * rank
    dist.destroy_process_group()


def test_sharded_weights_have_the_bytes_of_whole_ones(tmp_path, calls):
    """200 rows over 2 ranks: the shard boundary at row 100 cuts the first block of 128."""
    mp.spawn(_sharded, args=(str(tmp_path / "rendezvous"), str(tmp_path / "sent.pt")), nprocs=2)
    sent = torch.load(tmp_path / "sent.pt")
    model = nn.ModuleDict({"linear": _Rounded(), "experts": _Experts()})
    for part in model.values():
        for rounding in part._weight_rounding.values():
            rounding.compute_dtype = torch.bfloat16
    x = torch.ones(3, 130, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        for key, (found, found_scale) in _codes(model).items():
            data, scale = sent[step][key]
            rows = slice(0, data.shape[0])  # rank 0 has the first two of four experts
            assert torch.equal(data, found[rows]), key
            assert torch.equal(scale, found_scale[: scale.shape[0]]), key
        for _ in range(3):
            bias = model["linear"].bias.to(torch.bfloat16)
            rounded = model["linear"]._weight_rounding["weight"](model["linear"].weight)
            # Each of the 2 ranks computes the same batch: FSDP averages the linear layer's gradients.
            ((x @ rounded.T + bias).float().sum() + model["experts"](x).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 2 * 3


def test_a_sharding_that_cuts_matrices_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'one'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        cut = distribute_tensor(torch.zeros(2, 4, 4), mesh, [Shard(1)])
        with pytest.raises(UserError, match="whole matrices on every rank"):
            WeightRounding(SPEC)(cut)
    finally:
        dist.destroy_process_group()
