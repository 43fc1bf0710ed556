"""Remake requirements.lock, the exact versions and hashes of the default, test and development packages.

  uv run scripts/lock.py            resolve anew (newest versions that pyproject.toml and its exclude-newer allow)
  uv run scripts/lock.py --check    change nothing; exit 1 if requirements.lock is not well-formed
  python scripts/lock.py --without-cuda   print it without torch, triton and CUDA's libraries (docker/Dockerfile.rocm)

uv.lock, from which it is exported, also records download addresses. It is made on the first `uv run` and not committed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Exact versions and hashes for CPython 3.11 to 3.13 on Linux (x86_64, aarch64); remade by scripts/lock.py.
# Install:  pip install --require-hashes -r requirements.lock && pip install --no-deps -e .
"""
EXPORT = ["uv", "export", "--frozen", "--no-emit-project", "--no-header", "--no-annotate", "--group", "test"]
REQUIREMENT = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9._-]*)(\[[a-z0-9,._-]+\])?==(?P<version>[A-Za-z0-9.!+_-]+)( ; [^\\]+)?( \\)?"
)
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def problems(text: str) -> list[str]:
    """What is wrong with the text of a lock file: lines that are neither a pinned version nor a hash, and pins
    without one. An address cannot hide: no line that holds one matches.
    """
    found: list[str] = []
    open_pin: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            if "://" in line:
                found.append(f"line {number}: an address in a comment")
            continue
        pin = REQUIREMENT.fullmatch(line)
        if pin is not None:
            if open_pin is not None:
                found.append(f"line {number - 1}: {open_pin} has no hash")
            open_pin = pin["name"]
        elif HASH.fullmatch(line):
            open_pin = None
        else:
            found.append(f"line {number}: neither name==version nor a hash: {line.strip()[:80]}")
    if open_pin is not None:
        found.append(f"the last pin, {open_pin}, has no hash")
    return found


def without_cuda(text: str) -> str:
    """The lock without torch, triton and what only CUDA needs; all other pins with their hashes."""
    kept, dropping = [], False
    for line in text.splitlines():
        pin = REQUIREMENT.fullmatch(line)
        if pin is not None:
            dropping = pin["name"] in ("torch", "triton") or pin["name"].startswith(("nvidia-", "cuda-"))
        if not dropping:
            kept.append(line)
    return "\n".join(kept) + "\n"


def direct_pins(pyproject: str) -> dict[str, str]:
    """Name -> version of what pyproject.toml pins exactly for the default, test and development environments."""
    data = tomllib.loads(pyproject)
    groups = data["dependency-groups"]
    wanted = [*data["project"]["dependencies"], *groups["train"], *groups["test"], *groups["dev"]]
    return dict(item.split("==") for item in wanted if "==" in item)


def mismatches(text: str, pyproject: str) -> list[str]:
    """Exact pins of pyproject.toml that the lock file does not have."""
    locked = {pin["name"]: pin["version"] for line in text.splitlines() if (pin := REQUIREMENT.fullmatch(line))}
    return [
        f"pyproject.toml pins {name}=={version}, the lock has {locked.get(name)}"
        for name, version in direct_pins(pyproject).items()
        if locked.get(name) != version
    ]


def main() -> int:
    """Remakes or checks the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check the file that is there")
    parser.add_argument("--without-cuda", action="store_true", help="print the pins that do not depend on the vendor")
    options = parser.parse_args()
    if options.without_cuda:
        print(without_cuda(LOCK.read_text(encoding="utf-8")), end="")
        return 0
    check_only = options.check
    if check_only:
        text = LOCK.read_text(encoding="utf-8")
    else:
        subprocess.run(["uv", "lock"], cwd=ROOT, check=True)
        export = subprocess.run([*EXPORT, "--group", "dev"], cwd=ROOT, check=True, capture_output=True, text=True)
        text = HEADER + export.stdout
    wrong = problems(text) + mismatches(text, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if wrong:
        print("requirements.lock is wrong:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    if not check_only:
        partial = LOCK.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, LOCK)
    print(f"requirements.lock: {sum(1 for line in text.splitlines() if REQUIREMENT.fullmatch(line))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
