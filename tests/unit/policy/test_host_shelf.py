"""Tensors whose bytes leave for host memory and come back. On a CPU they leave one part of it for another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy import host_shelf
from nemo_rl_dsv4.policy.host_shelf import HostShelf

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(host_shelf, "_PIECE", 1024)


def tensors():
    generator = torch.Generator().manual_seed(0)
    sizes = [(3,), (40, 30), (0,), (700,), (5, 5)]
    made = [torch.randn(size, generator=generator) for size in sizes]
    made.append(torch.randint(0, 255, (777,), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn))
    return [*made, torch.nn.Parameter(torch.randn(257, dtype=torch.bfloat16, generator=generator))]


def raw(values):
    return [value.detach().clone().view(torch.uint8) for value in values]


def test_everything_comes_back_where_it_was():
    values = tensors()
    view, version = values[1][3:, ::2], values[-1]._version
    before, seen = raw(values), view.clone()
    shelf = HostShelf(lambda: [*values, view], CPU, "weights")
    for _ in range(2):
        assert shelf.to_host() == shelf.parked_bytes == sum(part.numel() for part in before)
        assert all(value.untyped_storage().nbytes() == 0 for value in values)
        shelf.to_device()
        assert shelf.parked_bytes == 0
        assert all(torch.equal(found, wanted) for found, wanted in zip(raw(values), before, strict=True))
        assert torch.equal(view, seen)
    assert values[-1]._version == version  # caches that ask whether a weight has changed find that it has not


def test_what_comes_to_the_device_meanwhile_can_follow():
    first, second = torch.arange(300.0), torch.arange(999.0)
    values = [first]
    shelf = HostShelf(lambda: values, CPU, "weights")
    assert (shelf.to_host(), shelf.to_host()) == (1200, 0)
    values.append(second)
    assert shelf.to_host() == 3996
    shelf.to_device()
    assert torch.equal(first, torch.arange(300.0)) and torch.equal(second, torch.arange(999.0))


def test_memory_of_others_stays():
    array = np.arange(5.0)
    shelf = HostShelf(lambda: [torch.from_numpy(array), torch.empty(4, device="meta")], CPU, "weights")
    assert shelf.to_host() == 0
    assert array[4] == 4


def test_a_host_without_room_changes_nothing(monkeypatch):
    values = tensors()
    before = raw(values)
    shelf = HostShelf(lambda: values, CPU, "optimizer states")
    empty = torch.empty

    def full(*size, **kwargs):
        if kwargs.get("pin_memory") is not None and len(shelf._pieces) == 2:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return empty(*size, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(UserError, match=r"optimizer states of this rank need 0\.0 GiB .*out of memory"):
            shelf.to_host()
    assert all(torch.equal(found, wanted) for found, wanted in zip(raw(values), before, strict=True))
    assert shelf.parked_bytes == 0 and shelf.to_host() > 0
    shelf.to_device()
    assert all(torch.equal(found, wanted) for found, wanted in zip(raw(values), before, strict=True))


def test_what_finds_no_room_on_the_device_is_kept(monkeypatch):
    values = tensors()
    before = raw(values)
    shelf = HostShelf(lambda: values, CPU, "weights")
    everything = shelf.to_host()
    resize, calls = torch.UntypedStorage.resize_, []

    def out_of_memory(self, size):
        calls.append(size)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(self, size)

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            shelf.to_device()
    assert 0 < shelf.parked_bytes < everything
    shelf.to_device()
    assert all(torch.equal(found, wanted) for found, wanted in zip(raw(values), before, strict=True))
