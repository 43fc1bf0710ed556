"""A BF16 engine rotates by float32 frequencies, which no checkpoint holds, and reads TF32 weights as a trainer does."""

import torch

from nemo_rl_dsv4.generation.engine_numerics import _tf32
from nemo_rl_dsv4.generation.reference import ReferenceEngine
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.numerics.hyper_connections import tf32_values


def test_frequencies_keep_their_float32_values(config_once):
    engines = [
        ReferenceEngine(config_once, get_profile("vllm-hopper"), dtype=d) for d in (torch.float32, torch.bfloat16)
    ]
    tables = [{n: b for n, b in e.model.named_buffers() if n.endswith("inv_freq")} for e in engines]
    assert len(tables[0]) >= 2 and tables[0].keys() == tables[1].keys()
    for name, table in tables[0].items():
        assert table.dtype == tables[1][name].dtype == torch.float32 and torch.equal(table, tables[1][name]), name
        assert not torch.equal(table, table.bfloat16().float())


def test_tf32_ties_go_away_from_zero_as_in_the_trainer():
    """They went to the even value here: one weight in 16,384 was another one than the trainer's."""
    step = 2.0**-11
    given = torch.tensor([1 + step, 1 + 3 * step, -1 - step, 1 + 0.99 * step, 0.0])
    assert _tf32(given).tolist() == [1 + 2 * step, 1 + 4 * step, -1 - 2 * step, 1.0, 0.0]
    many = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_tf32(many), tf32_values(many))
