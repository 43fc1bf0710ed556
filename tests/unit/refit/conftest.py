"""Training weights (AutoModel names, stacked experts) made from the random official ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL


@pytest.fixture
def training_state(tiny_config: dict[str, Any], random_official: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for name, value in random_official.items():
        slot = AUTOMODEL.slot(name)
        if slot.expert is None:
            state[slot.key] = value.clone()
            continue
        if slot.key not in state:
            state[slot.key] = torch.empty(AUTOMODEL.stack_shape(value.shape, slot, tiny_config["n_routed_experts"]))
        AUTOMODEL.view(state[slot.key], slot).copy_(value)
    return state
