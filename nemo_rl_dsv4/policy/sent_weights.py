"""Weights of one policy version that travel in memory, from training ranks to engine workers.

Nothing is kept beside the policy: an engine that needs them again (it died, or slept) gets them sent again, as long as
the policy still holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.delivery import Delivery, Seat, Transport, plan_delivery
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
        self._check_held()
        policy.sleep(optimizer_only=True)
        ranks = get([rank.seat.remote() for rank in policy.actors])
        of_engines = get([engine.seats.remote() for engine in engines])
        delivery = plan_delivery(self._transport, ranks, [seat for seats in of_engines for seat in seats])
        offers = get(
            [
                rank.open_sender.remote(delivery.transport, receivers, self._bucket_bytes)
                for rank, receivers in zip(policy.actors, delivery.receivers, strict=True)
            ]
        )
        with policy.submitting:
            self._check_held()  # the ranks may have begun an update while they were asked
            sending = [rank.send_weights.remote(policy.spec.profile, self._version) for rank in policy.actors]
        receiving = [
            engine.receive_weights.remote(delivery.transport, addresses, self._version)
            for engine, addresses in zip(engines, _addresses(delivery, offers, of_engines), strict=True)
        ]
        reports = _both(sending, receiving)
        policy.sleep()  # an engine that woke for this takes its KV pool next
        return reports

    def _check_held(self) -> None:
        if self._policy.updates != self._updates:
            raise UserError(
                f"an engine needs the weights of version {self._version} again, but the policy has been trained since "
                "and keeps no copy; set policy.dsv4.refit.transport to folder, which does"
            )


def _addresses(
    delivery: Delivery, offers: Sequence[Any], of_engines: Sequence[Sequence[Seat]]
) -> Iterator[dict[str, tuple[Any, ...]]]:
    """For each engine, GPU name of each of its workers -> what that worker needs of its sender.

    Through memory that is a socket and a key; by broadcast host and port of the sender's store, the worker's rank there
    and the number of ends. Workers of one engine that share a sender's socket (host memory) need it once.
    """
    worker = 0
    for seats in of_engines:
        addresses: dict[str, tuple[Any, ...]] = {}
        for seat in seats:
            offer = offers[delivery.served[worker]]
            addresses[seat.gpu] = (*offer, *delivery.place(worker)) if delivery.transport == "broadcast" else offer
            worker += 1
        if delivery.transport == "shared_memory":
            addresses = dict(list(addresses.items())[:1])
        yield addresses


def _both(sending: list[Any], receiving: list[Any]) -> list[Any]:
    """Results of the engines, once all have answered; else the failure that the others follow from."""
    waiting, failed = [*sending, *receiving], {}
    while waiting:
        (done,), waiting = ray.wait(waiting, num_returns=1)
        try:
            ray.get(done)
        except (RayTaskError, RayActorError) as error:  # the other ends hear of it from the transport
            failed[done] = error
    # A process that died first; then a rank's own error, then one of an engine, last of those who only heard of others.
    told = [ref for ref in (*sending, *receiving) if ref in failed]
    for ref in sorted(told, key=lambda ref: _rank_of_failure(failed[ref])):
        get([ref])
    return get(receiving)


def _rank_of_failure(error: Exception) -> int:
    """The lower, the nearer to what went wrong."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if "not committed" in str(getattr(error, "cause", "")) else 1
