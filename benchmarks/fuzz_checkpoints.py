"""Damage a small checkpoint in thousands of ways: each must be refused with a UserError, or loaded bit for bit.

    python benchmarks/fuzz_checkpoints.py --count 2000 [--seed 0]

Every damage is to the files' structure (headers, index, config, lengths, scales), which readers can detect; flipped
bytes of weights are not, since the format has no checksums. Prints the outcomes by kind of damage and exits 1 if any
damaged checkpoint was loaded wrong or raised anything but a UserError.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL
from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind
from nemo_rl_dsv4.model.release_checkpoint import read_release_checkpoint, write_release_checkpoint
from nemo_rl_dsv4.model.safetensors_file import DTYPES

INDEX = "model.safetensors.index.json"
CONFIG = {
    "model_type": "deepseek_v4",
    "vocab_size": 32,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4],
    "sliding_window": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 16,
    "hc_mult": 2,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
Damage = Callable[[Path, random.Random], None]


def make_checkpoint(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a checkpoint of every tensor format in a few shards; returns what reading it gives."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(CONFIG).items():
        if tensor_kind(name) == "integer":
            value = torch.randint(0, 2, shape, generator=generator)
            value[0] = 1
        else:
            value = torch.randn(shape, generator=generator)
        slot = AUTOMODEL.slot(name)
        if slot.expert is not None and slot.key not in state:
            state[slot.key] = torch.empty(AUTOMODEL.stack_shape(shape, slot, CONFIG["n_routed_experts"]))
        if slot.expert is None:
            state[slot.key] = value
        else:
            AUTOMODEL.view(state[slot.key], slot).copy_(value)
    write_release_checkpoint(state, CONFIG, folder, max_shard_bytes=40_000)
    return read_release_checkpoint(folder)


def _shard(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _header(path: Path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _put_header(path: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _flip(path: Path, rng: random.Random, first: int, last: int) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        content[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def flip_header(folder: Path, rng: random.Random) -> None:
    """Flip bits of a header's JSON."""
    path = _shard(folder, rng)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    _flip(path, rng, 8, 8 + length)


def flip_length(folder: Path, rng: random.Random) -> None:
    """Flip bits of a header's length."""
    _flip(_shard(folder, rng), rng, 0, 8)


def flip_index(folder: Path, rng: random.Random) -> None:
    """Flip bits of the index."""
    _flip(folder / INDEX, rng, 0, (folder / INDEX).stat().st_size)


def flip_config(folder: Path, rng: random.Random) -> None:
    """Flip bits of config.json."""
    _flip(folder / "config.json", rng, 0, (folder / "config.json").stat().st_size)


def truncate(folder: Path, rng: random.Random) -> None:
    """Cut a shard, the index or the config short."""
    path = rng.choice([*sorted(folder.glob("*.safetensors")), folder / INDEX, folder / "config.json"])
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def extend(folder: Path, rng: random.Random) -> None:
    """Append bytes to a shard."""
    path = _shard(folder, rng)
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def _edit_entry(folder: Path, rng: random.Random, change: Callable[[dict, random.Random], None]) -> None:
    path = _shard(folder, rng)
    header, data = _header(path)
    change(header[rng.choice(sorted(set(header) - {"__metadata__"}))], rng)
    _put_header(path, header, data)


def relabel_dtype(folder: Path, rng: random.Random) -> None:
    """Give a tensor another dtype, bytes unchanged."""
    _edit_entry(folder, rng, lambda e, r: e.update(dtype=r.choice([*DTYPES, "F8_E5M2", "BOOL", 7, None, ["F32"]])))


