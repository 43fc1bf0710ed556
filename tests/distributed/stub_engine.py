"""A rollout engine of one worker without a model, in a file of its own: a process that runs it imports little."""

from __future__ import annotations

from typing import Any

import ray

from nemo_rl_dsv4.refit.delivery import Seat


@ray.remote(num_cpus=0)
class Workers:
    """An engine of one worker, which stages refits as vLLM's workers do."""

    def __init__(self, expected: dict[str, tuple[int, ...]]) -> None:
        self.expected, self.host = expected, ray.get_runtime_context().get_node_id()

    def move(self, host: str) -> None:
        """Say from now on that this is another host."""
        self.host = host

    def seats(self) -> list[Seat]:
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
