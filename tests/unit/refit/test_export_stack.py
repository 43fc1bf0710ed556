"""Experts are quantized many at once; the stream must not show it."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit import SourceScales, export, export_weights

State = dict[str, torch.Tensor]


def experts(width: int) -> State:
    generator = torch.Generator().manual_seed(width)
    prefix = "model.layers.1.mlp.experts"
    return {
        f"{prefix}.gate_and_up_projs": torch.randn(5, 256, 2 * width, generator=generator),
        f"{prefix}.down_projs": torch.randn(5, width, 256, generator=generator),
    }


@pytest.mark.parametrize("profile", ["vllm-hopper", "deepseek-reference", "bf16"])
@pytest.mark.parametrize("width", [128, 192])
def test_groups_of_experts_give_the_stream_of_single_ones(
    width: int, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = experts(width)
    streams = []
    for group_bytes in (1, 2 * 3 * 256 * width, 1 << 30):
        monkeypatch.setattr(export, "GROUP_BYTES", group_bytes)
        streams.append(list(export_weights(state, profile)))
    for stream in streams[1:]:
        for (name, a), (other, b) in zip(streams[0], stream, strict=True):
            assert name == other
            assert a.dtype == b.dtype
            assert a.is_contiguous() == b.is_contiguous()
            assert torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def test_groups_keep_source_scales_and_name_a_nan() -> None:
    state = {key: value.sign() for key, value in experts(128).items()}
    plain = dict(export_weights(state, "vllm-hopper"))
    kept = "layers.1.ffn.experts.3.w3"
    scales = SourceScales([(f"{kept}.weight", torch.full((1, 2), 2.0**-3))])
    stream = dict(export_weights(state, "vllm-hopper", source_scales=scales))
    assert stream[f"{kept}.scale"].tolist() == [[2.0**-3, 2.0**-3]]
    assert all(torch.equal(stream[n], t) for n, t in plain.items() if n.endswith(".scale") and kept not in n)
    state["model.layers.1.mlp.experts.gate_and_up_projs"][3, 7, 128 + 9] = torch.inf
    with pytest.raises(UserError, match=r"experts\.3\.w3\.weight\[9, 7\] is inf"):
        list(export_weights(state, "vllm-hopper"))
