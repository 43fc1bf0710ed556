"""The mismatch command's verdict: what counts as agreed, and which limits make sense."""

from types import SimpleNamespace

import pytest
import torch

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.cli.mismatch import _check_vocabulary, _sampled_before, _too_far
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.mismatch.measure import Estimate, Mismatch
from nemo_rl_dsv4.mismatch.rollout_file import Rollout
from nemo_rl_dsv4.mismatch.study import EVERYTHING, Study, Variant

NAN, INF = float("nan"), float("inf")


def mismatch(mean: float, low: float, high: float) -> Mismatch:
    k3 = Estimate(mean, low, high)
    return Mismatch(k3, k3, k3, mean, 10, 2)


def study(k3: Mismatch, floor: Mismatch | None = None) -> Study:
    return Study({}, {}, (Variant(EVERYTHING, "reference point", k3),), floor)


@pytest.mark.parametrize("limit", ["nan", "inf", "-1"])
def test_a_limit_that_nothing_exceeds_is_refused(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--limit nan` and `--limit inf` were taken, and every study then agreed."""
    assert main(["mismatch", "--config", "recipe.yaml", f"--limit={limit}"]) == 2
    assert "--limit is" in capsys.readouterr().err


@pytest.mark.parametrize("values", [(NAN, NAN, NAN), (INF, 1e-5, INF), (1e-5, NAN, 1e-5)])
def test_a_distance_that_is_no_number_is_a_finding(values: tuple[float, float, float]) -> None:
    """NaN compares false with every limit, so a study of NaN counted as agreed."""
    assert _too_far(study(mismatch(*values)), 1e-3)
    assert _too_far(study(mismatch(1e-5, 1e-5, 1e-5), mismatch(NAN, NAN, NAN)), 1e-3)


def test_limit_and_floor_decide() -> None:
    """Farther than both the limit and the engine's floor, interval included, is a finding; less is not."""
    far = mismatch(2e-3, 1.5e-3, 3e-3)
    assert _too_far(study(far), 1e-3) and not _too_far(study(far), 2e-3)
    assert not _too_far(study(far, mismatch(2e-3, 1e-3, 2e-3)), 1e-3)


def test_a_floor_that_no_engine_has_is_a_finding() -> None:
    """Log-probabilities that were damaged on the way are as far from the engine's prefill as from the trainer."""
    assert _too_far(study(mismatch(5e34, 5e34, 5e34), mismatch(5e34, 5e34, 5e34)), 1e-3)
    assert not _too_far(study(mismatch(0.3, 0.2, 0.4), mismatch(0.39, 0.37, 0.42)), 1e-3)


@pytest.mark.parametrize("option", ["--checkpoint", "--out", "--rollout", "--save-rollout"])
def test_an_empty_path_is_not_the_working_directory(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mismatch", "--config", "recipe.yaml", option, ""]) == 2
    assert f"argument {option}: is empty; wanted a path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--random-prompts", "\u00b2-\u00b3"], "wanted two lengths such as 16-700"),
        (["--rollout", "nowhere"], "--rollout nowhere: no such file"),
        (["--out", f"{__file__}/x"], "is no folder; name another place"),
        (["--out", "/proc/x"], "/proc takes no files"),
        (["--save-rollout", "/proc/x/rollout"], "--save-rollout /proc/x/rollout: /proc takes no files"),
        (["--save-rollout", "/proc/r"], "--save-rollout /proc/r: /proc takes no files"),
        (["--rollout", "/tmp"], "--rollout /tmp: no regular file"),
        (["--rollout", __file__, "--prompts", "3"], "--prompts is 3, but --rollout"),
        (["--rollout", __file__, "--responses", "2"], "--responses is 2, but --rollout"),
        (["--rollout", __file__, "--random-prompts", "1-5"], "--random-prompts is 1-5, but --rollout"),
        (["--save-rollout", "/tmp"], "is a folder; name a file in it"),
    ],
)
def test_bad_words_are_refused_before_anything_is_computed(words, message, capsys) -> None:
    """The recipe is not there: whatever comes before it is refused first, not after minutes of sampling."""
    assert main(["mismatch", "--config", "nowhere.yaml", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_rollout_of_another_vocabulary_is_refused(tmp_path) -> None:
    """Its ids were looked up all the same: a traceback from inside the model."""
    tensors = {
        "input_ids": torch.tensor([[1, 2, 700]]),
        "prompt_lengths": torch.tensor([1]),
        "lengths": torch.tensor([3]),
        "logprobs": torch.full((1, 3), -1.0),
        "prompt": torch.tensor([0]),
    }
    facts = {"profile": "vllm-hopper", "precision": "float32", "noise": 0.0}
    Rollout(tensors, facts).save(tmp_path / "rollout")
    options = SimpleNamespace(rollout=tmp_path / "rollout", noise=0.0)
    model = SimpleNamespace(profile="vllm-hopper", precision="float32", hf_config={"vocab_size": 700})
    with pytest.raises(UserError, match="rollout has token id 700, but the checkpoint's vocab_size is 700"):
        _sampled_before(options, model, facts)  # pyright: ignore[reportArgumentType]
    model.hf_config["vocab_size"] = 701
    assert _sampled_before(options, model, facts) is not None  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"sampled with noise 0.0; this command says 0.5; give --noise that value, or"):
        _sampled_before(options, model, {**facts, "noise": 0.5})  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"does not say with what seed it was sampled .*; sample again"):
        _sampled_before(options, model, {**facts, "seed": 42})  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="data.validation has token id 9, but"):
        _check_vocabulary("data.validation", 9, {"vocab_size": 9})
