"""Actors without a model, in a file of their own: a process that runs one imports little."""

from __future__ import annotations

import os
from typing import Any

import ray


@ray.remote(num_cpus=0)
class Process:
    """Says where it is and what it is shown."""

    def shown(self) -> tuple[str, list[str], dict[str, str]]:
        """Node, names of the GPUs that Ray gave it, and variables of its environment."""
        context = ray.get_runtime_context()
        variables = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "A") if name in os.environ}
        return context.get_node_id(), context.get_accelerator_ids()["GPU"], variables


@ray.remote(num_cpus=0)
class Workers:
    """An engine of one worker, which stages refits as vLLM's workers do."""

    def __init__(self, expected: dict[str, tuple[int, ...]]) -> None:
        self.expected, self.host = expected, ray.get_runtime_context().get_node_id()

    def move(self, host: str) -> None:
        """Say from now on that this is another host."""
        self.host = host

    def seats(self) -> list[Any]:
        from nemo_rl_dsv4.refit.delivery import Seat

        return [Seat(self.host, "cpu")]

    def receive_weights(self, transport: str, addresses: dict[str, Any], version: int) -> dict[str, Any]:
        from nemo_rl_dsv4.refit.transport.broadcast import BroadcastReceiver
        from nemo_rl_dsv4.refit.transport.channel import open_channel
        from nemo_rl_dsv4.refit.transport.protocol import receive_staged
        from nemo_rl_dsv4.refit.transport.shared import Address, SharedReceiver

        (own,) = addresses.values()
        if transport == "broadcast":
            host, port, rank, size = own
            channel = open_channel((host, port), rank=rank, size=size, device="cpu", timeout=60)
            receiver: Any = BroadcastReceiver(channel, version=version)
        else:
            receiver = SharedReceiver(Address(*own), timeout=60)
        staged = receive_staged(receiver, self.expected)
        return {"transport": transport, "sender": str(own[0]), "checksum": staged.checksum}
