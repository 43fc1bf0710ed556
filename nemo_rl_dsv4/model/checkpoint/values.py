"""Values of stored tensors, and the checks that only values can fail: scales, NaN codes, infinities, expert ids."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint
from nemo_rl_dsv4.model.checkpoint.classes import stored_kind
from nemo_rl_dsv4.model.checkpoint.problems import Problem
from nemo_rl_dsv4.model.safetensors_file import ShardReader, StoredTensor
from nemo_rl_dsv4.model.stored_weight import (
    check_codes,
    check_range,
    decode_scale,
    decode_weight,
    is_quantized,
    require_finite,
    require_table,
    scale_name,
    scale_rows,
)

MAX_PIECE_BYTES = 32 * 2**20
"""Tensors are read in pieces of whole 128-row blocks up to about this size."""


def decode_tensor(
    tensor: StoredTensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    power_of_two: bool,
    experts: int,
    rows: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return stored data as values: tables int64, FP32-class tensors float32, the rest `dtype`.

    Args:
        tensor: where `data`, all of it or some of its rows, comes from.
        data: as stored.
        scale: as stored, of the same rows; None for a tensor without one (an FP8 one then counts as scale 1).
        dtype: of the result, except as said above.
        power_of_two: refuse scales that are not powers of two.
        experts: number of routed experts, which bounds the ids in a hash-routing table.
        rows: which rows of the tensor these are, for messages.

    Raises:
        UserError: an invalid scale, a NaN or infinite element, an id that is no expert.
    """
    where = _place(tensor, rows)
    kind = stored_kind(tensor.name, tensor.dtype)
    if kind == "integer":
        require_table(where, data, experts)
        return data.to(torch.int64)
    if scale is not None:
        return decode_weight(where, data, scale, dtype, power_of_two=power_of_two)
    values = data.to(torch.float32 if kind == "fp32" else dtype)
    require_finite(where, values)
    return values


def _place(tensor: StoredTensor, rows: tuple[int, int] | None) -> str:
    part = rows is not None and tensor.shape and rows != (0, tensor.shape[0])
    return f"{tensor.path}: {tensor.name}" + (f", of rows {rows[0]} to {rows[1] - 1} " if part and rows else "")


def check_values(
    tensor: StoredTensor,
    data: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    power_of_two: bool,
    experts: int,
    rows: tuple[int, int] | None = None,
) -> None:
    """Make the checks of `decode_tensor` without decoding, and refuse values that BF16 cannot hold.

    Args:
        tensor: where `data`, all of it or some of its rows, comes from.
        data: as stored.
        scale: as stored, of the whole tensor; all of it is checked with the first rows.
        power_of_two: refuse scales that are not powers of two.
        experts: number of routed experts.
        rows: which rows `data` is, beginning at a multiple of 128; None for all.

    Raises:
        UserError: as `decode_tensor`, or a product of code and scale beyond the finite numbers of BF16.
    """
    where = _place(tensor, rows)
    if is_quantized(data.dtype):
        check_codes(where, data)
        if scale is not None:
            first = rows[0] if rows else 0
            name = f"{tensor.path}: {scale_name(tensor.name)}"
            if first == 0:
                decode_scale(scale, name=name, power_of_two=power_of_two)
            block = scale_rows(data.dtype)
            part = scale[first // block : -(-(first + data.shape[0]) // block)]
            check_range(where, data, decode_scale(part, name=name, power_of_two=power_of_two))
    elif stored_kind(tensor.name, tensor.dtype) == "integer":
        require_table(where, data, experts)
    else:
        require_finite(where, data)


def row_pieces(tensor: StoredTensor, rows: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    """Cut the rows [first, last) of a tensor, all by default, into pieces that begin at multiples of 128.

    A hash-routing table is one piece: whether it is empty shows only as a whole.
    """
    if not tensor.shape:
        return [(0, 1)]
    first, last = rows or (0, tensor.shape[0])
    if not tensor.dtype.is_floating_point and not is_quantized(tensor.dtype):
        return [(0, tensor.shape[0])]
    row_bytes = max(1, tensor.bytes // max(1, tensor.shape[0]))
    step = max(1, MAX_PIECE_BYTES // row_bytes // 128) * 128
    begin = first // 128 * 128
    return [(max(first, at), min(last, at + step)) for at in range(begin, last, step)]


def deep_problems(checked: CheckedCheckpoint, advance: Callable[[int], None] = lambda _: None) -> list[Problem]:
    """Read everything and return what is wrong with values; `advance` is called with the bytes of each tensor.

    Needs memory for about 100 MiB. Tensors that the header check found wrong are left out.
    """
    assert checked.config is not None
    problems: list[Problem] = []
    wrong = {problem.tensor for problem in checked.problems}
    with ShardReader() as reader:
        for name, tensor in checked.weights.items():
            scale = checked.scales.get(name)
            if name in wrong or (scale is not None and scale.name in wrong):
                continue
            try:
                stored = None if scale is None else reader.read(scale)
                for rows in row_pieces(tensor):
                    data = reader.read(tensor, rows) if tensor.shape else reader.read(tensor)
                    check_values(
                        tensor,
                        data,
                        stored,
                        power_of_two=checked.power_of_two,
                        experts=checked.config["n_routed_experts"],
                        rows=rows,
                    )
            except UserError as error:
                about_scale = scale is not None and f"{scale_name(name)}[" in str(error)
                culprit = scale if about_scale and scale is not None else tensor
                problems.append(Problem(culprit.path.name, culprit.name, str(error)))
            advance(tensor.bytes + (0 if scale is None else scale.bytes))
    return problems
