"""Weights of one policy version that travel in memory, from training ranks to engine workers of one host.

Nothing is kept beside the policy: an engine that needs them again (it died, or slept) gets them sent again, as long as
the policy still holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.delivery import Transport, plan_delivery
from nemo_rl_dsv4.utils.ray_calls import get

if TYPE_CHECKING:
    from nemo_rl_dsv4.policy.group import PolicyGroup


class SentWeights:
    """What `EngineGroup.update_weights` takes from a `PolicyGroup`.

    Args:
        policy: whose weights.
        transport: `policy.dsv4.refit.transport`, but not `folder`.
        bucket_bytes: size of a bucket.
    """

    def __init__(self, policy: PolicyGroup, transport: Transport, bucket_bytes: int) -> None:
        self._policy, self._bucket_bytes = policy, bucket_bytes
        self._transport: Transport = transport
        self._version, self._updates = policy.version, policy.updates

    def deliver(self, engines: Sequence[Any]) -> list[dict[str, Any]]:
        """Send the weights to all workers of some engines (actors), which commit them together; one report each.

        Raises:
            UserError: the policy has been updated since; no way to the workers; an engine could not stage the weights
                (none has changed then), or was found wrong afterwards.
        """
        policy = self._policy
        if policy.updates != self._updates:
            raise UserError(
                f"an engine needs the weights of version {self._version} again, but the policy has been trained since "
                "and keeps no copy; set policy.dsv4.refit.transport to folder, which does"
            )
        worker_gpus = [name for names in get([engine.gpu_names.remote() for engine in engines]) for name in names]
        rank_gpus = get([rank.gpu_name.remote() for rank in policy.actors])
        delivery = plan_delivery(self._transport, rank_gpus, worker_gpus)
        offers = get(
            [
                rank.open_sender.remote(delivery.transport, receivers, self._bucket_bytes)
                for rank, receivers in zip(policy.actors, delivery.receivers, strict=True)
            ]
        )
        if delivery.transport == "broadcast":
            addresses = {
                gpu: (*offers[delivery.served[worker]][1:], *delivery.place(worker))
                for worker, gpu in enumerate(worker_gpus)
            }
        else:
            addresses = {offer[0]: offer[1:] for offer in offers if offer is not None}
        sending = [
            rank.send_weights.remote(policy.spec.profile, self._version, delivery.transport) for rank in policy.actors
        ]
        receiving = [engine.receive_weights.remote(delivery.transport, addresses, self._version) for engine in engines]
        return _both(sending, receiving)


def _both(sending: list[Any], receiving: list[Any]) -> list[Any]:
    """Results of the engines, once all have answered; else the failure that the others follow from."""
    waiting, failed = [*sending, *receiving], {}
    while waiting:
        (done,), waiting = ray.wait(waiting, num_returns=1)
        try:
            ray.get(done)
        except RayTaskError as error:  # the other ends hear of it from the transport
            failed[done] = error
    # A rank's own error first, then one of an engine, last of those who only heard that others failed.
    told = [ref for ref in (*sending, *receiving) if ref in failed]
    for ref in sorted(told, key=lambda ref: "not committed" in str(failed[ref].cause)):
        get([ref])
    return get(receiving)