def change_shape(folder: Path, rng: random.Random) -> None:
    """Change a shape in a header, at times to one of the same size."""

    def change(entry: dict, rng: random.Random) -> None:
        shape = list(entry["shape"])
        choice = rng.randrange(5)
        if choice == 0:
            entry["shape"] = shape[::-1]
        elif choice == 1:
            entry["shape"] = [1, *shape]
        elif choice == 2 and shape:
            at = rng.randrange(len(shape))
            entry["shape"][at] = rng.choice([0, 1, -1, shape[at] + 1, 2 * shape[at], 2**63, 1.5, None, "8"])
        elif choice == 3 and len(shape) == 2 and shape[0] % 2 == 0:
            entry["shape"] = [shape[0] // 2, shape[1] * 2]
        else:
            entry["shape"] = rng.choice([[], None, {}, [*shape, 0]])

    _edit_entry(folder, rng, change)


def change_offsets(folder: Path, rng: random.Random) -> None:
    """Move, swap or break a tensor's place."""

    def change(entry: dict, rng: random.Random) -> None:
        begin, end = entry["data_offsets"]
        shift = rng.choice([1, -1, 8, -8, 1000, 2**62])
        entry["data_offsets"] = rng.choice([[begin + shift, end + shift], [end, begin], [begin], [begin, end + shift]])

    _edit_entry(folder, rng, change)


def repeat_key(folder: Path, rng: random.Random) -> None:
    """Name a tensor twice in a header."""
    path = _shard(folder, rng)
    header, data = _header(path)
    name = rng.choice(sorted(set(header) - {"__metadata__"}))
    other = header[rng.choice(sorted(set(header) - {"__metadata__"}))]
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(other)}}}"
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)


def _edit_tensors(folder: Path, rng: random.Random, change: Callable[[dict[str, torch.Tensor], str], object]) -> None:
    path = _shard(folder, rng)
    tensors = load_file(path)
    before = set(tensors)
    change(tensors, rng.choice(sorted(tensors)))
    save_file(tensors, path)
    index = json.loads((folder / INDEX).read_text())
    if rng.random() < 0.7:  # otherwise index and shard disagree
        for name in before - set(tensors):
            del index["weight_map"][name]
        index["weight_map"] |= dict.fromkeys(set(tensors) - before, path.name)
        (folder / INDEX).write_text(json.dumps(index))


def lose_tensor(folder: Path, rng: random.Random) -> None:
    """Leave a tensor out."""
    _edit_tensors(folder, rng, lambda tensors, name: tensors.pop(name))


def rename_tensor(folder: Path, rng: random.Random) -> None:
    """Store a tensor under another name."""
    new = rng.choice(
        ["layers.0.x.weight", "model.{}", "layers.9.attn_norm.weight", "{}_inv", "layers.0.attn.wq_a.bias"]
    )
    _edit_tensors(folder, rng, lambda tensors, name: tensors.update({new.format(name): tensors.pop(name)}))


def add_tensor(folder: Path, rng: random.Random) -> None:
    """Add a tensor that belongs nowhere, or a second scale."""
    names = ["layers.0.attn.wq_a.weight_scale", "layers.1.attn.wq_a.weight_scale_inv", "head.scale", "x", "layers.2.y"]
    _edit_tensors(folder, rng, lambda tensors, _: tensors.update({rng.choice(names): torch.ones(1, 1)}))


def cast_tensor(folder: Path, rng: random.Random) -> None:
    """Store a tensor in a dtype that holds its numbers but may not be what they mean."""
    into = rng.choice([torch.float32, torch.int32, torch.uint8, torch.int8, torch.float64])

    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        value = tensors[name]
        if value.element_size() == 1 and into.itemsize == 1:
            tensors[name] = value.view(into)
        elif value.is_floating_point() == into.is_floating_point and into.itemsize >= 4:
            tensors[name] = value.to(into)

    _edit_tensors(folder, rng, change)


