"""A pool of scoring processes with a deadline that holds whatever sympy does."""

import base64
import json
import os
import pickle
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

START_SECONDS = 120.0  # importing sympy and reasoning-gym on a busy machine
_PACKAGE_PARENT = Path(__file__).parents[2]


class VerifierPool:
    """Scores requests (see ``scoring``) in `workers` child processes. Thread safe; processes start on first use."""

    def __init__(self, workers: int, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self.timeouts = 0
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(_Child())
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verify")
        self._lock = threading.Lock()

    def score(self, requests: Sequence[tuple]) -> list[float]:
        """The reward of each request; 0.0, and one more in `timeouts`, where the deadline passed or the process died.

        Raises:
            RuntimeError: a scoring process does not start.
        """
        return list(self._threads.map(self._score_one, requests))

    def close(self) -> None:
        """End the child processes, after requests that still run."""
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            self._idle.get().end()

    def _score_one(self, request: tuple) -> float:
        child = self._idle.get()
        try:
            reply = child.ask(request, self.timeout_seconds)
        finally:
            self._idle.put(child)
        if reply is None:
            with self._lock:
                self.timeouts += 1
            return 0.0
        return reply


class _Child:
    """One child process, started when asked and started anew after a deadline or a crash."""

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared: set[str] = set()

    def ask(self, request: tuple, seconds: float) -> float | None:
        """The child's score, or None if it gave none in time or died."""
        kind = request[0]
        if self._process is None or self._process.poll() is not None:
            self._start()
        if kind not in self._prepared:
            if self._exchange(("prepare", kind), START_SECONDS) is None:
                raise RuntimeError(
                    f"the scoring process cannot prepare {kind!r} within {START_SECONDS:.0f} s; run "
                    f"`{Path(sys.executable).name} -m nemo_rl_dsv4.environments.verify_worker` to see whether it starts"
                )
            self._prepared.add(kind)
        return self._exchange(request, seconds)

    def end(self) -> None:
        """Kill the process, if there is one, and forget it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self.end()
        self._prepared = set()
        paths = [str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_rl_dsv4.environments.verify_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def _exchange(self, request: tuple, seconds: float) -> float | None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(base64.b64encode(pickle.dumps(request)) + b"\n")
            self._process.stdin.flush()
            line = self._read_line(seconds)
        except BrokenPipeError:
            line = None
        if line is None:
            self.end()
            return None
        return json.loads(line)

    def _read_line(self, seconds: float) -> bytes | None:
        """The next line of the child, or None if it takes longer or the child ends."""
        assert self._process is not None and self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        deadline = time.monotonic() + seconds
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not buffer.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    return None
                chunk = os.read(stdout, 4096)
                if not chunk:
                    return None
                buffer += chunk
        return buffer
