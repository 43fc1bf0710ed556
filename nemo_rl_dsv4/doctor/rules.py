"""From facts to findings: what is wrong on a node or between nodes, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nemo_rl_dsv4.generation.vllm_settings import MAKE_VLLM

Facts = Mapping[str, Any]
SMALLEST_FREE_GIB = 20.0
"""Less than this on a disk that caches and temporary files go to is a problem."""
RELEASE_GIB = 150.0
"""A DeepSeek-V4-Flash release: 277 B expert parameters in FP4 with a scale byte for 32, 7 B others in FP8."""
CLOCK_SECONDS = 1.0
"""Clocks may differ by this much: logs of nodes stay in order, and timeouts of rendezvous are far longer."""


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        check: what was looked at.
        status: `ok`, `note` (worth knowing) or `problem` (exit status 1).
        node: host name, or `all`.
        text: what was found.
        fix: what to do; empty when ok.
    """

    check: str
    status: Literal["ok", "note", "problem"]
    node: str
    text: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Wanted:
    """What a recipe asks of the cluster; the defaults ask nothing."""

    nodes: int = 0
    gpus_per_node: int = 0
    dispatcher: str = ""
    vllm_python: str = ""
    """Python of vLLM's environment; empty where no vLLM is wanted."""


def node_findings(facts: Facts, wanted: Wanted, pins: Mapping[str, str]) -> Iterator[Finding]:
    """Findings of one node."""
    yield from _gpus(facts, wanted)
    yield from _links(facts)
    yield from _collectives(facts)
    yield from _dispatchers(facts, wanted)
    yield from _rollout(facts, wanted)
    yield from _cache(facts)
    yield from _disk(facts)
    yield from _pins(facts, pins)


def cluster_findings(nodes: list[Facts], wanted: Wanted) -> Iterator[Finding]:
    """What differs between nodes that must be equal; nothing of a single node unless a recipe wants more."""
    if wanted.nodes > len(nodes):
        text = f"{len(nodes)} nodes, the recipe wants {wanted.nodes}"
        yield Finding("nodes", "problem", "all", text, "start Ray on more nodes, or change cluster.num_nodes")
    if len(nodes) < 2:
        return
    compared: dict[str, Callable[[Facts], Any]] = {
        "Python": lambda node: node["python"],
        "processor": lambda node: node["machine"],
        "GPUs": lambda node: _gpu_text(node["gpus"]),
        "driver": lambda node: node["gpus"]["driver"],
        "collectives": lambda node: node["collectives"] and " ".join(node["collectives"].values()),
        "HF_HOME": lambda node: node["cache"]["path"],
        "vLLM": lambda node: node["rollout"],
        **{
            f"version of {name}": lambda node, name=name: node["packages"].get(name)
            for name in sorted({name for node in nodes for name in node["packages"]})
        },
        **{
            f"import of {name}": lambda node, name=name: node["dispatchers"].get(name)
            for name in sorted({name for node in nodes for name in node["dispatchers"]})
        },
    }
    equal = []
    for name, read in compared.items():
        by_value: dict[Any, list[str]] = {}
        for node in nodes:
            by_value.setdefault(read(node), []).append(node["host"])
        if len(by_value) == 1:
            equal.append(name)
            continue
        groups = sorted(by_value.items(), key=lambda item: -len(item[1]))
        text = "; ".join(f"{value or 'none'} on {_hosts(hosts)}" for value, hosts in groups)
        fix = "make all nodes like the first group: one image, or one environment on a shared disk"
        yield Finding(name, "problem", "all", text, fix)
    if equal:
        yield Finding("equal on all nodes", "ok", "all", ", ".join(equal))


def clock_finding(host: str, offset: float, uncertainty: float) -> Finding:
    """Clock of a node against this machine's; `offset` and `uncertainty` in seconds."""
    text = f"{offset:+.3f} s against this machine (measured to {uncertainty:.3f} s)"
    if abs(offset) - uncertainty > CLOCK_SECONDS:
        return Finding("clock", "problem", host, text, "start a time service (chrony or systemd-timesyncd) on the node")
    return Finding("clock", "ok", host, text)


def token_finding(host: str, path: str, found: str | None, wanted: str, writer: str) -> Finding:
    """Whether a node reads from its cache what the first node wrote into its own."""
    if found == wanted:
        return Finding("shared cache", "ok", host, f"{path} is the folder that {writer} writes to")
    text = f"{path} does not hold what {writer} wrote into its own"
    fix = "mount one shared folder on all nodes and set HF_HOME to it everywhere; else every node downloads the model"
    return Finding("shared cache", "problem", host, text, fix)


def _gpu_text(gpus: Mapping[str, Any]) -> str:
    kinds = {(name, memory) for name, memory in zip(gpus["names"], gpus["memory_mib"], strict=True)}
    shown = " and ".join(f"{name} ({memory} MiB)" for name, memory in sorted(kinds))
    return f"{len(gpus['names'])} x {shown}" if shown else ""


