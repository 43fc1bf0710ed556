"""The rollout's experts in an AutoModel DeepSeek-V4: gate arithmetic, fallback, recomputation, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from nemo_automodel.components.moe.parallelizer import apply_ac

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.router_replay import RouterReplayer

LAYERS, TOP_K, EXPERTS = 3, 2, 8


@pytest.fixture(scope="module")
def config(config_once):
    return config_once | {"num_hidden_layers": 3, "compress_ratios": [0, 0, 4], "hc_mult": 2, "hc_sinkhorn_iters": 2}


def make(config, *, replay=True, checkpointing=False):
    model = build_model(automodel_config(config), seed=3)
    replayer = RouterReplayer(model, replay=replay)
    if checkpointing:
        apply_ac(model)
    return model, replayer


def batch(model, *, rows=2, width=12, seed=0):
    """Tokens, and random routes that agree with the hash table in layer 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 160, (rows, width), generator=generator)
    routes = torch.rand(rows, width, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]
    routes[:, :, 0] = model.model.layers["0"].mlp.gate.tid2eid[ids]
    lengths = torch.tensor([width] + [width - 3] * (rows - 1))
    routes[torch.arange(width) >= lengths.unsqueeze(1) - 1] = -1
    return {"input_ids": ids, "input_lengths": lengths, "routed_experts": routes.to(torch.int16)}


@pytest.fixture
def used():
    """Record what every gate really returns: layer -> list of [T, K] per call, recomputation included."""
    seen: dict[int, list[torch.Tensor]] = {}

    def watch(model):
        for name, block in model.model.layers.items():
            block.mlp.gate.register_forward_hook(
                lambda module, args, out, layer=int(name): seen.setdefault(layer, []).append(out[1].clone())
            )
        return seen

    return watch


def padding(data):
    return torch.arange(data["input_ids"].shape[1]) >= data["input_lengths"].unsqueeze(1)


WHOLE = slice(None)


def replaying(replayer, data, local=WHOLE):
    """The context of a call that sees the columns `local`."""
    return replayer.forward(data["routed_experts"][:, local], data["input_ids"][:, local], recorded(data)[:, local])


def run(model, replayer, data):
    with replaying(replayer, data):
        return model(data["input_ids"], padding_mask=padding(data)).logits


def recorded(data):
    return torch.arange(data["input_ids"].shape[1]) < data["input_lengths"].unsqueeze(1) - 1


def scalar_gate(logits, ids, scale):
    """Weights of the experts `ids` of one token, in plain Python. The selection bias has no part in them."""
    scores = [math.sqrt(math.log1p(math.exp(value))) for value in logits]
    chosen = [scores[expert] for expert in ids]
    return [score / sum(chosen) * scale for score in chosen]


