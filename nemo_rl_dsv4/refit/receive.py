"""Load an exported stream into a live model, in place, and account for every parameter."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import TRANSFORMERS, Layout
from nemo_rl_dsv4.model.official_names import check_names, tensor_kind
from nemo_rl_dsv4.model.stored_weight import (
    decode_weight,
    is_quantized,
    require_finite,
    require_table,
    scale_name,
)
from nemo_rl_dsv4.refit.report import Checks, RefitReport, Stream, StreamTally, checked_names


@torch.no_grad()
def receive_weights(
    model: torch.nn.Module,
    stream: Stream,
    *,
    layout: Layout = TRANSFORMERS,
    checksum: str | None = None,
    checks: Checks = "sampled",
    version: int | None = None,
) -> RefitReport:
    """Write every tensor of a stream into the model's own storage and return what arrived.

    Nothing is written before the whole stream has been checked, so an error leaves the model on its old weights. That
    takes memory for the decoded weights once more: for models of a CPU, not for a live FP8 engine (`refit.live`).

    Parameters and persistent buffers keep their storage (`data_ptr`), so anything that holds a reference sees the new
    weights. FP8 and FP4 weights are decoded to the dtype of their destination. Call it once a refit with the whole
    stream, all buckets chained: completeness is judged at its end.

    Args:
        model: transformers' `DeepseekV4ForCausalLM` (or AutoModel's, with its `layout`).
        stream: what `export_weights` yields: official names, a quantized weight directly before its scale.
        layout: whose names the model has.
        checksum: what the sender computed over the stream; None is not compared.
        checks: weights compared with what was sent once all are written: some, drawn by their checksum, or all. What
            differs is a finding of the report.
        version: policy version, for the report.

    Raises:
        UserError: an unknown, repeated or missing tensor, a wrong shape or dtype, a weight without its scale or the
            reverse, an invalid scale, a NaN, an all-zero hash table, another checksum than the sender's.
    """
    started = time.perf_counter()
    destination = model.state_dict()
    slots = dict(layout.split(destination))
    experts = 1 + max(slot.expert or 0 for slot in slots.values())
    pending: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    tally = StreamTally()
    items = tally.watch(stream)
    for name, tensor in items:
        if name not in slots:
            hint = (
                "a scale must come directly after its FP8 or FP4 weight"
                if name.endswith(".scale")
                else "not in the model"
            )
            raise UserError(f"refit: unexpected tensor {name!r}; {hint}")
        if name in pending:
            raise UserError(f"refit: tensor {name!r} arrived twice; send each one once a refit")
        target = layout.view(destination[slots[name].key], slots[name])
        if is_quantized(tensor.dtype) and tensor_kind(name) != "integer":
            scale_item = next(items, ("nothing", None))
            if scale_item[0] != scale_name(name) or scale_item[1] is None:
                raise UserError(
                    f"refit: {name!r} is {tensor.dtype} and {scale_item[0]!r} follows; wanted {scale_name(name)!r}"
                )
            tensor = decode_weight(name, tensor, scale_item[1], target.dtype)
        else:
            _check_plain(name, tensor, target, experts)
        if _never_zero(name) and not bool(tensor.any()):
            raise UserError(f"refit: {name!r} is all zero; a weight of this kind never is, so it was not filled")
        if tensor.shape != target.shape:
            raise UserError(f"refit: {name!r} is {list(tensor.shape)}; the model wants {list(target.shape)}")
        pending[name] = (target, tensor)
    check_names(pending, slots, "refit")
    report = tally.report()
    if checksum is not None and report.checksum != checksum:
        raise UserError(
            f"refit: the engine received checksum {report.checksum}, the policy sent {checksum}; weights were "
            "changed on the way"
        )
    received = time.perf_counter()
    for target, tensor in pending.values():
        target.copy_(tensor)
    written = time.perf_counter()
    names = checked_names(list(pending), checks, int(report.checksum, 16))
    wrong = [name for name in names if not _holds(*pending[name])]
    phases = {"receive": received - started, "load": written - received, "verify": time.perf_counter() - written}
    return replace(
        report,
        seconds=sum(phases.values()),
        version=version,
        phases=phases,
        phase_bytes={"receive": report.bytes, "verify": sum(pending[name][0].nbytes for name in names)},
        findings=tuple(f"{name}: the engine computes with other values than were sent" for name in wrong),
    )


def _holds(target: torch.Tensor, sent: torch.Tensor) -> bool:
    """Whether an engine's tensor has the values that were written to it; another one may share its memory."""
    return torch.equal(target, sent.to(target.dtype))


def _never_zero(name: str) -> bool:
    """Norms, embedding, head and quantized weights; sinks, position tables and biases may well be zero."""
    return "norm" in name or name in ("embed.weight", "head.weight") or tensor_kind(name).endswith(".weight")


def _check_plain(name: str, tensor: torch.Tensor, target: torch.Tensor, experts: int) -> None:
    if tensor.is_floating_point() != target.is_floating_point():
        raise UserError(f"refit: {name!r} is {tensor.dtype}; the model holds {target.dtype}")
    if tensor.is_floating_point():
        require_finite(name, tensor)
    else:
        require_table(name, tensor, experts)
