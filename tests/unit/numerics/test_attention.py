"""Attention with BF16 weights: the dense form against a walk over one query's blocks, its gradient, and odd rows."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl_dsv4.numerics.attention import BLOCK, attend_with_rounded_weights, blocks_of_keys

WINDOW, LARGEST, ENTRIES, HEADS, WIDTH = 300, 128, 150, 3, 32
SCALE = WIDTH**-0.5


def inputs(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, HEADS, WINDOW, WIDTH, generator=generator).bfloat16()
    keys = (2 * torch.randn(2, 1, WINDOW + ENTRIES, WIDTH, generator=generator)).bfloat16()
    sinks = torch.randn(HEADS, generator=generator)
    at = torch.arange(WINDOW)
    tokens = (at[:, None] >= at) & (at[:, None] - at < LARGEST)
    entries = torch.rand(2, WINDOW, ENTRIES, generator=generator) < (at[:, None] / WINDOW)
    visible = torch.cat([tokens.expand(2, -1, -1), entries], -1).unsqueeze(1)
    return query.float() @ keys.float().transpose(2, 3), keys, visible, sinks


def attend(scores, keys, visible, sinks):
    return attend_with_rounded_weights(
        scores, keys, visible, sinks, scaling=SCALE, window=WINDOW, largest_window=LARGEST
    )


def one_query(scores, keys, visible, sink, rounded=True):
    """Scores [K] of one query and head, with running maximum and rescaled sums, in float64 but for the weights."""
    order = [torch.nonzero(visible[:WINDOW]).flatten(), WINDOW + torch.nonzero(visible[WINDOW:]).flatten()]
    top, total, out = -1e30, 0.0, torch.zeros(WIDTH, dtype=torch.float64)
    for part in order:
        for block in part.split(BLOCK):
            if len(block) == 0:
                continue
            logits = scores[block] * torch.tensor(SCALE * math.log2(math.e), dtype=torch.float32)
            higher = max(top, float(logits.max()))
            weights = torch.exp2(logits - torch.tensor(higher, dtype=torch.float32))
            used = weights.bfloat16() if rounded else weights
            total = total * 2.0 ** (top - higher) + float(weights.double().sum())
            out = out * 2.0 ** (top - higher) + used.double() @ keys[block].double()
            top = higher
    return out / (total + 2.0 ** (float(sink) * math.log2(math.e) - top))


def test_every_query_walks_its_own_blocks() -> None:
    scores, keys, visible, sinks = inputs()
    out = attend(scores, keys, visible, sinks).bfloat16()
    different = unrounded = count = 0
    for row, head, at in ((r, h, t) for r in range(2) for h in range(HEADS) for t in range(0, WINDOW, 23)):
        arguments = (scores[row, head, at], keys[row, 0], visible[row, 0, at], sinks[head])
        different += int((one_query(*arguments).bfloat16() != out[row, head, at]).sum())
        unrounded += int((one_query(*arguments, rounded=False).bfloat16() != out[row, head, at]).sum())
        count += WIDTH
    assert different / count < 2e-3  # last bits of float32 sums and powers
    assert unrounded / count > 0.2


def test_blocks_count_from_the_first_key_that_a_query_sees() -> None:
    visible = torch.zeros(1, 1, 2, 200 + 70, dtype=torch.bool)
    visible[0, 0, 0, 72:200] = visible[0, 0, 1, 190:200] = True
    visible[0, 0, :, 200:] = True
    block, count = blocks_of_keys(visible, 200, 128)
    assert count == 4
    full, short = block[0, 0].tolist()
    assert full[:72] == [-1] * 72 and full[72:200] == [0] * 64 + [1] * 64 and full[200:] == [2] * 64 + [3] * 6
    assert short[:190] == [-1] * 190 and short[190:200] == [0] * 10 and short[200:] == [1] * 64 + [2] * 6


def test_the_gradient_is_that_of_float32_attention() -> None:
    scores, keys, visible, sinks = inputs(1)
    target = torch.randn(2, HEADS, WINDOW, WIDTH, generator=torch.Generator().manual_seed(5))
    leaves = [t.float().clone().requires_grad_() for t in (scores, keys, sinks)]
    (attend(leaves[0], leaves[1], visible, leaves[2]) * target).sum().backward()
    plain = [t.float().clone().requires_grad_() for t in (scores, keys, sinks)]
    logits = (plain[0] * SCALE).masked_fill(~visible, -math.inf)
    combined = torch.cat([logits, plain[2].view(1, -1, 1, 1).expand(2, -1, WINDOW, 1)], -1)
    (combined.softmax(-1)[..., :-1] @ plain[1] * target).sum().backward()
    for found, wanted in zip(leaves, plain, strict=True):
        assert found.grad is not None and wanted.grad is not None
        assert (found.grad - wanted.grad).norm() < 5e-3 * wanted.grad.norm()


@pytest.mark.parametrize("sink", [88.0, 1e4, math.inf])
def test_a_sink_far_above_all_scores_leaves_nothing_and_no_gradient_that_is_no_number(sink: float) -> None:
    scores, keys, visible, sinks = inputs()
    leaves = [t.float().clone().requires_grad_() for t in (scores * 1e-3, keys, sinks.fill_(sink))]
    out = attend(leaves[0], leaves[1], visible, leaves[2])
    out.sum().backward()
    assert float(out.detach().abs().max()) < 1e-25
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)


@pytest.mark.parametrize("sink", [0.0, 40.0, -math.inf])
def test_a_query_without_keys_is_zero_and_has_no_gradient(sink: float) -> None:
    scores, keys, visible, sinks = inputs()
    visible[0, 0, 5] = False
    leaves = [t.float().clone().requires_grad_() for t in (scores, keys, sinks.fill_(sink))]
    out = attend(leaves[0], leaves[1], visible, leaves[2])
    assert torch.equal(out[0, :, 5], torch.zeros_like(out[0, :, 5]))
    out.sum().backward()
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)
    assert leaves[0].grad is not None and not leaves[0].grad[0, :, 5].any()
