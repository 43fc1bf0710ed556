"""Checkpoint reading: throughput over a raw read of the same files, and peak memory over the largest tensor group.

    python benchmarks/checkpoints.py --gigabytes 4 [--folder DIR] [--threads 1]

Writes a synthetic DeepSeek-V4 checkpoint (FP4 experts, FP8 elsewhere, official names, random codes), then measures,
each with the page cache dropped before (the files read once, so that a virtual disk's host has them) and with it warm:
    raw      every byte of every file, in 8 MiB reads
    stored   the streaming reader: every weight and scale, all value checks; what a GPU rank does on its CPU
    decoded  the same, and FP8/FP4 dequantized to BF16 on the CPU
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least, positive

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint, check_checkpoint
from nemo_rl_dsv4.model.checkpoint.folder import FP8_CONFIG, write_index
from nemo_rl_dsv4.model.checkpoint.read_ahead import read_ahead
from nemo_rl_dsv4.model.checkpoint.shard_writer import Entry, ShardWriter, cut_into_shards, shard_name
from nemo_rl_dsv4.model.checkpoint.summary import summarize
from nemo_rl_dsv4.model.checkpoint.values import check_values, decode_tensor, row_pieces
from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind
from nemo_rl_dsv4.model.safetensors_file import ShardReader
from nemo_rl_dsv4.model.stored_weight import scale_grid, scale_name

LAYER_BYTES = 250e6
"""About what one layer of `config` takes."""


def config(layers: int) -> dict[str, Any]:
    """A DeepSeek-V4 of a quarter of the width and experts of V4-Flash."""
    return {
        "model_type": "deepseek_v4",
        "vocab_size": 32768,
        "hidden_size": 2048,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 512,
        "o_lora_rank": 512,
        "o_groups": 8,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hash_layers": min(3, layers),
        "compress_ratios": [(0, 4, 128)[layer % 3] for layer in range(layers)],
        "sliding_window": 128,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 65536,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "quantization_config": FP8_CONFIG,
        "expert_dtype": "fp4",
    }


def _entries(name: str, shape: tuple[int, ...]) -> list[Entry]:
    kind = tensor_kind(name)
    if kind == "expert.weight":
        grid = scale_grid(shape, (1, 32))
        weight = Entry(name, torch.int8, (shape[0], shape[1] // 2))
        return [weight, Entry(scale_name(name), torch.float8_e8m0fnu, grid)]
    if kind == "linear.weight":
        grid = scale_grid(shape, (128, 128))
        return [Entry(name, torch.float8_e4m3fn, shape), Entry(scale_name(name), torch.float8_e8m0fnu, grid)]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "integer": torch.int64}[kind]
    return [Entry(name, dtype, shape)]


def _content(entry: Entry, generator: torch.Generator) -> torch.Tensor:
    if entry.dtype == torch.int64:
        return torch.randint(0, 64, entry.shape, generator=generator)
    if entry.dtype.itemsize > 1:
        return torch.randn(entry.shape, generator=generator).to(entry.dtype)
    low, high = {torch.float8_e8m0fnu: (112, 120), torch.float8_e4m3fn: (0, 0x7F)}.get(entry.dtype, (0, 256))
    return torch.randint(low, high, entry.shape, dtype=torch.uint8, generator=generator).view(entry.dtype)


def write(folder: Path, gigabytes: float) -> None:
    """Write the synthetic checkpoint."""
    settings = config(max(1, round(gigabytes * 1e9 / LAYER_BYTES)))
    groups = [_entries(name, shape) for name, shape in expected_tensors(settings).items()]
    shards = cut_into_shards(groups, lambda group: sum(entry.bytes for entry in group), 10**9)
    generator, written = torch.Generator().manual_seed(0), {}
    for number, members in enumerate(shards):
        entries = [entry for group in members for entry in group]
        file = shard_name(number, len(shards))
        writer = ShardWriter(folder / file, entries)
        for entry in entries:
            writer.write(entry.name, _content(entry, generator))
        writer.close()
        written[file] = [entry.name for entry in entries]
    write_index(folder, written)
    (folder / "config.json").write_text(json.dumps(settings))


def drop_cache(folder: Path) -> None:
    """Ask the kernel to forget the files' pages."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_raw(folder: Path) -> int:
    """Read every byte; returns how many."""
    buffer, total = bytearray(8 << 20), 0
    for path in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(path, os.O_RDONLY)
        position = 0
        while count := os.preadv(descriptor, [buffer], position):
            position += count
        os.close(descriptor)
        total += position
    return total


