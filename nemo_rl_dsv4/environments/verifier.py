"""A pool of math-verify child processes with a deadline that holds whatever sympy does."""

import json
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

START_SECONDS = 120.0  # importing sympy on a busy machine


class VerifierPool:
    """Compares pairs of answers in `workers` child processes. Thread safe; processes start on first use."""

    def __init__(self, workers: int, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self.timeouts = 0
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(_Child())
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verify")
        self._lock = threading.Lock()

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the (gold, answer) of each pair are equal; False where the deadline passed."""
        return list(self._threads.map(self._compare_one, pairs))

    def close(self) -> None:
        """End the child processes, after comparisons that still run."""
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            self._idle.get().end()

    def _compare_one(self, pair: tuple[str, str]) -> bool:
        child = self._idle.get()
        try:
            reply = child.ask(pair, self.timeout_seconds)
        finally:
            self._idle.put(child)
        if reply is None:
            with self._lock:
                self.timeouts += 1
        return bool(reply)


class _Child:
    """One child process, started when asked and started anew after a deadline or a crash."""

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, pair: tuple[str, str], seconds: float) -> bool | None:
        """The child's answer, or None if it gave none in time or died."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps(pair).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.end()
            return None
        line = self._read_line(seconds)
        if line is None:
            self.end()
            return None
        return json.loads(line)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self.end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_rl_dsv4.environments.verify_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._read_line(START_SECONDS) is None:
            code = self._process.poll()
            self.end()
            raise RuntimeError(
                f"the math-verify process did not start (exit code {code}); run `{sys.executable} -m "
                "nemo_rl_dsv4.environments.verify_worker` to see why"
            )

    def _read_line(self, seconds: float) -> bytes | None:
        """The next line of the child, or None if it takes longer or the child ends."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + seconds
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not buffer.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    return None
                chunk = self._process.stdout.read1(4096)  # type: ignore[attr-defined]
                if not chunk:
                    return None
                buffer += chunk
        return buffer
