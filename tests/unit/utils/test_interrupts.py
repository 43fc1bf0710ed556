"""Ctrl-C at bad moments, in small processes of their own."""

import os
import signal
import subprocess
import sys
import time

import pytest

from nemo_rl_dsv4.utils.interrupts import descendants

HEAD = "import subprocess, sys, time\nfrom nemo_rl_dsv4.utils.interrupts import *\n"
SWALLOWING = """
with prompt_interrupts(), starting():
    try:
        print("ready", flush=True)
        time.sleep(30)
    except BaseException:
        pass
    time.sleep(30)
"""
HANGING = """
with prompt_interrupts(seconds=SECONDS):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        print(child.pid, flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        print("cleaning up", flush=True)
        time.sleep(30)
"""
ENDING = """
with prompt_interrupts(seconds=0.2):
    try:
        print("ready", flush=True)
        time.sleep(30)
    except KeyboardInterrupt:
        pass
time.sleep(0.5)
print("done")
"""


def start(code: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_that_swallows_the_exception_does_not_swallow_ctrl_c(number):
    """Ctrl-C in the first seconds was lost inside torch's import, and the run went on."""
    process = start(SWALLOWING)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=10) == 130
    assert process.stderr.read() == "interrupted\n"


@pytest.mark.parametrize(("seconds", "signals"), [(0.5, 1), (60, 2)], ids=["time is up", "a second Ctrl-C"])
def test_a_clean_up_that_hangs_is_ended_with_all_its_processes(seconds, signals):
    """Ctrl-C during the warm start once hung under load; Ray's processes would have stayed."""
    process = start(HANGING.replace("SECONDS", str(seconds)))
    child = int(process.stdout.readline())
    assert child in descendants(process.pid) and alive(child)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning up\n"
    for _ in range(signals - 1):
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_a_command_that_ended_in_time_is_left_alone():
    process = start(ENDING)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0 and process.stdout.read() == "done\n"
