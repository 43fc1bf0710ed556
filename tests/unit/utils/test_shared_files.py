"""Hosts that do not share what they must; a host is a function here, its file system a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.utils import shared_files
from nemo_rl_dsv4.utils.hosts import Host
from nemo_rl_dsv4.utils.shared_files import check_programs, check_same_model, check_shared, model_files, require_here

HOSTS = [Host("here", "10.0.0.1"), Host("there", "10.0.0.2"), Host("far", "10.0.0.3")]
KEY = "checkpointing.checkpoint_dir"


@pytest.fixture(autouse=True)
def on_the_first_host(monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(shared_files.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(shared_files, "SECONDS_TO_APPEAR", 0.3)


def everywhere(hosts, function, arguments):
    """All hosts see the file system of this one."""
    assert [host.node for host in hosts] == ["there", "far"]
    return [function(*own) for own in arguments]


def test_hosts_that_share_a_folder_leave_nothing_in_it(tmp_path):
    folder = tmp_path / "results" / "run"
    check_shared({KEY: folder}, HOSTS, ask=everywhere)
    assert folder.is_dir() and not list(folder.iterdir())


def test_one_host_is_not_asked(tmp_path):
    def never(*_):
        raise AssertionError

    check_shared({KEY: tmp_path / "new"}, HOSTS[:1], ask=never)
    check_same_model(tmp_path, HOSTS[:1], ask=never)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("case", ["a folder of its own", "no folder", "its files stay there", "a folder in the way"])
def test_a_host_with_another_folder_is_named(tmp_path, case):
    folder, other = tmp_path / "shared", tmp_path / "other"

    def ask(hosts, function, arguments):
        answers = []
        for host, (paths, *rest) in zip(hosts, arguments, strict=True):
            if host.node == "far":
                paths = {key: str(other) for key in paths}
                if case != "no folder":
                    other.mkdir()
                if case in ("its files stay there", "a folder in the way"):
                    (marker,) = (path for path in folder.iterdir() if not path.name.endswith("-0"))
                    shutil.copy(marker, other)
                if case == "a folder in the way":
                    (other / f"{marker.name}-1").mkdir()
            answers.append(function(paths, *rest))
        return answers

    reasons = {
        "a folder of its own": "it does not see what this host writes there",
        "no folder": "it has no such folder",
        "its files stay there": "what it writes there does not arrive here",
        "a folder in the way": "it cannot write there: Is a directory",
    }
    with pytest.raises(UserError, match=rf"{KEY} is .*shared: host 10.0.0.3 does not share it .{reasons[case]}"):
        check_shared({KEY: folder}, HOSTS, ask=ask)
    assert not list(folder.iterdir())


def test_a_host_with_another_model_is_named(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model-1.safetensors").write_bytes(b"12345678")
    (model / "README.md").write_text("not read")
    assert model_files(str(model)) == {"config.json": 2, "model-1.safetensors": 8}
    check_same_model(model, HOSTS, ask=everywhere)

    def cut(hosts, function, arguments):
        return [function(*arguments[0]), {"config.json": 2, "model-1.safetensors": 3}]

    with pytest.raises(UserError, match=r"host 10.0.0.3 has 3 bytes for model-1.safetensors \(here 8 bytes\); put it"):
        check_same_model(model, HOSTS, ask=cut)
    with pytest.raises(UserError, match=r"host 10.0.0.2 has nothing for config.json \(here 2 bytes\)"):
        check_same_model(model, HOSTS, ask=lambda *_: [model_files("/nowhere"), {}])


def test_a_host_without_the_engines_python_is_named(tmp_path):
    python = tmp_path / "python"
    python.touch()
    check_programs({"policy.dsv4.vllm_python": str(python)}, HOSTS, ask=everywhere)
    with pytest.raises(
        UserError, match="policy.dsv4.vllm_python: engines run with .*python, which host 10.0.0.2 does not"
    ):
        check_programs({"policy.dsv4.vllm_python": str(python)}, HOSTS, ask=lambda *_: [False, True])


def test_what_works_on_this_host_alone_is_refused_elsewhere():
    require_here(HOSTS[:1], "the engine reads files of this host", "unset RAY_ADDRESS")
    with pytest.raises(UserError, match="reads files of this host, but Ray put it on host 10.0.0.3; unset RAY_ADDRESS"):
        require_here(HOSTS[2:], "the engine reads files of this host", "unset RAY_ADDRESS")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"{KEY} is {tmp_path}/file/run: cannot write there \(Not a directory\)"):
        check_shared({KEY: Path(tmp_path / "file" / "run")}, HOSTS, ask=everywhere)
