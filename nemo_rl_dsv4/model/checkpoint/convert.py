"""Convert a checkpoint to BF16 or FP8, one tensor in memory at a time.

The result is written beside its place, read back and compared, and appears by one rename. An interrupted conversion
goes on where it stopped: finished shards are kept with the checksums of their tensors.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint, check_checkpoint
from nemo_rl_dsv4.model.checkpoint.convert_tensor import (
    Planned,
    ScaleLayout,
    Target,
    convert_tensor,
    plan_tensor,
    scale_layout,
)
from nemo_rl_dsv4.model.checkpoint.folder import copy_other_files, output_config, write_index, write_text
from nemo_rl_dsv4.model.checkpoint.partial_work import PartialWork, check_destination
from nemo_rl_dsv4.model.checkpoint.read_ahead import read_ahead
from nemo_rl_dsv4.model.checkpoint.serving import write_serving_notes
from nemo_rl_dsv4.model.checkpoint.shard_writer import ShardWriter, bytes_of, cut_into_shards, shard_name
from nemo_rl_dsv4.model.safetensors_file import ShardReader, read_header

RECORD = "conversion.json"
MAX_SHARD_BYTES = 5 * 10**9


@dataclass
class ConvertReport:
    """What a conversion did.

    Attributes:
        actions: number of weights by action, see `convert_tensor`.
        lossy: {weight: relative error} of weights that do not have their old values, requantized and rounded ones.
        errors: largest relative error by action.
        dropped: `mtp.` weights left out because the config turns multi-token prediction off.
        written: whether the output is there; False where only `lossy` speaks against it.
        resumed: shards taken over from an interrupted conversion.
        notes: what a reader of the output has to know.
    """

    source: str
    destination: str
    to: str
    written: bool = False
    actions: dict[str, int] = field(default_factory=dict)
    lossy: dict[str, float | None] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    dropped: int = 0
    shards: int = 0
    resumed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def convert_checkpoint(
    source: Path,
    destination: Path,
    to: Target,
    *,
    allow_lossy: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_plan: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
) -> ConvertReport:
    """Write `source` as BF16 or FP8 under the same names.

    FP8 weights stay as they are, codes and scales, when FP8 is wanted; FP4 becomes FP8 with the same values where the
    range of its scales allows; new scales have the layout of the checkpoint's own. Plain tensors keep their bytes.
    Peak memory is two tensors and the float32 values of one.

    Args:
        source: a checkpoint of any public form.
        destination: must not exist yet, nor lie inside `source`. `.<name>.partial` beside it holds unfinished work.
        to: "bf16" or "fp8".
        allow_lossy: quantize anew, with a loss, FP4 weights that FP8 cannot hold. Otherwise nothing is written when
            there are any, and the report names them.
        max_shard_bytes: upper bound of a shard.
        on_plan: called once with the number of bytes to read.
        advance: called with the stored bytes of each weight, read first and verified later.

    Raises:
        UserError: a damaged source, a folder that exists or cannot be written, or output that does not read back.
    """
    started = time.monotonic()
    source, destination = Path(source), Path(destination)
    if to not in ("bf16", "fp8"):
        raise UserError(f"conversion to {to!r}; wanted bf16 or fp8")
    check_destination(destination, source)
    checked = check_checkpoint(source, for_training=False)
    checked.raise_if_damaged()
    assert checked.config is not None
    keep_mtp = checked.config.get("num_nextn_predict_layers", 0) > 0
    names = [*checked.shapes, *(checked.mtp_names if keep_mtp else [])]
    layout = scale_layout(checked)
    with ShardReader() as reader:
        plan = [plan_tensor(checked, name, to, layout, reader) for name in names]
    report = ConvertReport(str(source), str(destination), to, dropped=0 if keep_mtp else len(checked.mtp_names))
    report.actions = dict(Counter(planned.action for planned in plan))
    lossy = [planned.source.name for planned in plan if planned.action == "requantized"]
    if lossy and not allow_lossy:
        report.lossy = dict.fromkeys(lossy)
        return report
    on_plan(sum(planned.source.bytes for planned in plan))
    partial = destination.with_name(f".{destination.name}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with PartialWork(partial, _fingerprint(checked, plan, to, max_shard_bytes)) as work:
            _write_shards(plan, checked, layout, work, max_shard_bytes, report, advance)
            _finish(checked, to, layout, work, report)
            work.move_to(destination)
    except OSError as error:
        raise UserError(f"{destination}: cannot write the checkpoint ({error})") from error
    report.written, report.seconds = True, time.monotonic() - started
    return report


def _fingerprint(checked: CheckedCheckpoint, plan: list[Planned], to: str, max_shard_bytes: int) -> str:
    files = [(file, (checked.directory / file).stat()) for file in (*checked.shards.files, "config.json")]
    facts = [
        [str(checked.directory.resolve()), to, max_shard_bytes],
        [(file, stat.st_size, stat.st_mtime_ns) for file, stat in files],
        [(p.action, [(e.name, str(e.dtype), e.shape) for e in p.entries]) for p in plan],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write_shards(
    plan: list[Planned],
    checked: CheckedCheckpoint,
    layout: ScaleLayout,
    work: PartialWork,
    max_shard_bytes: int,
    report: ConvertReport,
    advance: Callable[[int], None],
) -> None:
    assert checked.config is not None
    shards = cut_into_shards(plan, lambda planned: planned.bytes, max_shard_bytes)
    report.shards = len(shards)
    with ShardReader() as reader:

        def read(planned: Planned) -> tuple[torch.Tensor, torch.Tensor | None]:
            scale = planned.source_scale
            return reader.read(planned.source), None if scale is None else reader.read(scale)

        for number, members in enumerate(shards):
            file = shard_name(number, len(shards))
            if work.take_over(file):
                report.resumed += 1
                advance(sum(planned.source.bytes for planned in members))
                continue
            writer = ShardWriter(work.folder / file, [entry for planned in members for entry in planned.entries])
            checksums: dict[str, int] = {}
            try:
                for planned, (data, scale) in read_ahead(members, read):
                    out, out_scale, error = convert_tensor(
                        planned,
                        data,
                        scale,
                        layout,
                        power_of_two=checked.power_of_two,
                        experts=checked.config["n_routed_experts"],
                    )
                    checksums[planned.weight.name] = writer.write(planned.weight.name, out)
                    if planned.scale is not None and out_scale is not None:
                        checksums[planned.scale.name] = writer.write(planned.scale.name, out_scale)
                    work.results[planned.source.name] = [planned.action, error]
                    advance(planned.source.bytes)
            except BaseException:
                writer.abandon()
                raise
            writer.close()
            work.finished(file, checksums)


def _finish(
    checked: CheckedCheckpoint, to: Target, layout: ScaleLayout, work: PartialWork, report: ConvertReport
) -> None:
    """Write what stands beside the shards, and prove that everything on the disk is what was computed."""
    folder = work.folder
    assert checked.config is not None
    config = json.loads((checked.directory / "config.json").read_text(encoding="utf-8"))
    write_text(folder / "config.json", json.dumps(output_config(config, to, layout), indent=2) + "\n")
    report.bytes = write_index(folder, {file: list(tensors) for file, tensors in work.shards.items()})
    report.notes += copy_other_files(checked.directory, folder)
    for name, (action, error) in work.results.items():
        if error:
            report.errors[action] = max(error, report.errors.get(action, 0.0))
        if action == "requantized" or (error and action in ("rounded", "dequantized")):
            report.lossy[name] = error
    facts = {"source": checked.directory.name, "to": to, "weights": work.results}
    write_text(folder / RECORD, json.dumps(facts, indent=1) + "\n")
    write_serving_notes(folder)
    check_written(work)


def check_written(work: PartialWork) -> None:
    """Check the finished folder as any checkpoint, and every tensor against its checksum.

    Raises:
        UserError: something is not what was written; the shard is not counted as finished any more.
    """
    folder = work.folder
    check_checkpoint(folder, for_training=False).raise_if_damaged()
    with ShardReader() as reader:
        for file, checksums in work.shards.items():
            for name, tensor in read_header(folder / file).items():
                if zlib.crc32(bytes_of(reader.read(tensor))) != checksums[name]:
                    work.shards.pop(file)
                    work.save()
                    raise UserError(
                        f"{folder / file}: tensor {name!r} does not read back as it was written; check the disk, then "
                        "run the conversion again (other shards are kept)"
                    )
