"""How ranks find each other's host."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy import rendezvous
from nemo_rl_dsv4.policy.rendezvous import FLIGHT_RECORDER, GLOO_INTERFACE, interface_of, join_ranks
from nemo_rl_dsv4.policy.training_state import TrainingStateWriter
from nemo_rl_dsv4.refit.transport.channel import listen


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # nobody's: reserved for documentation
    assert interface_of("a name") is None


@pytest.mark.parametrize(("given", "expected"), [(None, "lo"), ("eth7", "eth7")])
def test_gloo_gets_the_interface_of_rays_address_unless_the_user_says_which(monkeypatch, given, expected):
    """gloo tells its peers what the host's name resolves to: often 127.0.1.1, which no other host can reach."""
    monkeypatch.setenv(GLOO_INTERFACE, given or "")  # so that what is set below is undone
    if given is None:
        monkeypatch.delenv(GLOO_INTERFACE)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: None)
    store = listen("127.0.0.1")
    join_ranks(store, rank=0, world=2, device="cpu", address="127.0.0.1")
    assert os.environ[GLOO_INTERFACE] == expected


@pytest.mark.parametrize(
    ("device", "given", "expected"), [("cpu", None, "0"), ("cpu", "2000", "2000"), ("cuda", None, None)]
)
def test_gloo_ranks_run_without_the_flight_recorder_unless_the_user_asks(monkeypatch, device, given, expected):
    """Its map of groups has no lock, and the writer of training states has a thread of its own."""
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    monkeypatch.setenv(FLIGHT_RECORDER, given or "")  # so that what is set below is undone
    if given is None:
        monkeypatch.delenv(FLIGHT_RECORDER)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: None)
    join_ranks(listen("127.0.0.1"), rank=0, world=2, device=device, address="127.0.0.1")
    assert os.environ.get(FLIGHT_RECORDER) == expected


def test_the_group_of_the_training_state_meets_before_its_thread_uses_it(monkeypatch):
    met = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", lambda backend: f"a {backend} group")
    monkeypatch.setattr(dist, "barrier", lambda group: met.append((group, threading.current_thread())))
    TrainingStateWriter()
    assert met == [("a gloo group", threading.main_thread())]


def test_a_host_that_cannot_be_reached_is_one_line(monkeypatch):
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    monkeypatch.setattr(rendezvous, "SECONDS_TO_MEET", 1.0)
    store = listen("127.0.0.1")
    port = store.port
    del store
    with pytest.raises(UserError, match=rf"policy rank 3 of 8 on host 10.0.0.2 could not meet .* at 127.0.0.1:{port} "):
        join_ranks(("127.0.0.1", port), rank=3, world=8, device="cpu", address="10.0.0.2")
