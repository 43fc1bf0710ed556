"""Export a training checkpoint to the Hugging Face layout: sharded, indexed, quantized as the rollout had it.

Weights are read and encoded one expert or one other tensor at a time. The result is written beside its place, read
back and compared, and appears by one rename; an interrupted export goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.checkpoint.convert import MAX_SHARD_BYTES, RECORD, ConvertReport, check_written
from nemo_rl_dsv4.model.checkpoint.convert_tensor import ScaleLayout, Target, relative_error
from nemo_rl_dsv4.model.checkpoint.folder import copy_other_files, output_config, write_index, write_text
from nemo_rl_dsv4.model.checkpoint.partial_work import PartialWork, check_destination
from nemo_rl_dsv4.model.checkpoint.serving import write_serving_notes
from nemo_rl_dsv4.model.checkpoint.shard_writer import Entry, ShardWriter, cut_into_shards, shard_name
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, Slot
from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind
from nemo_rl_dsv4.model.quantized_weights import StoredCodes
from nemo_rl_dsv4.model.stored_weight import scale_name
from nemo_rl_dsv4.numerics import get_profile, quantize
from nemo_rl_dsv4.policy.export_source import FOLDER, ROLLOUT, ExportSource, read_export_source
from nemo_rl_dsv4.policy.saved_weights import OfficialValues, SavedWeights
from nemo_rl_dsv4.refit.encode import Encoded, Encoder
from nemo_rl_dsv4.refit.source_scales import SourceScales


@dataclass(frozen=True)
class _Weight:
    """One official tensor: where it lies, and what is written."""

    name: str
    slot: Slot
    entries: list[Entry]
    action: str

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


def export_checkpoint(
    policy_folder: Path,
    destination: Path,
    to: Target,
    *,
    source: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_plan: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
) -> ConvertReport:
    """Write the weights of a training checkpoint under official names, with config, tokenizer, index and SERVE.md.

    `fp8` gives the codes and scales that the run's rollout had at that step (`refit.export_weights` under the run's
    profile); what a release keeps in BF16 is BF16. `bf16` gives the weights that the optimizer holds, in BF16: where
    training rounded them for the rollout, these are not the values that the rollout computed with.

    Args:
        policy_folder: `step_N/policy`. Whether its files are whole is for the caller to check, see
            `grpo.checkpoint_files.read_checkpoint`.
        destination: must not exist yet. `.<name>.partial` beside it holds unfinished work.
        to: "bf16" or "fp8".
        source: where the checkpoint that the run started from lies now; default where it was.
        max_shard_bytes: upper bound of a shard.
        on_plan: called once with the number of bytes to write.
        advance: called with the bytes of each tensor as it is written.

    Raises:
        UserError: no or a damaged checkpoint, weights that do not fit the config, a NaN, a run whose rollout does not
            quantize (`fp8`), a folder that exists or cannot be written, or output that does not read back.
    """
    started = time.monotonic()
    policy_folder, destination = Path(policy_folder), Path(destination)
    check_destination(destination, policy_folder.parent)
    saved = SavedWeights(policy_folder)
    noted, config = read_export_source(policy_folder)
    report = ConvertReport(str(policy_folder.parent), str(destination), to)
    encoder = _encoder(noted, to, source, report.notes)
    weights = list(_plan(saved, config, encoder))
    report.actions = dict(Counter(weight.action for weight in weights))
    on_plan(sum(weight.bytes for weight in weights))
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        fingerprint = _fingerprint(saved, weights, [to, max_shard_bytes, report.notes])
        with PartialWork(destination.with_name(f".{destination.name}.partial"), fingerprint) as work:
            _write_shards(
                weights, saved, encoder, work, max_shard_bytes, report, advance, as_training=noted.weights_rounded
            )
            _finish(policy_folder, noted, config, to, encoder, work, report)
            work.move_to(destination)
    except OSError as error:
        raise UserError(f"{destination}: cannot write the checkpoint ({error})") from error
    report.written, report.seconds = True, time.monotonic() - started
    return report


def _encoder(noted: ExportSource, to: Target, source: Path | None, notes: list[str]) -> Encoder:
    if to == "bf16":
        if noted.weights_rounded:
            notes.append(
                "training rounded the weights for its rollout; BF16 holds what the optimizer has, before that rounding "
                "(fp8 gives what the rollout had)"
            )
        return Encoder(get_profile("bf16"))
    profile = get_profile(noted.profile)
    spec = profile.site("linear.weight")
    if spec is None:
        raise UserError(
            f"the run's rollout profile {profile.name} does not quantize weights, so its rollout had no FP8 weights; "
            "export --to bf16, and convert that folder --to fp8"
        )
    scale_dtype = torch.float8_e8m0fnu if spec.scale == "ue8m0" else torch.float32
    encoder = Encoder(profile, scale_dtype=scale_dtype)
    return replace(encoder, source_scales=_source_scales(noted, source, encoder, notes))


def _source_scales(
    noted: ExportSource, source: Path | None, encoder: Encoder, notes: list[str]
) -> Mapping[str, torch.Tensor]:
    """Scales that the run's refit keeps for blocks whose values they still hold exactly."""
    if noted.checkpoint is None:
        return {}
    folder = Path(noted.checkpoint) if source is None else source
    if source is None and not folder.is_dir():
        notes.append(
            f"{folder}, where the run started from, is gone: blocks that training did not change have the same values "
            "under the profile's own scales, not the source's bytes (--source says where it is now)"
        )
        return {}
    checkpoint = check_checkpoint(folder, config_overrides={"num_nextn_predict_layers": 0})
    checkpoint.raise_if_damaged()
    return SourceScales.of_checkpoint(checkpoint, encoder.spec)


