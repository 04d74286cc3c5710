"""Signals, also while the main thread is inside a native call that nothing interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: The main thread waits in C for a mutex that it holds itself: no signal ends that.
PROGRAM = """
import ctypes, sys, threading
from llamasrv.cli.signals import SignalWatch

mode, grace, limit = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
stopped = threading.Event()

def on_stop():
    print("stop", flush=True)
    if mode == "broken":
        raise RuntimeError("cannot stop")
    if mode == "endless":
        threading.Event().wait()
    stopped.set()

watch = SignalWatch(on_stop, lambda: print("leaving", flush=True), grace, limit)
watch.start()
print("ready", flush=True)
if mode == "python":
    stopped.wait()
    print("ended", watch.is_stopping, flush=True)
else:
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def start(mode: str, grace: float = 3600, limit: float = 3600) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode, str(grace), str(limit)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_runs_the_stop(number: signal.Signals) -> None:
    process = start("python")
    process.send_signal(number)
    assert finish(process) == (0, "stop\nended True\n", "")


def test_a_main_thread_that_never_returns_is_left_behind_with_code_0() -> None:
    process = start("native", grace=0.2)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, out) == (0, "stop\nleaving\n")
    assert "did not end in time" in err


def test_a_stop_that_fails_still_ends_the_process() -> None:
    process = start("broken", grace=0.2)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[:2] == (0, "stop\nleaving\n")


def test_a_stop_that_never_returns_is_left_behind_at_the_limit() -> None:
    process = start("endless", limit=0.2)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[:2] == (0, "stop\nleaving\n")


def test_the_second_signal_ends_at_once() -> None:
    process = start("native")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "stop\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (1, "leaving\n", "Received second interrupt, terminating immediately.\n")


def test_other_signals_do_not_stop_it() -> None:
    process = start("native")
    process.send_signal(signal.SIGWINCH)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "stop\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 1
