"""Buckets as files, for debugging and for engines on another host with a common file system.

`bucket-00000.bin` holds a bucket's bytes and `bucket-00000.json` its manifest. A manifest is written after its bytes
and put in place at once, so what can be seen is whole; the last one says so.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.buckets import write_buckets
from nemo_rl_dsv4.refit.manifest import Manifest
from nemo_rl_dsv4.refit.report import Stream

_POLL_SECONDS = 0.02


def write_folder(
    stream: Stream, folder: Path, *, capacity_bytes: int, version: int, through: torch.device | None = None
) -> int:
    """Write a stream into a folder, which is emptied first; return the number of buckets.

    Args:
        stream: what `export_weights` yields.
        folder: made if it does not exist; anything but buckets in it is an error.
        capacity_bytes: size of a bucket.
        version: policy version.
        through: the GPU that holds the weights; see `scratch` of `write_buckets`.

    Raises:
        UserError: the folder holds other files; a group of tensors is larger than a bucket.
    """
    _empty(folder)
    count = 0
    memory = torch.empty(capacity_bytes, dtype=torch.uint8)
    scratch = None if through is None else torch.empty(capacity_bytes, dtype=torch.uint8, device=through)
    for manifest, buffer in write_buckets(stream, lambda _: memory, version=version, scratch=scratch):
        buffer[: manifest.bytes].numpy().tofile(folder / f"bucket-{manifest.index:05d}.bin")
        part = folder / f"bucket-{manifest.index:05d}.part"
        part.write_text(manifest.to_json(), encoding="utf-8")
        part.rename(folder / f"bucket-{manifest.index:05d}.json")
        count += 1
    return count


def read_folder(folder: Path, *, timeout: float) -> Iterator[tuple[Manifest, torch.Tensor]]:
    """Yield (manifest, uint8 buffer) of each bucket as it appears, to the last.

    Raises:
        UserError: no further bucket for `timeout` seconds, a damaged manifest, or a file shorter than it says.
    """
    index, last = 0, False
    while not last:
        path = folder / f"bucket-{index:05d}.json"
        deadline = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > deadline:
                raise UserError(f"refit: no {path} after {timeout:g} s; the sender has stopped")
            time.sleep(_POLL_SECONDS)
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
        data = np.fromfile(path.with_suffix(".bin"), dtype=np.uint8)
        if data.size < manifest.bytes:
            raise UserError(f"refit: {path} announces {manifest.bytes} bytes; its .bin file has {data.size}")
        yield manifest, torch.from_numpy(data)
        index, last = index + 1, manifest.last


def _empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if not path.name.startswith("bucket-") or path.suffix not in (".bin", ".json", ".part"):
            raise UserError(f"refit: {folder} holds {path.name!r}, which is no bucket; give an empty folder")
        path.unlink()


def remove_folder(folder: Path) -> None:
    """Delete a folder of buckets."""
    shutil.rmtree(folder)
