"""The training policy as a group of Ray actors, one a rank, behind the trainer's `Policy` protocol.

Invariants:
- Rows of a batch go to data-parallel ranks in order and come back in order.
- Every rank makes the same calls in the same order: each method below is one call on every rank.
- Weights leave only through the refit exporter, on rank 0 or on the ranks that share a GPU with an engine worker, after
  all ranks took part in gathering them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.actor import PolicyActor
from nemo_rl_dsv4.policy.sent_weights import SentWeights
from nemo_rl_dsv4.routes import ROUTED_EXPERTS, RouterMode, RouterTally
from nemo_rl_dsv4.utils.hosts import LEAVE_GPUS, Host, Place, host_views, node_addresses, rank_order
from nemo_rl_dsv4.utils.ray_calls import CPU_WORKER_OPTIONS, GPU_WORKER_OPTIONS, get, kill, merged

if TYPE_CHECKING:
    from nemo_rl_dsv4.policy.spec import PolicySpec

SECONDS_BETWEEN_POLLS = 0.1
"""How often a rank is asked whether its checkpoint files are complete."""


class PolicyGroup:
    """Drives a fixed number of ranks.

    The processes start at once and import their libraries while the caller goes on; `build` gives them a model.

    Args:
        world: number of ranks.
        device: `cpu`, or `cuda` for a GPU a rank; `PolicySpec.device` has to say the same.
        hosts: nodes that share the ranks evenly, in the order of the ranks; without any Ray chooses.
        environment: further environment variables of the ranks' processes.
        sees_host: show each rank the GPUs of all ranks of its host instead of its own alone, which UCCL-EP needs.
    """

    def __init__(
        self,
        world: int,
        *,
        device: str = "cpu",
        hosts: Sequence[Host] = (),
        environment: Mapping[str, str] | None = None,
        sees_host: bool = False,
    ) -> None:
        if hosts and world % len(hosts):
            raise UserError(f"{world} policy ranks do not divide over {len(hosts)} hosts; change cluster.num_nodes")
        self.world, self.device, self.version, self.updates = world, device, 0, 0
        self._stopped = threading.Event()
        self._hosts, self._places = tuple(hosts), tuple[Place, ...]()
        self._sees_host = sees_host and device == "cuda"
        variables = {**(environment or {}), **(dict.fromkeys(LEAVE_GPUS, "1") if self._sees_host else {})}
        own = CPU_WORKER_OPTIONS if device == "cpu" else GPU_WORKER_OPTIONS
        self.submitting = threading.RLock()
        """Held while a call is submitted to all ranks: what two threads call reaches every rank in one order."""
        self.actors: list[Any] = []
        for number in range(world):
            host = self._hosts[number * len(hosts) // world].options() if hosts else {}
            self.actors.append(PolicyActor.options(**merged(own, host, variables)).remote(device, self._sees_host))

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each rank runs. The first call numbers the processes by node and GPU, and makes them meet.

        Raises:
            UserError: ranks that cannot reach each other.
        """
        if not self._places:
            self._meet()
        return self._places

    def _meet(self) -> None:
        found = get([actor.place.remote() for actor in self.actors])
        nodes = [host.node for host in self._hosts] or sorted({place.node for place in found})
        order = rank_order(found, nodes)
        self.actors, places = [self.actors[i] for i in order], [found[i] for i in order]
        addresses, first = node_addresses(), self.actors[0]
        of_ranks = [addresses[place.node] for place in places]
        store = (of_ranks[0], get([first.open_store.remote(of_ranks[0])])[0]) if self.world > 1 else None
        everywhere = [place.node for place in places]
        if self._sees_host:
            get([actor.see_host.remote(*view) for actor, view in zip(self.actors, host_views(places), strict=True)])
        get(
            [
                actor.join.remote(rank, self.world, everywhere.count(place.node), address, store)
                for rank, (actor, place, address) in enumerate(zip(self.actors, places, of_ranks, strict=True))
            ]
        )
        self._places = tuple(places)

    def build(
        self, spec: PolicySpec, *, global_batch_size: int, on_load: Callable[[int, int], None] | None = None
    ) -> str:
        """Build the model on every rank, replacing what was there; return the rounding summary.

        Args:
            spec: settings of every rank; its sizes fit this group's number of ranks.
            global_batch_size: sequences of one optimizer step; a rollout batch may hold several.
            on_load: hears, now and then, (bytes read, bytes to read) of rank 0's part of a checkpoint.

        Raises:
            UserError: what was wrong with the checkpoint or the settings, as the rank found it.
        """
        if spec.sizes.world != self.world:
            raise UserError(f"the settings are for {spec.sizes.world} ranks; this group has {self.world}")
        if spec.device != self.device:
            raise UserError(f"the settings are for device {spec.device}; this group's processes have {self.device}")
        self.spec, self.global_batch_size = spec, global_batch_size
        self.updates += 1
        assert len(self.places) == self.world  # they have met
        if on_load is None:
            return get([actor.build.remote(spec) for actor in self.actors])[0]
        from nemo_rl_dsv4.policy.load_board import watched

        with watched(on_load) as (board, watch):
            refs = [actor.build.remote(spec, board if rank == 0 else None) for rank, actor in enumerate(self.actors)]
            watch(refs)
            return get(refs)[0]

    def profile(self) -> str:
        """Name of the rollout profile of the ranks' GPUs.

        Raises:
            UserError: they are of several kinds.
        """
        found = get([actor.profile.remote() for actor in self.actors])
        if len(set(found)) > 1:
            kinds = ", ".join(f"{name}: {found.count(name)} ranks" for name in sorted(set(found)))
            raise UserError(
                f"policy.dsv4.rollout_profile is auto, but the policy's GPUs are of several kinds ({kinds}); run on "
                "nodes of one kind"
            )
        return found[0]

    def install_report(self) -> dict[str, Any]:
        """What was installed on the model, module by module, as JSON values; the same on every rank."""
        return get([self.actors[0].install_report.remote()])[0]

    def _submit(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank with the same arguments."""
        with self.submitting:
            return [getattr(actor, method).remote(*args) for actor in self.actors]

    def _by_data_rank(self, data: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """One slice of the rows for each rank; ranks of one context-parallel group get the same slice."""
        rows, dp, cp = len(data["input_ids"]), self.spec.sizes.dp, self.spec.sizes.cp
        if rows % dp:
            raise UserError(f"a batch of {rows} sequences does not divide over {dp} data-parallel ranks")
        share = rows // dp
        slices = [{k: v[i * share : (i + 1) * share] for k, v in data.items()} for i in range(dp)]
        return [slices[rank // cp] for rank in range(self.spec.sizes.world)]

    def _score(self, method: str, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = len(data["input_ids"])
        names = ["input_ids", "input_lengths"]
        if method == "get_logprobs" and self.spec.router is RouterMode.REPLAY:
            names.append(ROUTED_EXPERTS)
        padded = _pad_rows({k: data[k] for k in names if k in data}, self.spec.sizes.dp)
        shares = self._by_data_rank(padded)
        with self.submitting:
            refs = [getattr(actor, method).remote(part) for actor, part in zip(self.actors, shares, strict=True)]
        parts = get(refs)[:: self.spec.sizes.cp]
        return {key: torch.cat([part[key] for part in parts])[:rows] for key in parts[0]}

    def get_logprobs(self, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`logprobs` float32 [B, S] under the current weights; position 0 and padding are 0.

        With router replay, `routed_experts` of `data` are replayed.
        """
        return self._score("get_logprobs", data)

    def get_reference_policy_logprobs(self, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`reference_logprobs` float32 [B, S] under the initial weights, which choose their experts themselves."""
        return self._score("get_reference_logprobs", data)

    def train(self, data: Mapping[str, torch.Tensor], loss_fn: Any) -> dict[str, Any]:
        """Update on `data` in global batches of `global_batch_size`, one optimizer step each.

        Returns:
            `loss` and `grad_norm`: one value an update; `lr` of the first; `all_mb_metrics`: name -> list over updates,
            ranks and micro-batches; `router`, if the policy replays or compares routes: the tally of all ranks.

        Raises:
            UserError: the batch does not divide into global batches or over ranks.
        """
        rows = len(data["input_ids"])
        if rows % self.global_batch_size:
            raise UserError(
                f"{rows} sequences do not divide into global batches of {self.global_batch_size}; "
                "change policy.train_global_batch_size"
            )
        with self.submitting:
            self.updates += 1
        losses, norms, learning_rates, metrics, routers = [], [], [], [], []
        for start in range(0, rows, self.global_batch_size):
            part = {k: v[start : start + self.global_batch_size] for k, v in data.items()}
            seqs, tokens = _count_trained(part)
            shares = self._by_data_rank(part)
            with self.submitting:
                refs = [
                    actor.train.remote(share, loss_fn, seqs, tokens)
                    for actor, share in zip(self.actors, shares, strict=True)
                ]
            of_all_ranks = get(refs)
            routers += [out["router"] for out in of_all_ranks if "router" in out]
            outputs = of_all_ranks[:: self.spec.sizes.cp]
            losses.append(sum(out["loss"] for out in outputs))
            norms.append(outputs[0]["grad_norm"])
            learning_rates.append(outputs[0]["lr"])
            metrics += [mb for out in outputs for mb in out["all_mb_metrics"]]
        result = {
            "loss": torch.tensor(losses),
            "grad_norm": torch.tensor(norms),
            "lr": learning_rates[0],
            "all_mb_metrics": _collect(metrics, updates=rows // self.global_batch_size),
        }
        return result | {"router": RouterTally.total(routers)} if routers else result

    def export_to(self, generation: Any) -> dict[str, float]:
        """Send the current weights to the rollout engine; returns what to log under `refit/`."""
        started = time.perf_counter()
        self.version += 1
        profile = self.spec.profile
        if getattr(generation, "transport", "folder") != "folder":
            self.sleep(optimizer_only=True)  # engines that sleep take their weights first
            report = generation.update_weights(SentWeights(self, generation.transport, generation.bucket_bytes))
        elif hasattr(generation, "bucket_folder"):
            folder = str(generation.bucket_folder(self.version))
            capacity = generation.bucket_bytes
            self.sleep(optimizer_only=True)
            get(self._submit("export_to_folder", profile, folder, capacity, self.version))
            self.sleep()
            report = generation.update_weights(folder)
        else:
            refs = self._submit("export", profile)
            get(refs[1:])
            self.sleep()
            report = generation.update_weights(refs[0])
        return {**report, "seconds": time.perf_counter() - started}

    def sleep(self, *, optimizer_only: bool = False) -> None:
        """Move what the ranks keep on their GPUs to host memory, where the settings say so (`trainer_sleep`).

        Optimizer states stay there until the next update or checkpoint, the rest until the next call that needs it.

        Args:
            optimizer_only: before a refit, which sends weights.

        Raises:
            UserError: no host memory for it.
        """
        if self.spec.trainer_sleep:
            get(self._submit("sleep", optimizer_only))

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors under AutoModel's names."""
        return get(self._submit("full_state_dict"))[0]

    def prepare_for_training(self) -> None:
        """Nothing to wake: what left for a rollout (`sleep`) comes back when a call needs it."""

    def finish_training(self) -> None:
        """Leave the GPUs' unused memory to the rollout engines; on a CPU there is nothing to do."""
        if self.device == "cuda":
            get(self._submit("release_memory"))

    def save_checkpoint(self, folder: Path) -> Callable[[], dict[str, str]]:
        """Copy weights, optimizer, schedule and random state on every rank, and begin to write them into `folder`.

        Config and tokenizer of the checkpoint that the run started from go beside them (`policy.export_source`).

        Returns:
            A function that waits until every rank's files are complete, and returns their SHA-256 by name. Other calls
            may be made meanwhile, from other threads too: ranks are asked, never held up.
        """
        from nemo_rl_dsv4.policy.export_source import write_export_source

        get(self._submit("start_checkpoint", str(Path(folder).resolve())))
        write_export_source(folder, self.spec.export_source, self.spec.hf_config or {}, self.spec.config_overrides)

        def finish() -> dict[str, str]:
            digests: dict[str, str] = {}
            for actor in self.actors:
                while not self._stopped.is_set():
                    found = get([actor.finish_checkpoint.remote()])[0]
                    if found is not None:
                        digests |= found
                        break
                    self._stopped.wait(SECONDS_BETWEEN_POLLS)
                else:
                    raise UserError(f"{folder} was not complete when the run was stopped; it is removed")
            return digests

        return finish

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what `save_checkpoint` wrote."""
        with self.submitting:
            self.updates += 1
            refs = self._submit("load_checkpoint", str(Path(folder).resolve()))
        get(refs)

    def abandon_checkpoint(self) -> None:
        """Give up a checkpoint that is being written: whoever waits for it gets a `UserError`. Ends checkpointing."""
        self._stopped.set()

    def shutdown(self) -> None:
        """End the processes."""
        self.abandon_checkpoint()
        kill(self.actors)


def _pad_rows(data: dict[str, torch.Tensor], multiple: int) -> dict[str, torch.Tensor]:
    """Repeat the last row until the number of rows is a multiple of `multiple`."""
    missing = -len(data["input_ids"]) % multiple
    return data if missing == 0 else {k: torch.cat([v, v[-1:].expand(missing, *v.shape[1:])]) for k, v in data.items()}


def _count_trained(data: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Sequences and predicted tokens that count in a global batch; the first token of a row is never predicted."""
    tokens = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    return float(data["sample_mask"].sum()), float(tokens.sum())


def _collect(metrics: list[dict[str, float]], updates: int) -> dict[str, list[float]]:
    """[{name: value}] of micro-batches to {name: [value]}.

    The loop sums over the list. With several updates a step the values are divided first, so that the sum is the mean
    over updates; smallest and largest values are not.
    """
    collected: dict[str, list[float]] = {}
    for part in metrics:
        for name, value in part.items():
            extreme = name.endswith(("_min", "_max"))
            collected.setdefault(name, []).append(value if extreme else value / updates)
    return collected
