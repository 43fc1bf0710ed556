"""A rollout file gives back what was saved; a wrong or damaged one is refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.mismatch.rollout_file import FORMAT, Rollout, load_rollout


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


def with_value(name: str, row: int, column: int, value: float) -> dict[str, torch.Tensor]:
    changed = {**tensors(), "prefill_logprobs": -torch.rand(2, 6)}
    changed[name] = changed[name].clone()
    changed[name][row, column] = value
    return changed


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "message"),
    [
        ("logprobs", 0, 2, float("nan"), "logprobs of sequence 0, position 2 is nan; wanted a finite logprob"),
        ("logprobs", 1, 4, 0.5, "logprobs of sequence 1, position 4 is 0.5"),
        ("prefill_logprobs", 0, 5, float("-inf"), "prefill_logprobs of sequence 0, position 5 is -inf"),
        ("input_ids", 1, 0, -1, "input_ids of sequence 1, position 0 is -1; wanted a token id"),
    ],
)
def test_values_that_no_engine_samples_are_refused(
    tmp_path: Path, name: str, row: int, column: int, value: float, message: str
) -> None:
    """A file with NaN or positive logprobs or negative ids was scored like any other; the error names the file."""
    path = tmp_path / "rollout.safetensors"
    save_file(with_value(name, row, column, value), path, metadata={"format": FORMAT})
    with pytest.raises(UserError, match=f"{path}: rollout: {message}"):
        load_rollout(path)


def test_logprobs_outside_the_response_are_not_read() -> None:
    """Prompts and padding may hold anything; rounding may put a certain token just above 0."""
    Rollout(with_value("logprobs", 1, 5, float("nan")))
    Rollout(with_value("logprobs", 0, 0, 7.0))
    Rollout(with_value("logprobs", 0, 2, 1e-6))


def test_a_rollout_without_response_tokens_is_refused() -> None:
    """Zero rows, or prompts alone, were accepted and failed much later."""
    with pytest.raises(UserError, match="2 sequences without a response token"):
        Rollout({**tensors(), "lengths": torch.tensor([2, 3])})
    with pytest.raises(UserError, match="0 sequences without a response token"):
        Rollout({name: tensor[:0] for name, tensor in tensors().items()})


@pytest.mark.parametrize(("engine", "message"), [("[1]", "'engine' is a list"), ("{", "'engine' is not JSON")])
def test_metadata_that_is_no_object_is_refused(tmp_path: Path, engine: str, message: str) -> None:
    """Metadata `engine` of another kind ended in a traceback."""
    path = tmp_path / "rollout.safetensors"
    save_file(tensors(), path, metadata={"format": FORMAT, "engine": engine})
    with pytest.raises(UserError, match=message):
        load_rollout(path)