def test_replayed_weights_are_the_gates_own_scores(config):
    """sqrt(softplus) of the logits, without the selection bias, renormalised over the replayed ids, times 1.5."""
    model, replayer = make(config)
    gate = model.model.layers["1"].mlp.gate
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(torch.linspace(-1, 1, EXPERTS))
    data = batch(model)
    x = torch.randn(2 * 12, gate.dim, generator=torch.Generator().manual_seed(1))
    with replaying(replayer, data):
        weights, indices, _ = gate(x, torch.ones(24, dtype=torch.bool), None)
    rollout, here = data["routed_experts"][:, :, 1].flatten(0, 1).long(), recorded(data).flatten()
    assert torch.equal(indices[here], rollout[here])
    logits = (x.double() @ gate.weight.double().T).tolist()
    expected = [scalar_gate(row, ids, gate.route_scale) for row, ids in zip(logits, indices.tolist(), strict=True)]
    torch.testing.assert_close(weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert float(weights.detach().sum(-1).mean()) == pytest.approx(1.5)
    own = torch.topk(torch.sqrt(torch.nn.functional.softplus(x @ gate.weight.T)) + gate.e_score_correction_bias, 2)[1]
    assert torch.equal(indices[~here].sort().values, own[~here].sort().values)
    assert not torch.equal(own[here].sort().values, indices[here].sort().values)


def test_the_gradient_flows_through_the_scores(config):
    """Against a difference quotient of the loss in one gate weight, at a replayed token."""
    model, replayer = make(config)
    gate, data = model.model.layers["1"].mlp.gate, batch(model)
    x = torch.randn(24, gate.dim, generator=torch.Generator().manual_seed(1))
    target = torch.randn(24, TOP_K, generator=torch.Generator().manual_seed(2))

    def loss():
        with replaying(replayer, data):
            return (gate(x, torch.ones(24, dtype=torch.bool), None)[0] * target)[recorded(data).flatten()].sum()

    loss().backward()
    expert, step = int(data["routed_experts"][0, 0, 1, 0]), 1e-2
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            gate.weight[expert, 5] += sign * step
            values.append(float(loss()))
            gate.weight[expert, 5] -= sign * step
    assert float(gate.weight.grad[expert, 5]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-2)


def test_every_layer_uses_the_rollouts_experts_and_missing_rows_its_own(config, used):
    model, replayer = make(config)
    seen, data = used(model), batch(model)
    data["routed_experts"][0, 4:6, 2] = -1
    replayer.check(data)
    with torch.no_grad():
        run(model, replayer, data)
    here = recorded(data)
    for layer in range(LAYERS):
        rows = here & (data["routed_experts"][:, :, layer, 0] >= 0)
        found = seen[layer][0].unflatten(0, here.shape)
        assert torch.equal(found[rows].sort().values, data["routed_experts"][:, :, layer][rows].long().sort().values)
        assert (found[~rows] >= 0).all()
    tally = replayer.take_tally()
    assert tally.expected == int(here.sum()) * LAYERS and tally.missing == 2
    assert tally.compared == int(here.sum()) * 2 - 2 and tally.hash_mismatches == 0
    assert 0 < tally.shared < tally.compared
    assert replayer.take_tally().metrics() == {}


def test_comparing_changes_nothing_and_counts_every_pair(config, used):
    model, replayer = make(config, replay=False)
    seen, data = used(model), batch(model)
    with torch.no_grad():
        plain = model(data["input_ids"], padding_mask=padding(data)).logits
        assert torch.equal(run(model, replayer, data), plain)
    here, tally = recorded(data), replayer.take_tally()
    common = 0
    for layer in (1, 2):
        own = seen[layer][1].unflatten(0, here.shape)[here].tolist()
        rollout = data["routed_experts"][:, :, layer][here].tolist()
        common += sum(len(set(a) & set(b)) for a, b in zip(own, rollout, strict=True))
    assert tally.shared == pytest.approx(common / TOP_K)
    assert tally.metrics()["router_overlap"] == pytest.approx(common / TOP_K / (2 * int(here.sum())))


def test_own_routes_replayed_are_the_plain_forward(config, used):
    """Replaying what the model chooses anyway changes neither logits nor gradients."""
    model, replayer = make(config)
    data, seen = batch(model), used(model)
    plain = model(data["input_ids"], padding_mask=padding(data)).logits
    plain.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    own = torch.stack([seen[layer][0].unflatten(0, (2, 12)) for layer in range(LAYERS)], dim=2)
    logits = run(model, replayer, data | {"routed_experts": own})
    logits.square().mean().backward()
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-6)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=name)
    assert replayer.take_tally().metrics()["router_overlap"] == 1.0


def test_nothing_stays_behind_after_a_forward(config):
    """Neither the next micro-batch nor a pass after an error sees earlier routes."""
    model, replayer = make(config)
    first, second = batch(model), batch(model, seed=5)
    with torch.no_grad():
        plain = model(second["input_ids"], padding_mask=padding(second)).logits
        alone = run(model, replayer, second)
        run(model, replayer, first)
        assert torch.equal(run(model, replayer, second), alone)
        assert not torch.equal(alone, plain)
        with pytest.raises(ZeroDivisionError), replaying(replayer, first):
            raise ZeroDivisionError
        assert torch.equal(model(second["input_ids"], padding_mask=padding(second)).logits, plain)


def test_recomputed_blocks_see_the_routes_of_their_forward(config, used):
    """Activation checkpointing recomputes in the backward pass, when other forwards have run: C088's kind of failure.

    Two forwards first, then both backwards, latest first; gradients must be those of a model that keeps activations.
    """
    gradients = []
    for checkpointing in (False, True):
        model, replayer = make(config, checkpointing=checkpointing)
        seen = used(model)
        seen.clear()
        parts = [batch(model), batch(model, seed=5)]
        losses = [run(model, replayer, part).square().mean() for part in parts]
        tally = replayer.take_tally()
        for loss in reversed(losses):
            loss.backward()
        gradients.append({n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()})
        calls = seen[1]
        assert len(calls) == (4 if checkpointing else 2)
        if checkpointing:
            assert torch.equal(calls[2], calls[1]) and torch.equal(calls[3], calls[0])
            assert not torch.equal(calls[0], calls[1])
        assert tally.compared == 2 * sum(int(recorded(part).sum()) for part in parts)
        assert replayer.take_tally().metrics() == {}, "a recomputation is not counted again"
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-8, msg=name)


