"""Each rounding seam against the numerics reference, bit for bit, in float32 and BF16, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v4 import fsdp as v4_fsdp
from nemo_automodel.components.models.deepseek_v4 import optimized_kernels as v4_kernels
from nemo_automodel.components.moe.experts import GroupedExperts, GroupedExpertsDeepEP

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.install_report import InstallReport
from nemo_rl_dsv4.model.qat import SWITCHES, install_fake_quant, install_numerics
from nemo_rl_dsv4.model.seams_attention import fuse_inverse_rope
from nemo_rl_dsv4.model.seams_experts import set_hidden
from nemo_rl_dsv4.numerics import fake_quant, get_profile
from nemo_rl_dsv4.numerics.rotary import inverse_rope_fake_quant
from nemo_rl_dsv4.numerics.swiglu import swiglu_fake_quant

HOPPER = get_profile("vllm-hopper")
OFF = dict.fromkeys(SWITCHES, False)
IDS = torch.randint(3, 160, (2, 150), generator=torch.Generator().manual_seed(3))


def make_model(config, state, dtype=torch.float32, **backend):
    model = build_model(
        automodel_config(config),
        dtype=dtype,
        backend={**CPU_BACKEND, **backend},
        routing_weight_after_down=True,
        seed=0,
    )
    model.load_state_dict(state)
    return model


def seen_by(module, run):
    """Inputs and output of a module's own class in one run."""
    calls = []
    handle = module.register_forward_hook(lambda m, args, out: calls.append((args[0].detach(), out.detach())))
    run()
    handle.remove()
    return calls[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_o_proj_is_rounded_straight_from_the_float32_inverse_rotation(config_once, training_once, dtype):
    """The seam used to round wo_a's input, which AutoModel had already rounded to BF16 after RoPE."""
    plain = make_model(config_once, training_once, dtype)
    model = make_model(config_once, training_once, dtype)
    spec = HOPPER.site("o_proj.input")
    install_fake_quant(model, HOPPER, {**OFF, "o_proj": True})
    with torch.no_grad():
        rotated, _ = seen_by(plain.model.layers["0"].self_attn.wo_a, lambda: plain(IDS))
        unrotated, out = seen_by(model.model.layers["0"].self_attn.wo_a, lambda: model(IDS))
    cos, sin = (t[..., :8].float() for t in plain.model.rotary_emb(rotated, torch.arange(150).expand(2, -1)))
    heads = unrotated.reshape(2, 150, 4, 80)
    assert torch.equal(inverse_rope_fake_quant(heads, cos, sin, None, n_groups=2), rotated)  # the same rotation
    expected = inverse_rope_fake_quant(heads, cos, sin, spec, n_groups=2)
    assert torch.equal(out, plain.model.layers["0"].self_attn.wo_a(expected))
    twice = fake_quant(rotated, spec)
    assert torch.equal(expected, twice) == (dtype == torch.float32)  # a BF16 step in between changes codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_entries_are_what_the_cache_holds(config_once, training_once, dtype):
    model = make_model(config_once, training_once, dtype)
    plain = make_model(config_once, training_once, dtype)
    install_fake_quant(model, HOPPER, {**OFF, "kv": True})
    x = torch.randn(3, 7, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    for site, path in (("kv.swa", "self_attn.kv_norm"), ("kv.compressed", "self_attn.compressor.kv_norm")):
        norms = [m.model.layers["2"].get_submodule(path) for m in (model, plain)]
        assert torch.equal(norms[0](x), fake_quant(norms[1](x), replace(HOPPER.site(site), keep_last=16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["torch", "torch_mm"])
def test_routed_hidden_state_has_the_profiles_steps(config_once, training_once, dtype, experts):
    """C078: clamp in float32; Hopper rounds to BF16 after clamp, SiLU and product, then to FP8."""
    model = make_model(config_once, training_once, dtype, experts=experts)
    install_numerics(model, HOPPER, {**OFF, "experts": True})
    stack = model.model.layers["1"].mlp.experts
    x = (torch.randn(64, 384, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    steps = HOPPER.hidden_bf16_steps if dtype == torch.bfloat16 else ()
    expected = swiglu_fake_quant(gate, up, HOPPER.site("expert.hidden"), limit=10.0, bf16_steps=steps)
    assert torch.equal(stack.expert_activation_grouped(x, torch.ones(64, 1)), expected)
    routed = model(IDS[:, :40]).logits
    assert routed.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_expert_hidden_state(config_once, training_once, dtype):
    """C078: the shared expert clamps like the routed ones; its hidden state is rounded once, for down_proj."""
    model = make_model(config_once, training_once, dtype)
    plain = make_model(config_once, training_once, dtype)
    install_numerics(model, HOPPER, {**OFF, "linear_inputs": True})
    spec = HOPPER.site("linear.input")
    x = (torch.randn(20, 128, generator=torch.Generator().manual_seed(1)) * 20).to(dtype)
    shared = plain.model.layers["1"].mlp.shared_experts
    rounded = fake_quant(x, spec)
    steps = HOPPER.shared_hidden_bf16_steps if dtype == torch.bfloat16 else ()
    hidden = swiglu_fake_quant(shared.gate_proj(rounded), shared.up_proj(rounded), spec, limit=10.0, bf16_steps=steps)
    assert torch.equal(model.model.layers["1"].mlp.shared_experts(x), shared.down_proj(hidden))


class LocalDispatcher:
    """Stands in for DeepEP's: one rank, tokens sorted by expert."""

    def token_permutation2(self, hidden_states, num_local_tokens, token_probs, token_indices):
        del num_local_tokens
        self.shape = hidden_states.shape
        flat = token_indices.flatten()
        order = flat.argsort(stable=True)
        order = order[flat[order] >= 0]
        self.tokens = order // token_indices.shape[1]
        counts = torch.bincount(flat[order], minlength=8)
        return hidden_states[self.tokens], counts, token_probs.flatten()[order]

    def token_unpermutation(self, out):
        return out.new_zeros(self.shape).index_add_(0, self.tokens, out)


@pytest.fixture
def one_rank_mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_deepep_expert_class_rounds_like_the_torch_one(config_once, training_once, one_rank_mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    model = make_model(config_once, training_once)
    moe = model.model.layers["1"].mlp
    ours = moe.experts
    assert isinstance(ours, GroupedExperts)
    theirs = GroupedExpertsDeepEP(ours.config, backend=BackendConfig(**{**CPU_BACKEND, "experts": "torch_mm"}))
    theirs.ep_size, theirs.n_routed_experts, theirs.token_dispatcher = 1, 8, LocalDispatcher()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 128, generator=generator)
    weights = torch.rand(30, 2, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(30)])
    mask = torch.ones(30, dtype=torch.bool)
    for name in ("gate_and_up_projs", "down_projs"):
        whole = distribute_tensor(getattr(ours, name).detach(), one_rank_mesh, [Shard(0)])
        setattr(theirs, name, torch.nn.Parameter(whole))
    plain = theirs(x, mask, weights, ids)
    install_fake_quant(model, HOPPER, {**OFF, "weights": True, "experts": True})
    expected = ours(x, mask, weights, ids)
    moe.experts = theirs
    other = make_model(config_once, training_once)
    other.model.layers["1"].mlp.experts = theirs
    report = install_fake_quant(other, HOPPER, {**OFF, "experts": True})
    assert "model.layers.1.mlp.experts" in report.wrapped["expert.hidden"]
    theirs._weight_rounding = ours._weight_rounding  # one spec; each parameter has its own key
    torch.testing.assert_close(theirs(x, mask, weights, ids), expected, rtol=1e-5, atol=1e-5)
    assert (plain - expected).abs().max() > 1e-3
    theirs(x, mask, weights, ids).sum().backward()
    assert theirs.down_projs.grad is not None and theirs.down_projs.grad.full_tensor().isfinite().all()


def test_tilelang_attention_reads_rounded_entries(config_once, training_once, monkeypatch):
    """KV and indexer operands are rounded before the kernels, which are faked: they need a GPU."""
    config_once = {**config_once, "index_topk": 8}
    seen = {"kv": [], "q": [], "k": []}

    def sparse_attention(q, kv, sinks, topk, scale):
        seen["kv"].append(kv.detach())
        return v4_kernels.sparse_attention_torch(q, kv, sinks, topk.long(), scale)

    def indexer(q, k, weights, starts, ends):
        del starts, ends
        seen["q"].append(q.detach())
        seen["k"].append(k.detach())
        q, k, weights = (t.transpose(0, 1) for t in (q, k, weights))
        return v4_kernels.indexer_scores_torch(q, k, weights, 1.0)

    sdpa = make_model(config_once, training_once)
    tilelang = make_model(config_once, training_once, attn="tilelang")
    use = {"sparse attention", "indexer"}
    monkeypatch.setattr(v4_kernels, "_should_use_tilelang", lambda *a, kernel_name, **k: kernel_name in use)
    monkeypatch.setattr(v4_kernels, "_miles_sparse_attn_tilelang", sparse_attention)
    monkeypatch.setattr(v4_kernels, "_miles_batched_indexer_fwd", indexer)
    monkeypatch.setattr(v4_kernels, "_miles_make_causal_cu_seqlens", lambda *a: (None, None))
    on = {**OFF, "kv": True, "indexer": True, "o_proj": True}
    install_fake_quant(tilelang, HOPPER, on)
    with torch.no_grad():
        found = tilelang(IDS).logits
        monkeypatch.undo()
        install_fake_quant(sdpa, HOPPER, on)
        # Two sums in another order flip FP8 codes: measured mean 1e-4, largest 0.05 of logits near 1.
        assert (found - sdpa(IDS).logits).abs().mean() < 1e-3
    swa, compressed = (replace(HOPPER.site(site), keep_last=16) for site in ("kv.swa", "kv.compressed"))
    for kv in seen["kv"]:
        window, pooled = kv[:, :150], kv[:, 150:]
        assert torch.equal(fake_quant(window, swa), window)  # rounding again changes nothing
        assert pooled.shape[1] == 0 or torch.equal(fake_quant(pooled, compressed), pooled)
    assert len(seen["kv"]) == 5 and len(seen["q"]) == 2
    for kind in ("q", "k"):
        assert all(torch.equal(fake_quant(t, HOPPER.site(f"indexer.{kind}")), t) for t in seen[kind])


def test_gradients_pass_the_seams_as_if_nothing_was_rounded(config_once, training_once):
    """The inverse rotation and SwiGLU that replace AutoModel's, without rounding: same outputs, same gradients."""
    plain, model = make_model(config_once, training_once), make_model(config_once, training_once)
    for layer in model.model.layers.values():
        fuse_inverse_rope(layer.self_attn, None)
        for experts in (layer.mlp.experts, layer.mlp.shared_experts):
            set_hidden(experts, "experts", limit=10.0)
            experts._hidden = type("Always", (type(experts._hidden),), {"is_automodel": lambda *_: False})(10.0)
    for one in (plain, model):
        one(IDS).logits.logsumexp(-1).sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        if expected.grad is not None:
            scale = expected.grad.abs().max()
            torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=float(scale) * 1e-4, msg=name)


def test_every_module_with_a_tensor_is_accounted_for(config_once, training_once):
    model = make_model(config_once, training_once)
    report = install_numerics(model, HOPPER, {**OFF, "weights": True})
    owners = {name.rpartition(".")[0] for name in model.state_dict()}
    assert set(report.modules) == owners
    rows = report.to_dict()["modules"]
    assert rows["model.layers.0.self_attn.wq_a"] == (
        "rounded as linear.weight; input not rounded: fake_quant.linear_inputs is off"
    )
    assert rows["lm_head"].startswith("not rounded: the rollout keeps it in BF16; input not rounded")
    assert "expert.weight" in rows["model.layers.4.mlp.experts"]
    assert rows["model.layers.1.attn_hc"] == "not rounded: the rollout keeps it in float32"


def test_automodel_finds_its_modules_by_class_name(config_once):
    """Compressors with a seam had another name: AutoModel then let ranks with short rows leave out the gradients of
    their ratio-128 compressors, and their reduction broke against ranks with long rows."""

    class TwoRanks:
        ndim = 1
        size = staticmethod(lambda: 2)
        get_group = staticmethod(lambda: "group")

    model = build_model(automodel_config(config_once), seed=0)
    names = {name: type(module).__name__ for name, module in model.named_modules()}
    install_numerics(model, HOPPER, dict.fromkeys(SWITCHES, True))
    assert {name: type(module).__name__ for name, module in model.named_modules()} == names
    block = model.model.layers["3"]
    v4_fsdp._attach_hca_param_sync_group(block, TwoRanks())
    assert block.self_attn.compressor._hca_param_sync_group == "group"


def test_a_quantized_module_without_a_seam_is_an_error(config_once, training_once):
    model = make_model(config_once, training_once)
    with pytest.raises(UserError, match="wq_a holds layers.0.attn.wq_a.weight, which profile vllm-hopper rounds"):
        InstallReport("vllm-hopper").account(model)
    model.model.layers["0"].self_attn.extra = torch.nn.Linear(4, 4)
    with pytest.raises(UserError, match="extra.weight' is not a AutoModel name"):
        install_fake_quant(model, HOPPER, OFF)


def test_experts_without_a_place_to_round_are_refused(config_once, training_once):
    model = make_model(config_once, training_once)
    model.model.layers["1"].mlp.experts = torch.nn.Identity()
    with pytest.raises(UserError, match="is a Identity, which has no place to round operands; set backend.experts"):
        install_fake_quant(model, HOPPER, {**OFF, "weights": True})


def test_orders_that_no_seam_computes_are_refused(config_once, training_once):
    model = make_model(config_once, training_once)
    with pytest.raises(UserError, match="kv_swa_bf16_steps \\('norm',\\)"):
        install_fake_quant(model, replace(HOPPER, kv_swa_bf16_steps=("norm",)), {**OFF, "kv": True})
    with pytest.raises(UserError, match="Hadamard"):
        install_fake_quant(model, get_profile("deepseek-reference"), {**OFF, "indexer": True})
