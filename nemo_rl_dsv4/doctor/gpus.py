"""GPUs, driver and links of a node, read from what the vendor's tools print.

Formats: `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` and `nvidia-smi topo -m` (driver 470 to 580);
`rocm-smi --json` and `rocm-smi --showtopotype --json` (ROCm 6 and 7).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

NVIDIA_GPUS = ("nvidia-smi", "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader,nounits")
NVIDIA_LINKS = ("nvidia-smi", "topo", "-m")
AMD_GPUS = ("rocm-smi", "--showproductname", "--showdriverversion", "--showmeminfo", "vram", "--json")
AMD_LINKS = ("rocm-smi", "--showtopotype", "--json")
COMMAND_SECONDS = 30
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class ToolError(Exception):
    """A vendor's tool is missing, fails, or prints something else than expected."""


Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints; raises ToolError."""


@dataclass
class Gpus:
    """What a node says of its GPUs.

    Attributes:
        vendor: `nvidia`, `amd`, or None without a GPU.
        names: product name of each GPU.
        memory_mib: memory of each GPU in MiB.
        driver: version of the driver.
        link: `NVLink` or `xGMI`.
        unlinked: pairs of GPU numbers that reach each other without such a link.
        problems: what a tool could not say, one sentence each.
    """

    vendor: str | None = None
    names: list[str] = field(default_factory=list)
    memory_mib: list[int] = field(default_factory=list)
    driver: str | None = None
    link: str | None = None
    unlinked: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run_command(words: Sequence[str]) -> str:
    """What a command prints on stdout.

    Raises:
        ToolError: no such program, an exit status other than 0 (with its last line), or no end within 30 s.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except FileNotFoundError as error:
        raise ToolError(f"{words[0]} is not installed") from error
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise ToolError(f"`{' '.join(words)}` did not answer ({error})") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()[-1]
        raise ToolError(f"`{' '.join(words)}` ended with status {done.returncode}: {said}")
    return done.stdout


def read_gpus(run: Runner = run_command) -> Gpus:
    """The node's GPUs by nvidia-smi, else by rocm-smi; a node with neither tool has none."""
    for vendor, words, parse, links, parse_links in (
        ("nvidia", NVIDIA_GPUS, parse_nvidia_gpus, NVIDIA_LINKS, parse_nvidia_links),
        ("amd", AMD_GPUS, parse_amd_gpus, AMD_LINKS, parse_amd_links),
    ):
        try:
            found = parse(run(words))
        except ToolError as error:
            if str(error).endswith("is not installed"):
                continue
            return Gpus(vendor, problems=[str(error)])
        if len(found.names) > 1:
            found.link = "NVLink" if vendor == "nvidia" else "xGMI"
            try:
                found.unlinked = parse_links(run(links), len(found.names))
            except ToolError as error:
                found.problems.append(str(error))
        return found
    return Gpus()


def parse_nvidia_gpus(text: str) -> Gpus:
    """GPUs of nvidia-smi's query: one line `index, name, driver, MiB` each."""
    found = Gpus("nvidia")
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[3].isdecimal():
            raise ToolError(f"nvidia-smi prints {line!r}; wanted index, name, driver version, memory in MiB")
        found.names.append(cells[1])
        found.driver = cells[2]
        found.memory_mib.append(int(cells[3]))
    return found


def parse_nvidia_links(text: str, gpus: int) -> list[tuple[int, int]]:
    """Pairs of GPUs whose entry of `nvidia-smi topo -m` is not NV<number of links>."""
    rows: dict[int, list[str]] = {}
    for line in _ESCAPES.sub("", text).splitlines():
        cells = line.split()
        if cells and re.fullmatch(r"GPU\d+", cells[0]) and len(cells) > gpus and not cells[1].startswith("GPU"):
            rows[int(cells[0][3:])] = cells[1 : gpus + 1]
    if sorted(rows) != list(range(gpus)):
        raise ToolError(f"`nvidia-smi topo -m` shows GPUs {sorted(rows)}; wanted 0 to {gpus - 1}")
    return [(a, b) for a in rows for b in range(a + 1, gpus) if not re.fullmatch(r"NV\d+", rows[a][b])]


def parse_amd_gpus(text: str) -> Gpus:
    """GPUs of `rocm-smi --json`: a section `card<N>` each and `system` for the driver."""
    found = Gpus("amd")
    document = _json(text)
    cards = sorted((key for key in document if re.fullmatch(r"card\d+", key)), key=lambda key: int(key[4:]))
    for card in cards:
        section = {key.lower(): value for key, value in document[card].items()}
        name = section.get("card series") or section.get("card model") or section.get("gfx version")
        memory = section.get("vram total memory (b)")
        if name is None or memory is None or not str(memory).isdecimal():
            raise ToolError(f"rocm-smi gives {card} no name or memory: {sorted(section)}")
        found.names.append(str(name))
        found.memory_mib.append(int(memory) // 2**20)
    system = document.get("system", {})
    found.driver = next((str(value) for key, value in system.items() if "driver" in key.lower()), None)
    return found


def parse_amd_links(text: str, gpus: int) -> list[tuple[int, int]]:
    """Pairs of GPUs whose link type in `rocm-smi --showtopotype --json` is not XGMI."""
    types: dict[tuple[int, int], str] = {}
    for section in _json(text).values():
        for key, value in section.items():
            pair = re.search(r"DRM devices (\d+) and (\d+)", key)
            if pair and "link type" in key.lower():
                types[int(pair[1]), int(pair[2])] = str(value)
    wanted = [(a, b) for a in range(gpus) for b in range(a + 1, gpus)]
    missing = [pair for pair in wanted if pair not in types and pair[::-1] not in types]
    if missing:
        raise ToolError(f"`rocm-smi --showtopotype` says nothing of GPUs {missing[0][0]} and {missing[0][1]}")
    return [pair for pair in wanted if types.get(pair, types.get((pair[1], pair[0]), "")).upper() != "XGMI"]


def _json(text: str) -> dict[str, Any]:
    # Warnings may stand before the object.
    start = text.find("{")
    try:
        document = json.loads(text[start:]) if start >= 0 else None
    except ValueError as error:
        raise ToolError(f"rocm-smi prints no JSON ({error})") from error
    if not isinstance(document, dict) or not all(isinstance(section, dict) for section in document.values()):
        raise ToolError("rocm-smi prints no JSON object of sections")
    return document
