"""A BF16 engine rotates by float32 frequencies: no checkpoint holds them, so a cast would lose them for good."""

import torch

from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.numerics import get_profile


def test_frequencies_keep_their_float32_values(config_once):
    engines = [
        ReferenceEngine(config_once, get_profile("vllm-hopper"), dtype=d) for d in (torch.float32, torch.bfloat16)
    ]
    tables = [{n: b for n, b in e.model.named_buffers() if n.endswith("inv_freq")} for e in engines]
    assert len(tables[0]) >= 2 and tables[0].keys() == tables[1].keys()
    for name, table in tables[0].items():
        assert table.dtype == tables[1][name].dtype == torch.float32 and torch.equal(table, tables[1][name]), name
        assert not torch.equal(table, table.bfloat16().float())
