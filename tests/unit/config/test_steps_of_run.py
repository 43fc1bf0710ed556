"""How many steps the data of a recipe lasts, said before anything starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_dsv4.config.algorithm import GRPO
from nemo_rl_dsv4.config.prompts import steps_of_run


class Loader:
    """4096 prompts in batches of 16."""

    prompts, batch = range(4096), 16

    def __len__(self) -> int:
        return 256


def steps(**keys: Any) -> tuple[int, str | None]:
    grpo = GRPO.model_construct(**{"max_num_epochs": 1, "use_dynamic_sampling": False, **keys})
    return steps_of_run(SimpleNamespace(grpo=grpo), Loader())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("keys, expected", [({"max_num_steps": 40}, 40), ({"max_num_steps": 256}, 256), ({}, 256)])
def test_data_that_lasts_needs_no_word(keys, expected):
    assert steps(**keys) == (expected, None)


def test_data_that_ends_first_is_said_with_what_to_raise():
    """Seen: a run asked for 300 steps counted to 256/300 and ended."""
    found, note = steps(max_num_steps=300)
    assert found == 256
    assert note is not None and "ends after 256 steps, before grpo.max_num_steps 300" in note
    assert "4096 prompts for steps of 16" in note and "grpo.max_num_epochs is 1; raise" in note
    assert steps(max_num_steps=300, max_num_epochs=2) == (300, None)
    assert "at most 256" in str(steps(max_num_steps=300, use_dynamic_sampling=True)[1])