def _gpus(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    host, gpus = facts["host"], facts["gpus"]
    for text in gpus["problems"]:
        fix = "run that command on the node; a driver that does not answer wants a restart or a newer one"
        yield Finding("GPUs", "problem", host, text, fix)
    count = len(gpus["names"])
    if not count and not gpus["problems"]:
        text = "no GPU: neither nvidia-smi nor rocm-smi is installed here; only the tiny recipes run"
        if wanted.gpus_per_node:
            fix = f"take a node with {wanted.gpus_per_node} GPUs and its vendor's driver"
            yield Finding("GPUs", "problem", host, text, fix)
        else:
            yield Finding("GPUs", "note", host, text, "nothing, unless the node has GPUs: then install the driver")
    elif count < wanted.gpus_per_node:
        text = f"{_gpu_text(gpus)}, the recipe wants {wanted.gpus_per_node}"
        yield Finding("GPUs", "problem", host, text, "free the missing GPUs, or change cluster.gpus_per_node")
    elif count:
        status, fix = ("ok", "") if len(set(gpus["names"])) == 1 else ("problem", "use GPUs of one kind in a node")
        yield Finding("GPUs", status, host, f"{_gpu_text(gpus)}, driver {gpus['driver'] or 'unknown'}", fix)


def _links(facts: Facts) -> Iterator[Finding]:
    host, gpus = facts["host"], facts["gpus"]
    if gpus["link"] is None:
        return
    if gpus["unlinked"]:
        a, b = gpus["unlinked"][0]
        text = f"{len(gpus['unlinked'])} pairs of GPUs without {gpus['link']}, the first {a} and {b}"
        fix = (
            "DeepEP and context parallelism need links: check fabric manager (NVIDIA) or xGMI cabling, or take a node "
        )
        yield Finding("links", "problem", host, text, fix + "whose GPUs are all linked")
    elif not gpus["problems"]:
        yield Finding("links", "ok", host, f"{gpus['link']} between all {len(gpus['names'])} GPUs")


def _collectives(facts: Facts) -> Iterator[Finding]:
    host, found = facts["host"], facts["collectives"]
    if found is not None:
        yield Finding("collectives", "ok", host, f"{found['name']} {found['version']}")
    elif facts["gpus"]["names"]:
        text = "torch has neither NCCL nor RCCL"
        yield Finding("collectives", "problem", host, text, "install torch's build for this vendor (docs/cluster.md)")


def _dispatchers(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    needed = {"deepep": "deep_ep", "hybridep": "deep_ep", "uccl_ep": "uccl"}.get(wanted.dispatcher)
    for library, state in facts["dispatchers"].items():
        fix = "install it into the training environment (docs/policy.md), or choose another backend.dispatcher"
        if not state:
            status = "problem" if library == needed else "note"
            text = f"{library} is not installed" + (
                f"; the recipe's dispatcher is {wanted.dispatcher}" * (status != "note")
            )
            if status == "problem" or facts["gpus"]["names"]:
                yield Finding("dispatcher", status, facts["host"], text, fix)
        elif state.startswith("broken: "):
            status = "note" if wanted.dispatcher and library != needed else "problem"
            text = f"{library} does not import: {state.removeprefix('broken: ')}"
            yield Finding("dispatcher", status, facts["host"], text, "build it anew against this torch")
        else:
            yield Finding("dispatcher", "ok", facts["host"], f"{library} {state} imports")


def _rollout(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    state, host = facts["rollout"], facts["host"]
    if state.startswith("broken: "):
        text = f"vLLM's environment does not answer: {state.removeprefix('broken: ')}"
        yield Finding("vLLM", "problem", host, text, f"make it anew: {MAKE_VLLM}")
    elif state:
        yield Finding("vLLM", "ok", host, f"vllm {state}")
    elif wanted.vllm_python:
        text = f"no vLLM: {wanted.vllm_python} is not there"
        yield Finding("vLLM", "problem", host, text, f"make it with `{MAKE_VLLM}`, or set policy.dsv4.vllm_python")


def _cache(facts: Facts) -> Iterator[Finding]:
    cache, host = facts["cache"], facts["host"]
    if cache["error"]:
        text = f"nothing can be written to {cache['path']} ({cache['error']})"
        yield Finding("HF_HOME", "problem", host, text, "set HF_HOME to a folder that this user can write to")
    elif not cache["named"]:
        text = f"HF_HOME is not set; the hub's default {cache['path']} is used"
        yield Finding("HF_HOME", "note", host, text, "set HF_HOME to a folder that all nodes share")
    else:
        yield Finding("HF_HOME", "ok", host, f"{cache['path']} can be written to")


def _disk(facts: Facts) -> Iterator[Finding]:
    cache = facts["cache"]["path"]
    for folder, free in facts["free_gib"].items():
        text = f"{free:.0f} GiB free for {folder}"
        if free < SMALLEST_FREE_GIB:
            yield Finding("disk", "problem", facts["host"], text, f"free at least {SMALLEST_FREE_GIB:.0f} GiB")
        elif folder == cache and free < RELEASE_GIB:
            fix = f"a DeepSeek-V4-Flash release takes about {RELEASE_GIB:.0f} GiB: free more unless it is there already"
            yield Finding("disk", "note", facts["host"], text, fix)
        else:
            yield Finding("disk", "ok", facts["host"], text)


def _pins(facts: Facts, pins: Mapping[str, str]) -> Iterator[Finding]:
    differing = [
        f"{name} {found} (pinned {wanted})"
        for name, wanted in pins.items()
        if (found := facts["packages"].get(name)) is not None and found.partition("+")[0] != wanted
    ]
    if differing:
        fix = "install the pinned versions (requirements.lock), or know why not: nothing else was tested"
        yield Finding("pins", "note", facts["host"], ", ".join(differing), fix)


def _hosts(hosts: list[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"