def read_checkpoint(checked: CheckedCheckpoint, *, decode: bool, threads: int) -> int:
    """Read every weight piece by piece, check or decode it, and drop it; returns the bytes read."""
    assert checked.config is not None
    pieces = [(name, rows) for name in checked.shapes for rows in row_pieces(checked.weights[name])]
    experts = checked.config["n_routed_experts"]
    with ShardReader() as reader:

        def read(piece: tuple[str, tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
            name, (first, last) = piece
            tensor, scale = checked.weights[name], checked.scales.get(name)
            data = reader.read(tensor, (first, last))
            block = 128 if tensor.dtype == torch.float8_e4m3fn else 1
            return data, None if scale is None else reader.read(scale, (first // block, -(-last // block)))

        for (name, rows), (data, scale) in read_ahead(pieces, read, depth=threads, threads=threads):
            if decode:
                decode_tensor(
                    checked.weights[name], data, scale, torch.bfloat16, power_of_two=True, experts=experts, rows=rows
                )
            else:
                check_values(checked.weights[name], data, scale, power_of_two=True, experts=experts, rows=rows)
        return reader.bytes_read


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measured(work: Callable[[], int]) -> tuple[float, float, int]:
    """Run `work`; returns bytes a second, seconds, and bytes of resident memory above the start."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    started = time.monotonic()
    count = work()
    seconds = time.monotonic() - started
    return count / seconds, seconds, max(0, _status("VmHWM") - before)


def extrapolate(stored: float, decoded: float) -> None:
    """Print time and memory of the 284 B model on 16 nodes of 8 ranks, with the formula."""
    experts = 43 * 256 * 3 * 2048 * 4096
    embeddings = 2 * 129280 * 4096
    rest = 284e9 - experts - embeddings
    size = experts * (0.5 + 1 / 32) + rest * (1 + 1 / 128**2) + embeddings * 2
    ranks = 128
    local = 284e9 / ranks * 2
    print("\n284 B parameters (FP4 experts) on 16 nodes x 8 ranks, each rank reading 1/128:")
    print(f"  bytes = experts*(1/2+1/32) + FP8*(1+1/128^2) + embeddings*2 = {size / 1e9:.1f} GB")
    for word, rate in (("codes decoded on the GPU", stored), ("decoded to BF16 on the CPU", decoded)):
        print(f"  seconds = bytes / 128 / {rate / 1e6:,.0f} MB/s a rank = {size / ranks / rate:.1f} ({word})")
    print(f"  storage must then deliver {size / (size / ranks / stored) / 1e9:.0f} GB/s to all ranks together;")
    print(f"  with less, seconds = {size / 1e9:.0f} GB / its rate: {size / 20e9:.0f} s at 20 GB/s")
    print(f"  memory a rank = BF16 parameters 284e9*2/128 = {local / 1e9:.2f} GB + pieces (about 4 x 32 MiB)")


def main() -> int:
    """Write, read and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=positive, default=4.0)
    parser.add_argument("--folder", type=Path, default=None, help="where to write it (default: a temporary folder)")
    parser.add_argument("--threads", type=at_least(1), default=1, help="reading threads")
    options = parser.parse_args()
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder}: no such folder; make it first")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        write(folder, options.gigabytes)
        started = time.monotonic()
        checked = check_checkpoint(folder)
        header_seconds = time.monotonic() - started
        checked.raise_if_damaged()
        summary = summarize(checked)
        group = summary.largest_group_bytes
        print(f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load", end=" ")
        print(f"{os.getloadavg()[0]:.1f}, torch {torch.__version__}")
        print(f"{summary.bytes / 1e9:.2f} GB in {summary.files} files, {len(checked.weights)} weights; largest group")
        print(f"{group / 1e6:.0f} MB (routed experts of one layer); all headers checked in {header_seconds:.2f} s")
        works: dict[str, Callable[[], int]] = {
            "raw": lambda: read_raw(folder),
            "stored": lambda: read_checkpoint(checked, decode=False, threads=options.threads),
            "decoded": lambda: read_checkpoint(checked, decode=True, threads=options.threads),
        }
        rates: dict[tuple[str, str], float] = {}
        for cache in ("cold", "warm"):
            for word, work in works.items():
                if cache == "cold":
                    if word == "raw":  # a virtual disk's host caches too: its first reader must not pay alone
                        read_raw(folder)
                    os.sync()
                    drop_cache(folder)
                rate, seconds, peak = measured(work)
                rates[cache, word] = rate
                print(
                    f"{cache} {word:<8} {rate / 1e6:>8,.0f} MB/s  {rate / rates[cache, 'raw']:.2f} of raw  "
                    f"{seconds:>6.1f} s  peak +{peak / 1e6:>5.0f} MB = {peak / group:.2f} of the largest group"
                )
        extrapolate(rates["warm", "stored"], rates["warm", "decoded"])
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --gigabytes"))
