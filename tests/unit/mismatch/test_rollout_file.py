"""A rollout file gives back what was saved; a wrong or damaged one is refused by name."""

from pathlib import Path

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.mismatch.rollout_file import Rollout, load_rollout


def tensors() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(12).reshape(2, 6),
        "prompt_lengths": torch.tensor([2, 3]),
        "lengths": torch.tensor([6, 5]),
        "logprobs": -torch.rand(2, 6),
        "prompt": torch.tensor([0, 1]),
        "routed_experts": torch.zeros(2, 6, 3, 2, dtype=torch.int16),
    }


def test_round_trip_and_mask(tmp_path: Path) -> None:
    saved = Rollout(tensors(), {"engine": "reference", "temperature": 1.0})
    saved.save(tmp_path / "made" / "rollout.safetensors")
    loaded = load_rollout(tmp_path / "made" / "rollout.safetensors")
    assert loaded.engine == saved.engine
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in saved.tensors.items())
    assert loaded.response_mask.int().tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": None}, "'logprobs' is missing"),
        ({"logprobs": torch.zeros(2, 5)}, "logprobs is"),
        ({"logprobs": torch.zeros(2, 6, dtype=torch.float64)}, "logprobs is torch.float64"),
        ({"lengths": torch.tensor([6, 7])}, "sequence 1 has 3 prompt tokens of 7"),
        ({"extra": torch.zeros(2)}, "unknown tensor 'extra'"),
    ],
)
def test_a_wrong_rollout_is_refused(change: dict, message: str) -> None:
    wrong = {name: value for name, value in {**tensors(), **change}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        Rollout(wrong)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout.safetensors"
    with pytest.raises(UserError, match="no such rollout"):
        load_rollout(path)
    Rollout(tensors()).save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="cannot be read"):
        load_rollout(path)