def test_a_recomputation_that_lost_its_routes_is_an_error(config):
    """Checkpointing that does not ask the block for its contexts would train other experts than it scored."""
    model, replayer = make(config)
    block, data = model.model.layers["1"], batch(model)
    original = block.forward
    block.forward = lambda *a, **k: torch.utils.checkpoint.checkpoint(original, *a, use_reentrant=False, **k)
    loss = run(model, replayer, data).square().mean()
    with pytest.raises(RuntimeError, match="layer 1 is recomputed in the backward pass without the routes"):
        loss.backward()


def test_a_slice_of_the_columns_gets_its_rows(config):
    """C064: under context parallelism tokens, routes and masks are cut by one contiguous slice."""
    model, replayer = make(config)
    gate, data = model.model.layers["1"].mlp.gate, batch(model)
    x = torch.randn(2, 12, gate.dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        with replaying(replayer, data):
            whole = gate(x.flatten(0, 1), torch.ones(24, dtype=torch.bool), None)[1].unflatten(0, (2, 12))
        for local in (slice(0, 6), slice(6, 12)):
            with replaying(replayer, data, local):
                part = gate(x[:, local].flatten(0, 1), torch.ones(12, dtype=torch.bool), None)[1]
            assert torch.equal(part.unflatten(0, (2, 6)), whole[:, local])
    message = r"layer 1 has \[24, 2\] rows and ids; the router chose \[12, 2\]"
    with replaying(replayer, data), pytest.raises(UserError, match=message):
        gate(x[:, :6].flatten(0, 1), torch.ones(12, dtype=torch.bool), None)


def test_hash_rows_must_be_the_tables(config):
    """C058: a hash layer whose rows differ from tid2eid[input_ids] means another table, other tokens, or no capture."""
    model, replayer = make(config)
    data = batch(model)
    replayer.check(data)
    data["routed_experts"][1, 2, 0] = (data["routed_experts"][1, 2, 0] + 3) % EXPERTS
    with pytest.raises(
        UserError, match=r"sequence 1, position 2, hash layer 0 is .* the model's table gives token \d+"
    ):
        replayer.check(data)
    data["routed_experts"][:, :, 0] = torch.where(recorded(data)[..., None], 0, -1)
    with pytest.raises(UserError, match="or the engine does not capture its hash layers"):
        replayer.check(data)
    with torch.no_grad():
        run(model, replayer, data)
    table = model.model.layers["0"].mlp.gate.tid2eid[data["input_ids"]]
    zeros = (table == 0).all(-1) & recorded(data)
    assert replayer.take_tally().hash_mismatches == int(recorded(data).sum()) - int(zeros.sum())


def test_hash_rows_in_another_order_are_the_same_experts(config):
    model, replayer = make(config)
    data = batch(model)
    data["routed_experts"][:, :, 0] = data["routed_experts"][:, :, 0].flip(-1)
    replayer.check(data)


def test_batches_without_routes_and_micro_batches_of_another_shape_are_named(config):
    model, replayer = make(config)
    data = batch(model)
    with pytest.raises(UserError, match="has no routed_experts, which policy.dsv4.router_replay"):
        replayer.check({name: data[name] for name in ("input_ids", "input_lengths")})
    with pytest.raises(UserError, match=r"wanted \[2, 12, 3, 2\] and \[2, 12\], laid out like the tokens"):
        run(model, replayer, data | {"routed_experts": data["routed_experts"][:, :5]})


def test_installing_twice_or_on_another_router_is_refused(config):
    model, _ = make(config)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.gate replays already"):
        RouterReplayer(model, replay=True)
    with pytest.raises(UserError, match="has no DeepSeek-V4 layer"):
        RouterReplayer(torch.nn.Linear(2, 2), replay=True)
    other = build_model(automodel_config(config), seed=3)
    other.model.layers["1"].mlp.gate = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="is a Linear; router replay knows Gate and DeepseekV4HashGate only"):
        RouterReplayer(other, replay=True)
