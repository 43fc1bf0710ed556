"""requirements.lock: exact versions and hashes, no addresses."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("lock_script", ROOT / "scripts" / "lock.py")
assert _spec is not None and _spec.loader is not None
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)

PIN, HASH = "numpy==2.3.1 ; sys_platform == 'linux' \\", "    --hash=sha256:" + "0" * 64


def test_the_committed_lock_is_well_formed_and_fits_pyproject():
    text = (ROOT / "requirements.lock").read_text()
    assert lock.problems(text) == []
    assert lock.mismatches(text, (ROOT / "pyproject.toml").read_text()) == []
    assert "torch==2.11.0" in text


def test_a_good_line_pair_passes():
    assert lock.problems(f"# made by a script\n{PIN}\n{HASH} \\\n{HASH}\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://somewhere/simple",
        "--find-links /opt/wheels",
        "torch @ https://somewhere/torch.whl",
        "numpy==2.3.1+https://somewhere",
        "-e .",
        "./wheels/numpy.whl",
        "numpy>=2.3",
        "# from https://somewhere",
    ],
)
def test_an_address_or_a_loose_version_is_found(line):
    assert lock.problems(f"{PIN}\n{HASH}\n{line}\n{HASH}\n") != []


def test_a_pin_without_hash_is_found():
    assert lock.problems(f"{PIN}\n{PIN}\n{HASH}\n") == ["line 1: numpy has no hash"]
    assert lock.problems(f"{PIN}\n{HASH}\n{PIN}\n") == ["the last pin, numpy, has no hash"]


def test_a_version_that_pyproject_does_not_pin_is_found():
    pyproject = (
        '[project]\ndependencies = ["numpy==2.0.0", "rich>=14"]\n[dependency-groups]\ntrain = []\ntest = []\ndev = []\n'
    )
    assert lock.mismatches(f"{PIN}\n{HASH}\n", pyproject) == ["pyproject.toml pins numpy==2.0.0, the lock has 2.3.1"]
