"""What one node is: a plain dictionary that travels through Ray."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.doctor.gpus import Runner, read_gpus, run_command

PACKAGES = (
    "nemo-rl-dsv4",
    "torch",
    "triton",
    "nemo-automodel",
    "transformers",
    "ray",
    "numpy",
    "safetensors",
    "datasets",
    "vllm",
    "tilelang",
)
"""Packages whose versions must be the same on every node; those that are nowhere installed do not count."""
DISPATCH_LIBRARIES = ("deep_ep", "uccl")
IMPORT_SECONDS = 120
SHOWN_VARIABLES = re.compile(r"(NCCL|RCCL|NVSHMEM|HSA|HIP|CUDA|ROCR|UCX|GLOO|HF|RAY|DEEPEP|NUM_OF_HYBRID_EP)_\w+")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)


def describe_node(run: Runner = run_command, vllm_python: str = "") -> dict[str, Any]:
    """Facts of this node.

    Args:
        run: asks the vendor's tools.
        vllm_python: Python of vLLM's environment, if there should be one.

    Returns:
        host, python, machine, packages (name -> version or None), gpus (fields of `Gpus`), collectives (name and
        version, or None), dispatchers (library -> version, "" where not installed, or `broken: reason`), rollout
        (the same for vLLM in its environment), cache (`cache_facts`), free_gib (folder -> GiB), environment
        (variables of GPU and network libraries), time (Unix seconds).
    """
    gpus = read_gpus(run)
    cache = cache_folder()
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": asdict(gpus),
        "collectives": collectives(gpus.vendor),
        "dispatchers": {name: import_state(name) for name in DISPATCH_LIBRARIES},
        "rollout": rollout_state(vllm_python),
        "cache": cache_facts(cache),
        "free_gib": {str(path): free_gib(path) for path in (cache, Path(tempfile.gettempdir()))},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if SHOWN_VARIABLES.fullmatch(name) and not SECRET.search(name)
        },
        "time": time.time(),
    }


def cache_folder() -> Path:
    """Where the hub keeps models and data: `HF_HOME`, else its default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(base) / "huggingface").expanduser()


def cache_facts(folder: Path) -> dict[str, Any]:
    """`path`, whether `HF_HOME` names it (`named`), and why nothing can be written there (`error`, else None)."""
    error = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as problem:
        error = problem.strerror or str(problem)
    return {"path": str(folder), "named": bool(os.environ.get("HF_HOME")), "error": error}


def free_gib(path: Path) -> float:
    """GiB that are free where `path` is, or would be."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(existing).free / 2**30


def collectives(vendor: str | None) -> dict[str, str] | None:
    """NCCL's or RCCL's version as torch has it; None without a GPU, or where torch has neither or is not installed."""
    if vendor is None or importlib.util.find_spec("torch") is None:
        return None
    import torch

    try:
        version = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):  # a build without it
        return None
    name = "RCCL" if torch.version.hip or vendor == "amd" else "NCCL"
    return {"name": name, "version": ".".join(map(str, version)) if isinstance(version, tuple) else str(version)}


def import_state(module: str) -> str:
    """Version of a library that imports in a process of its own, "" if it is not installed, else why it does not."""
    if importlib.util.find_spec(module) is None:
        return ""
    program = f"import {module}; print(getattr({module}, '__version__', 'of unknown version'))"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"broken: import takes longer than {IMPORT_SECONDS} s"
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        return f"broken: {said.splitlines()[-1]}"
    return done.stdout.strip().splitlines()[-1]


def rollout_state(python: str) -> str:
    """vLLM's version in the environment of `python`, "" where there is none, else why it cannot be told."""
    if not python or not Path(python).is_file():
        return _version("vllm") or ""
    program = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"broken: {error}"
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        return f"broken: {said.splitlines()[-1]}"
    return done.stdout.strip()


def pins() -> dict[str, str]:
    """Package -> version that this package pins exactly, by its own metadata."""
    try:
        required = importlib.metadata.requires("nemo-rl-dsv4") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.fullmatch(r"([A-Za-z0-9_.-]+)==([\w.+-]+)", text.partition(";")[0].strip()) for text in required)
    return {match[1]: match[2] for match in found if match}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class Node:
    """The doctor on one node, as a Ray actor: facts, clock, and the token in the shared cache."""

    def describe(self, vllm_python: str = "") -> dict[str, Any]:
        """See `describe_node`."""
        return describe_node(vllm_python=vllm_python)

    def now(self) -> float:
        """Unix seconds of this node's clock."""
        return time.time()

    def write_token(self, name: str, text: str) -> str | None:
        """Put a file into the cache folder; why it could not, else None."""
        try:
            (cache_folder() / name).write_text(text, encoding="utf-8")
        except OSError as error:
            return error.strerror or str(error)
        return None

    def read_token(self, name: str, seconds: float = 10.0) -> str | None:
        """The file's text as this node sees it, waited for up to `seconds` (network file systems lag); else None."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return (cache_folder() / name).read_text(encoding="utf-8")
            except OSError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.2)

    def remove_token(self, name: str) -> None:
        """Take the file away again."""
        (cache_folder() / name).unlink(missing_ok=True)
