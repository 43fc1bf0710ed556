"""Loading into a model: the values of the reference reader, whatever part of the model a rank holds."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model import safetensors_file
from nemo_rl_dsv4.model.checkpoint import values
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.checkpoint.load import iterate_weights, load_into, total_bytes
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, TRANSFORMERS, Layout
from nemo_rl_dsv4.model.release_checkpoint import read_release_checkpoint

from .conftest import edit_tensor, shard_of

State = dict[str, torch.Tensor]


class Shell(torch.nn.Module):
    """A state dict without a model around it."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *_: Any, **__: Any) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.state


def empty_like(state: State, dtype: torch.dtype = torch.float32) -> State:
    return {
        key: torch.full_like(value, 99, dtype=dtype if value.dtype == torch.float32 else value.dtype)
        for key, value in state.items()
    }


@pytest.fixture(scope="module")
def reference(sharded: Path) -> State:
    return read_release_checkpoint(sharded)


@pytest.mark.parametrize("piece_bytes", [32 * 2**20, 4096])
def test_whole_model(sharded: Path, reference: State, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece a tensor, and in pieces of 128 rows."""
    monkeypatch.setattr(values, "MAX_PIECE_BYTES", piece_bytes)
    model, seen = Shell(empty_like(reference)), []
    report = load_into(model, sharded, advance=seen.append)
    for key, value in model.state.items():
        assert torch.equal(value, reference[key]), key
    assert report.tensors == len(check_checkpoint(sharded).shapes)
    assert sum(seen) == total_bytes(model, check_checkpoint(sharded))
    assert len(seen) > report.tensors if piece_bytes == 4096 else len(seen) == report.tensors


def test_bfloat16_parameters(sharded: Path) -> None:
    wanted = read_release_checkpoint(sharded, dtype=torch.bfloat16)
    model = Shell({key: torch.zeros_like(value) for key, value in wanted.items()})
    load_into(model, sharded)
    for key, value in model.state.items():
        assert torch.equal(value, wanted[key]), key


@pytest.mark.parametrize("layout", [AUTOMODEL, TRANSFORMERS], ids=lambda layout: layout.title)
@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (0, 2), (1, 1)])
def test_regions_tile_every_tensor(layout: Layout, dims: tuple[int, int], sharded: Path) -> None:
    """Cut every model tensor unevenly in three along one dim: the parts, read apart, make up the whole one."""
    plain_dim, stack_dim = dims
    whole = read_release_checkpoint(sharded, layout=layout)
    checked = check_checkpoint(sharded)
    for name in checked.shapes:
        slot = layout.slot(name)
        if slot.expert not in (None, 3) or "layers.2" not in name:
            continue
        tensor = whole[slot.key]
        filled = torch.full_like(tensor, 7)
        dim = stack_dim if slot.part else min(plain_dim, tensor.dim() - 1)
        cuts = [0, tensor.shape[dim] // 3, tensor.shape[dim] // 2, tensor.shape[dim]]
        for first, last in pairwise(cuts):
            offsets = [0] * tensor.dim()
            offsets[dim] = first
            region = layout.region(filled.narrow(dim, first, last - first), offsets, slot, checked.shapes[name])
            if region is None:
                continue
            official = layout.view(tensor, slot)
            part = official[region.rows[0] : region.rows[1]]
            region.target.copy_(part[:, region.cols[0] : region.cols[1]] if part.dim() > 1 else part)
        assert torch.equal(layout.view(filled, slot), layout.view(tensor, slot)), name


def test_continues_where_a_read_failed(folder: Path, reference: State) -> None:
    """A failed read leaves the names that are finished; the next call reads the rest only."""
    shard = shard_of(folder, "layers.3.ffn.experts.2.w1.weight")
    content = shard.read_bytes()
    model, done = Shell(empty_like(reference)), set()
    checked = check_checkpoint(folder)
    shard.write_bytes(content[:-5000])
    with pytest.raises(UserError, match=f"{shard.name}: tensor .* truncated"):
        load_into(model, checked, done=done)
    assert 0 < len(done) < len(checked.shapes)
    shard.write_bytes(content)
    before = len(done)
    assert load_into(model, checked, done=done).tensors == len(checked.shapes) - before
    for key, value in model.state.items():
        assert torch.equal(value, reference[key]), key


def test_a_lost_mount_is_tried_again(sharded: Path, reference: State, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = os.preadv, iter([errno.EIO, errno.ESTALE])

    def flaky(*arguments: Any) -> int:
        number = next(failures, None)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(safetensors_file.os, "preadv", flaky)
    monkeypatch.setattr(safetensors_file.time, "sleep", lambda _: None)
    model = Shell(empty_like(reference))
    assert load_into(model, sharded).retries == 2
    assert torch.equal(model.state["lm_head.weight"], reference["lm_head.weight"])

    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(safetensors_file.os, "preadv", denied)
    with pytest.raises(UserError, match=r"cannot read tensor .* \(Permission denied; tried 1 times"):
        load_into(model, sharded)


def test_wrong_values_are_named_while_loading(folder: Path, reference: State) -> None:
    name = "layers.4.ffn.experts.7.w2.scale"
    edit_tensor(folder, name, lambda s: s.view(torch.uint8).fill_(255).view(torch.float8_e8m0fnu))
    with pytest.raises(UserError, match=r"layers\.4\.ffn\.experts\.7\.w2\.scale\[0, 0\] is nan"):
        load_into(Shell(empty_like(reference)), folder)


def test_model_and_config_must_agree(sharded: Path, reference: State) -> None:
    state = empty_like(reference)
    state["lm_head.weight"] = torch.zeros(161, 128)
    with pytest.raises(UserError, match=r"'lm_head\.weight' is \[161, 128\], but 'head\.weight' makes it \[160, 128\]"):
        load_into(Shell(state), sharded)
    del state["lm_head.weight"]
    with pytest.raises(UserError, match=r"the model has no place for 'head\.weight'"):
        load_into(Shell(state), sharded)
    with pytest.raises(UserError, match="is on the meta device; call materialize"):
        load_into(Shell({key: value.to("meta") for key, value in reference.items()}), sharded)


def test_stored_weights_pass_by_once(sharded: Path) -> None:
    checked = check_checkpoint(sharded)
    names = [name for name, _, _ in iterate_weights(checked)]
    assert names == list(checked.shapes)
    ((_, data, scale),) = iterate_weights(checked, ["layers.1.ffn.experts.3.w1.weight"])
    assert (data.dtype, scale is not None and scale.dtype) == (torch.int8, torch.float8_e8m0fnu)


def test_a_model_built_on_meta_is_the_same_model(sharded: Path, tiny_config: dict[str, Any]) -> None:
    """Rotary frequencies are in no checkpoint and were left uninitialized by `to_empty`."""
    from nemo_rl_dsv4.model.build import build_model, materialize
    from nemo_rl_dsv4.model.checkpoint_format import automodel_config

    models = [build_model(automodel_config(tiny_config), device=torch.device(d), seed=0) for d in ("cpu", "meta")]
    models[0].load_state_dict(read_release_checkpoint(sharded), strict=True)
    materialize(models[1], torch.device("cpu"))
    load_into(models[1], sharded)
    for (name, wanted), (_, found) in zip(models[0].named_buffers(), models[1].named_buffers(), strict=True):
        assert torch.equal(wanted, found), name
    ids = torch.randint(2, 160, (1, 140), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids).logits for model in models]
    assert torch.equal(*logits)