def _plan(saved: SavedWeights, config: Mapping[str, Any], encoder: Encoder) -> Iterator[_Weight]:
    """Every official tensor in export order.

    Raises:
        UserError: weights and config do not agree.
    """
    slots, shapes = dict(AUTOMODEL.split(saved.state)), expected_tensors(config)
    missing, extra = sorted(set(shapes) - set(slots)), sorted(set(slots) - set(shapes))
    if missing or extra:
        which = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which config.json does not ask for"
        raise UserError(f"{saved.folder} {which} ({len(missing) + len(extra)} tensors differ); it is damaged")
    for name, shape in shapes.items():
        slot = slots[name]
        value = saved.state[slot.key]
        wanted = AUTOMODEL.stack_shape(shape, slot, config["n_routed_experts"]) if slot.part else shape
        if tuple(value.shape) != tuple(wanted):
            raise UserError(f"{saved.folder}: {slot.key!r} is {list(value.shape)}; config.json wants {list(wanted)}")
        data, scale = encoder.empty(name, torch.Size(shape), torch.device("meta"))
        entries = [Entry(name, data.dtype, tuple(data.shape))]
        if scale is not None:
            entries.append(Entry(scale_name(name), encoder.scale_dtype, tuple(scale.shape)))
        same = value.dtype == data.dtype
        yield _Weight(name, slot, entries, "quantized" if scale is not None else "copied" if same else "rounded")


def _fingerprint(saved: SavedWeights, weights: Iterable[_Weight], settings: list[Any]) -> str:
    files = [(file, (saved.folder / file).stat()) for file in (".metadata", *saved.files)]
    facts = [
        [str(saved.folder.resolve()), *settings],
        [(file, stat.st_size, stat.st_mtime_ns) for file, stat in files],
        [(entry.name, str(entry.dtype), entry.shape) for weight in weights for entry in weight.entries],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _write_shards(
    weights: list[_Weight],
    saved: SavedWeights,
    encoder: Encoder,
    work: PartialWork,
    max_shard_bytes: int,
    report: ConvertReport,
    advance: Callable[[int], None],
    *,
    as_training: bool,
) -> None:
    shards = cut_into_shards(weights, lambda weight: weight.bytes, max_shard_bytes)
    report.shards = len(shards)
    values = OfficialValues(saved, AUTOMODEL)
    for number, members in enumerate(shards):
        file = shard_name(number, len(shards))
        if work.take_over(file):
            report.resumed += 1
            advance(sum(weight.bytes for weight in members))
            continue
        writer = ShardWriter(work.folder / file, [entry for weight in members for entry in weight.entries])
        checksums: dict[str, int] = {}
        try:
            for weight in members:
                value = values.read(weight.slot)
                encoded = _encode(encoder, weight.name, value, as_training)
                for name, tensor in encoder.items(weight.name, encoded, value):
                    checksums[name] = writer.write(name, tensor)
                    if weight.action == "rounded":
                        work.results[name] = [weight.action, relative_error(value.float(), tensor.float())]
                advance(weight.bytes)
        except BaseException:
            writer.abandon()
            raise
        writer.close()
        work.finished(file, checksums)


def _encode(encoder: Encoder, name: str, value: torch.Tensor, as_training: bool) -> Encoded:
    """Encode as the refit does; `as_training`: from the codes that training computed with, which come first there."""
    spec = encoder.spec(name)
    if spec is None or not as_training:
        return encoder.encode(name, value)
    codes = quantize(value, spec, name=name)
    return replace(encoder, stored={name: StoredCodes(codes.data, codes.scale, spec)}).encode(name, value)


def _finish(
    policy_folder: Path,
    noted: ExportSource,
    config: Mapping[str, Any],
    to: Target,
    encoder: Encoder,
    work: PartialWork,
    report: ConvertReport,
) -> None:
    """Write what stands beside the shards, and prove that everything on the disk is what was computed."""
    folder = work.folder
    layout = ScaleLayout()
    if to == "fp8":
        spec = encoder.spec("layers.0.attn.wkv.weight")
        assert spec is not None
        layout = ScaleLayout(".scale", encoder.scale_dtype, spec)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    out = output_config(plain, to, layout)
    expert = encoder.spec("layers.0.ffn.experts.0.w1.weight")
    if expert is not None and expert.fmt == "e2m1":
        out["expert_dtype"] = "fp4"
    write_text(folder / "config.json", json.dumps(out, indent=2) + "\n")
    report.bytes = write_index(folder, {file: list(tensors) for file, tensors in work.shards.items()})
    report.notes += copy_other_files(policy_folder / FOLDER, folder)
    (folder / ROLLOUT).unlink(missing_ok=True)
    for action, error in work.results.values():
        report.errors[action] = max(error, report.errors.get(action, 0.0))
    facts = {
        "source": f"{policy_folder.parent.parent.name}/{policy_folder.parent.name}",
        "started_from": noted.checkpoint,
        "to": to,
        "profile": encoder.profile.name,
        "kinds": dict(Counter(tensor_kind(name) for name in expected_tensors(config))),
        "notes": report.notes,
    }
    write_text(folder / RECORD, json.dumps(facts, indent=1) + "\n")
    write_serving_notes(folder)
    check_written(work)