def damage_scale(folder: Path, rng: random.Random) -> None:
    """Give a scale a NaN, zero or uneven element, or another grid."""

    def change(tensors: dict[str, torch.Tensor], _: str) -> None:
        scales = [name for name in tensors if name.endswith(".scale")]
        if not scales:
            return
        name = rng.choice(sorted(scales))
        scale = tensors[name]
        choice = rng.randrange(4)
        if choice < 2:
            scale.view(torch.uint8).view(-1)[0] = (255, 0)[choice]
        elif choice == 2:
            tensors[name] = scale.float() * 0.75
        else:
            tensors[name] = scale.view(torch.uint8).repeat(1, 2).view(scale.dtype)

    _edit_tensors(folder, rng, change)


def move_files(folder: Path, rng: random.Random) -> None:
    """Remove a shard, or exchange two."""
    shards = sorted(folder.glob("*.safetensors"))
    first, second = rng.sample(shards, 2)
    if rng.random() < 0.5:
        first.unlink()
        return
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def edit_index(folder: Path, rng: random.Random) -> None:
    """Drop an entry, point it elsewhere, or break the index's form."""
    index = json.loads((folder / INDEX).read_text())
    name = rng.choice(sorted(index["weight_map"]))
    choice = rng.randrange(4)
    if choice == 0:
        del index["weight_map"][name]
    elif choice == 1:
        index["weight_map"][name] = rng.choice([*index["weight_map"].values(), "../x", "", None, 5, "a" * 300, "\x00"])
    elif choice == 2:
        index["weight_map"]["layers.0.z"] = rng.choice(list(index["weight_map"].values()))
    else:
        index = rng.choice([[], {}, None, {"weight_map": []}, {"weight_map": {}}, 3])
    (folder / INDEX).write_text(json.dumps(index))


DAMAGES: tuple[Damage, ...] = (
    flip_header,
    flip_header,
    flip_header,
    flip_length,
    flip_index,
    flip_config,
    truncate,
    truncate,
    extend,
    relabel_dtype,
    relabel_dtype,
    change_shape,
    change_offsets,
    repeat_key,
    lose_tensor,
    rename_tensor,
    add_tensor,
    cast_tensor,
    damage_scale,
    move_files,
    edit_index,
)


def outcome(folder: Path, wanted: dict[str, torch.Tensor]) -> str:
    """Return "refused", "right", or what went wrong when reading a damaged checkpoint."""
    try:
        found = read_release_checkpoint(folder)
    except UserError:
        return "refused"
    except Exception as error:  # any other exception is what the fuzzing is for
        return f"raised {type(error).__name__}: {error}"
    if set(found) != set(wanted):
        return "loaded other tensors"
    wrong = [key for key, value in wanted.items() if not torch.equal(value, found[key])]
    return f"loaded {wrong[0]} wrong" if wrong else "right"


def fuzz(count: int, seed: int, folder: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """Read `count` damaged checkpoints made in `folder`.

    Returns:
        Outcomes by kind of damage, and a line for each that was neither refused nor right.
    """
    wanted = make_checkpoint(folder / "whole")
    outcomes: dict[str, Counter[str]] = {damage.__name__: Counter() for damage in DAMAGES}
    failures = []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        damage = DAMAGES[number % len(DAMAGES)]
        damaged = Path(shutil.copytree(folder / "whole", folder / "damaged"))
        damage(damaged, rng)
        found = outcome(damaged, wanted)
        outcomes[damage.__name__][found if found in ("refused", "right") else "WRONG"] += 1
        if found not in ("refused", "right"):
            failures.append(f"number {number} ({damage.__name__}): {found}")
        shutil.rmtree(damaged)
    return outcomes, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=at_least(1), default=2000, help="damaged checkpoints (default 2000)")
    parser.add_argument("--seed", type=at_least(0), default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes, failures = fuzz(options.count, options.seed, Path(folder))
    for kind, counts in outcomes.items():
        print(f"{kind:<16}" + "  ".join(f"{word} {counts[word]:>4}" for word in ("refused", "right", "WRONG")))
    total = sum(outcomes.values(), Counter())
    print(f"{options.count} damaged checkpoints: {dict(total)}; {time.monotonic() - started:.0f} s")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(guarded(main))
