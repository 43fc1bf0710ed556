"""The three files of a study hold its numbers and its words."""

import json
from pathlib import Path

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.mismatch.measure import Estimate, Mismatch
from nemo_rl_dsv4.mismatch.report import write_study
from nemo_rl_dsv4.mismatch.study import EVERYTHING, NOTHING, Study, Variant, conclusions


def made(k3: float) -> Mismatch:
    return Mismatch(Estimate(k3, 0, k3), Estimate(k3, 0, k3), Estimate(k3, 0, k3), 0.1, 10, 2)


STUDY = Study(
    {"engine": "reference"},
    {"profile": "vllm-hopper & co"},
    (
        Variant(NOTHING, "reference point", made(1e-2)),
        Variant(EVERYTHING, "reference point", made(0.0)),
        Variant("kv", "left out", made(1e-3)),
        Variant("router replay", "replay", made(0.0)),
    ),
    floor=made(2e-3),
    positions=({"first": 0, "last": 3, "tokens": 4, "k3": 0.0, "prob_diff": 0.0},),
    layers=({"layer": 0, "cosine": 1.0, "relative_error": 1e-3},),
)


def test_files_of_a_study(tmp_path: Path) -> None:
    files = write_study(STUDY, tmp_path / "made")
    data = json.loads(files["data"].read_text())
    assert data["variants"][2]["mismatch"]["k3"]["mean"] == 1e-3
    assert data["conclusions"] == conclusions(STUDY)
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    page = files["report"].read_text()
    assert "vllm-hopper &amp; co" in page and "1.000e-03" in page
    assert conclusions(STUDY)[0].split("[")[0].strip() in page
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "mismatch.html",
        "mismatch.json",
        "mismatch.png",
    ]


def test_an_earlier_study_is_kept(tmp_path: Path) -> None:
    first = {name: path.read_bytes() for name, path in write_study(STUDY, tmp_path).items()}
    again = [write_study(STUDY, tmp_path)["earlier"] for _ in range(2)]
    assert again == [tmp_path / "earlier-1", tmp_path / "earlier-2"]
    assert {path.name: path.read_bytes() for path in again[0].iterdir()} == {
        f"mismatch.{ending}": first[name] for name, ending in (("data", "json"), ("plot", "png"), ("report", "html"))
    }


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the study"):
        write_study(STUDY, tmp_path / "file")
