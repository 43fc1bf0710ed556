"""Mixing of hyper-connection streams by the fused kernels on a real GPU, against the torch reference."""

import pytest
import torch

from nemo_rl_dsv4.numerics.hyper_connections import mix_streams, mix_streams_backward, mix_streams_forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("width", [2048, 4096, 80])
def test_fused_mixing_and_its_gradients(width: int) -> None:
    g = torch.Generator("cuda").manual_seed(width)
    post = torch.rand(3, 40, 4, generator=g, device="cuda") * 2
    comb = torch.softmax(torch.randn(3, 40, 4, 4, generator=g, device="cuda"), -1).transpose(-1, -2)
    out = torch.randn(3, 40, width, generator=g, device="cuda").bfloat16()
    streams = (torch.randn(3, 40, 4, width, generator=g, device="cuda") * 2).bfloat16()
    leaves = [t.clone().requires_grad_() for t in (post, comb, out, streams)]
    mixed = mix_streams(*leaves)
    assert float((mixed != mix_streams_forward(post, comb, out, streams)).double().mean()) < 1e-3
    grad = torch.randn(streams.shape, generator=g, device="cuda").bfloat16()
    mixed.backward(grad)
    wanted = mix_streams_backward(grad, post, comb, out, streams)
    for leaf, value in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, value, rtol=1e-4 if value.dtype == torch.float32 else 8e-3, atol=1e-3)
