"""Exit statuses and lines of a failing command."""

import pickle

import pytest
import torch

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError


def raises(error):
    def command() -> int:
        raise error

    return command


def test_the_status_of_a_command_that_ends_is_its_own(capsys):
    assert guarded(lambda: 0) == 0 and guarded(lambda: 1) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("grpo.seed is 'x'\nwanted an integer"), 2, "error: grpo.seed is 'x' wanted an integer\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_of_the_user_is_one_line(capsys, error, status, line):
    assert guarded(raises(error)) == status
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("error", [UserError("wrong"), KeyboardInterrupt()])
def test_debug_shows_the_traceback(capsys, error):
    assert guarded(raises(error), debug=True) in (2, 130)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_user_error_from_a_ray_task_is_its_own_message(capsys):
    """Ray wraps a worker's exception in one whose text holds the worker's traceback; only the message must be shown."""
    from ray.exceptions import RayTaskError

    try:
        raise UserError("the checkpoint is cut short")
    except UserError as original:
        wrapped = RayTaskError("task", "Traceback (most recent call last): ...", original).as_instanceof_cause()
    assert guarded(raises(wrapped)) == 2
    assert capsys.readouterr().err == "error: the checkpoint is cut short\n"
    assert str(pickle.loads(pickle.dumps(UserError("a")))) == "a"


def test_memory_that_a_gpu_does_not_have_is_one_line(capsys):
    """Seen on an H200: the recipe's error was the last of 60 lines of a worker's traceback."""
    from ray.exceptions import RayTaskError

    text = (
        "CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 105.56 "
        "MiB is free. Of the allocated memory 15.26 GiB is allocated by PyTorch."
    )
    wrapped = RayTaskError("task", "Traceback ...", torch.OutOfMemoryError(text)).as_instanceof_cause()
    for error in (wrapped, torch.OutOfMemoryError(text)):
        assert guarded(raises(error)) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: CUDA out of memory. Tried to allocate 172.00 MiB.") and said.count("\n") == 1
        assert "105.56 MiB is free; lower policy.train_micro_batch_size" in said and "by PyTorch" not in said


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (lambda: torch.empty(2**61, dtype=torch.uint8), "cannot allocate 2147483648.0 GiB for one tensor"),
        (lambda: torch.empty(2**40, 2**40), "cannot allocate more than 2^63 bytes for one tensor"),
        (lambda: bytearray(2**62), "the host is out of memory (MemoryError)"),
    ],
)
def test_memory_that_a_host_does_not_have_is_one_line(capsys, error, wanted):
    """torch raises a plain RuntimeError; the tracebacks named no setting."""
    assert guarded(lambda: int(error() is None)) == 1
    said = capsys.readouterr().err
    assert wanted in said and "lower policy.train_micro_batch_size" in said and said.count("\n") == 1
    assert guarded(lambda: int(error() is None), lower="lower --tokens") == 1
    assert capsys.readouterr().err.endswith("; lower --tokens\n")


def test_a_process_that_died_is_one_line(capsys):
    from ray.exceptions import ActorDiedError, RayActorError

    assert guarded(raises(RayActorError(error_msg="The actor died\nunexpectedly"))) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: a process of the run died: The actor died unexpectedly; the host may be short")
    assert "--resume" in said and said.count("\n") == 1
    assert guarded(raises(ActorDiedError()), debug=True) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_host_without_memory_is_one_line(capsys):
    """A hundred lines of Ray's, none of which named a setting."""
    from ray.exceptions import OutOfMemoryError

    text = (
        "3 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 0ae7) "
        "was 22.79GB used / 23.54GB limit (0.968312)\nOOM kill reason: ...\nTop 10 memory users: PID\tMEM(GB)\n"
    )
    assert guarded(raises(OutOfMemoryError(text))) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: a host of the run is short of memory (22.79GB used / 23.54GB limit), and Ray ended ")
    assert "policy.sequence_packing.train_mb_tokens" in said and said.count("\n") == 1 and "kill reason" not in said
    assert guarded(raises(OutOfMemoryError("other words"))) == 1
    assert "short of memory, and Ray" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError(), BrokenPipeError(), FloatingPointError("loss is nan")])
def test_a_defect_is_not_hidden(error):
    """A connection that broke during a run used to end it with status 0, as if a reader of our output had gone away."""
    with pytest.raises(type(error)):
        guarded(raises(error))
