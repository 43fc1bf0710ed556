"""Conversions and the files around them: work that was cut off, places that cannot be written, links and FIFOs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint import convert as convert_module
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.checkpoint.convert import convert_checkpoint
from nemo_rl_dsv4.model.checkpoint.folder import copy_other_files
from nemo_rl_dsv4.model.checkpoint.partial_work import PartialWork

from .conftest import INDEX


def stop_before(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Interrupt the conversion at the first call of one of its steps."""

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, name, dies)


@pytest.fixture
def unfinished(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`.out.partial` with all shards finished, and nothing else done."""
    with monkeypatch.context() as patch:
        stop_before(patch, "_finish")
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(sharded, tmp_path / "out", "fp8", max_shard_bytes=900_000)
    return tmp_path / ".out.partial"


def test_a_truncated_finished_shard_is_made_again(sharded: Path, unfinished: Path, tmp_path: Path) -> None:
    """A shard that lost its end after it was recorded (a full disk, a crash) stopped every later attempt for good."""
    shards = sorted(unfinished.glob("*.safetensors"))
    os.truncate(shards[0], shards[0].stat().st_size - 5)
    shards[1].unlink()
    report = convert_checkpoint(sharded, tmp_path / "out", "fp8", max_shard_bytes=900_000)
    assert report.written and report.resumed == report.shards - 2 == len(shards) - 2
    assert check_checkpoint(tmp_path / "out").problems == []
    assert not (tmp_path / "out" / "partial.json").exists()


@pytest.mark.parametrize("place", ["folder", "link"])
def test_a_destination_that_appears_meanwhile_costs_no_work(
    sharded: Path, unfinished: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was removed before the rename, so when that failed all shards were converted again."""
    out, real = tmp_path / "out", convert_module.check_written

    def appears(work: PartialWork) -> None:
        real(work)
        out.mkdir() if place == "folder" else out.symlink_to(tmp_path / "nothing")

    monkeypatch.setattr(convert_module, "check_written", appears)
    with pytest.raises(UserError, match="has appeared during the conversion; the finished work is kept in"):
        convert_checkpoint(sharded, out, "fp8", max_shard_bytes=900_000)
    with pytest.raises(UserError, match="out exists already"):
        convert_checkpoint(sharded, out, "fp8", max_shard_bytes=900_000)
    out.rmdir() if place == "folder" else out.unlink()
    monkeypatch.setattr(convert_module, "check_written", real)
    report = convert_checkpoint(sharded, out, "fp8", max_shard_bytes=900_000)
    assert report.written and report.resumed == report.shards


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": "a", "shards": [], "results": {}}'])
def test_a_damaged_record_names_the_folder_to_remove(sharded: Path, tmp_path: Path, text: str) -> None:
    """An empty or foreign partial.json ended in a traceback."""
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "partial.json").write_text(text)
    with pytest.raises(UserError, match=f"cannot be read as the record .* remove {partial} to start it anew"):
        convert_checkpoint(sharded, tmp_path / "out", "fp8")


def test_a_destination_inside_the_source_is_refused(folder: Path, tmp_path: Path) -> None:
    """It was written into the checkpoint that it was made from; a link does not hide that."""
    (tmp_path / "link").symlink_to(folder)
    for place in (folder / "out", tmp_path / "link" / "deep" / "out"):
        with pytest.raises(UserError, match="lies inside"):
            convert_checkpoint(folder, place, "bf16")
    with pytest.raises(UserError, match="has no name of its own"):
        convert_checkpoint(folder, tmp_path / "..", "bf16")


@pytest.mark.parametrize("size", ["inf", "1e300", "nan", "0", "-1", "1e-12"])
def test_impossible_shard_sizes(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """inf and 1e300 were tracebacks."""
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--to", "fp8", f"--shard-gb={size}"]) == 2
    assert "--shard-gb is" in capsys.readouterr().err


def test_links_out_of_the_source_are_not_copied(tmp_path: Path) -> None:
    """A downloaded folder with `notes.txt -> /etc/passwd` put that file into the converted checkpoint."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    (source / "tokenizer.json").write_text("{}")
    (source / "same.json").symlink_to("tokenizer.json")
    (note,) = copy_other_files(source, out)
    assert note.startswith(f"notes.txt is a link to {tmp_path / 'secret'}")
    assert sorted(path.name for path in out.iterdir()) == ["same.json", "tokenizer.json"]


def test_a_snapshot_of_a_hub_cache_is_copied(tmp_path: Path) -> None:
    """All files of a snapshot are links to `blobs` of the same cache."""
    source, out = tmp_path / "model" / "snapshots" / "abc", tmp_path / "out"
    for made in (source, out, tmp_path / "model" / "blobs"):
        made.mkdir(parents=True)
    (tmp_path / "model" / "blobs" / "f00").write_text("{}")
    (source / "tokenizer.json").symlink_to("../../blobs/f00")
    assert copy_other_files(source, out) == []
    assert (out / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["config.json", INDEX, "shard"])
def test_fifos_are_refused_and_links_to_files_are_not(folder: Path, tmp_path: Path, name: str) -> None:
    """inspect, convert and verify-refit waited for ever for a writer."""
    if name == "shard":
        name = min(json.loads((folder / INDEX).read_text())["weight_map"].values())
    path = folder / name
    path.rename(tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    assert check_checkpoint(folder).problems == []
    path.unlink()
    os.mkfifo(path)
    (first, *_) = [p for p in check_checkpoint(folder).problems if p.file == name]
    assert "FIFO, wanted a regular file" in first.message
