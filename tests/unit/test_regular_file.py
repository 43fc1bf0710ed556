"""FIFOs and devices are refused before they are opened, wherever a command reads a file that its user names."""

import os
from pathlib import Path

import pytest

from nemo_rl_dsv4.config import load_config
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.regular_file import require_regular


def test_only_files_and_links_to_files_pass(tmp_path: Path) -> None:
    """Missing files and FIFOs raise, folders are for `open` to refuse."""
    file, link, fifo = tmp_path / "file", tmp_path / "link", tmp_path / "fifo"
    file.write_text("")
    link.symlink_to(file)
    os.mkfifo(fifo)
    for path in (file, link, tmp_path):
        require_regular(path)
    with pytest.raises(FileNotFoundError):
        require_regular(tmp_path / "missing")
    for path, kind in ((fifo, "a FIFO"), (Path("/dev/zero"), "a device")):
        with pytest.raises(OSError, match=f"{kind}, wanted a regular file"):
            require_regular(path)


def test_a_recipe_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    """`--config` of a FIFO, itself or a parent, hung."""
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "recipe.yaml").write_text("defaults: fifo.yaml\n")
    for name in ("fifo.yaml", "recipe.yaml"):
        with pytest.raises(UserError, match=r"fifo.yaml: cannot read a recipe .*FIFO, wanted a regular file"):
            load_config(tmp_path / name)
