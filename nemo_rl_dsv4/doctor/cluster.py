"""The doctor on every node of a Ray cluster: one actor a node."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl_dsv4.doctor.node import Node, pins
from nemo_rl_dsv4.doctor.rules import (
    Finding,
    Wanted,
    clock_finding,
    cluster_findings,
    node_findings,
    token_finding,
)
from nemo_rl_dsv4.errors import UserError

TOKEN_PREFIX = ".nemo-rl-dsv4-doctor-"


@contextlib.contextmanager
def connected(address: str, environment: dict[str, str]) -> Iterator[None]:
    """Joins a running Ray cluster for the time of the block.

    Raises:
        UserError: no cluster answers there.
    """
    try:
        _require_listener(address)
        ray.init(
            address=address,
            namespace="nemo-rl-dsv4-doctor",
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": environment},
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--address {address}: no Ray cluster answers ({reason}); start one (scripts/slurm/ray_cluster.sbatch, "
            "docs/cluster.md), or leave --address out to check this machine alone"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raises OSError where nothing listens at host:port: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10):
            pass


def examine_cluster(
    wanted: Wanted, seconds: float, on_node: Callable[[str], None] = lambda _: None
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Facts of all nodes of the cluster that this process has joined, and what is wrong with them.

    Args:
        wanted: what a recipe asks for.
        seconds: patience with a node.
        on_node: told the address of each node that has answered.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    actor = ray.remote(num_cpus=0)(Node)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    actors = {
        node["NodeID"]: actor.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in alive
    }
    findings, facts = [], {}
    asked = {name: handle.describe.remote(wanted.vllm_python) for name, handle in actors.items()}
    deadline = time.monotonic() + seconds
    for name, reference in asked.items():
        address = addresses[name]
        try:
            facts[name] = ray.get(reference, timeout=max(deadline - time.monotonic(), 0.1))
            on_node(address)
        except GetTimeoutError:
            fix = "look at Ray's logs on the node (/tmp/ray/session_latest/logs), or give --timeout"
            findings.append(Finding("answer", "problem", address, f"does not answer within {seconds:.0f} s", fix))
        except RayError as error:
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            fix = "install the same environment there, or mount it at the same path"
            findings.append(Finding("answer", "problem", address, f"the doctor cannot run there: {reason}", fix))
    own_pins = pins()
    for name in facts:
        findings += node_findings(facts[name], wanted, own_pins)
        findings.append(_clock(facts[name]["host"], actors[name]))
    findings += _shared_cache(facts, actors)
    findings += cluster_findings(list(facts.values()), wanted)
    return list(facts.values()), findings


def _clock(host: str, actor: Any) -> Finding:
    """The best of three answers: the one with the shortest way."""
    tries = []
    for _ in range(3):
        before = time.time()
        there: Any = ray.get(actor.now.remote())
        after = time.time()
        tries.append(((after - before) / 2, there - (before + after) / 2))
    uncertainty, offset = min(tries)
    return clock_finding(host, offset, uncertainty)


def _shared_cache(facts: dict[str, dict[str, Any]], actors: dict[str, Any]) -> Iterator[Finding]:
    """The first node writes a token into its cache folder; the others look for it in theirs."""
    usable = [name for name, fact in facts.items() if fact["cache"]["error"] is None]
    if len(usable) < 2:
        return
    writer, text = usable[0], uuid.uuid4().hex
    file = f"{TOKEN_PREFIX}{text}"
    if ray.get(actors[writer].write_token.remote(file, text)) is not None:
        return  # the finding on HF_HOME says so
    try:
        for name in usable[1:]:
            found: Any = ray.get(actors[name].read_token.remote(file))
            fact = facts[name]
            yield token_finding(fact["host"], fact["cache"]["path"], found, text, facts[writer]["host"])
    finally:
        ray.get(actors[writer].remove_token.remote(file))
