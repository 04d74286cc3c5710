"""Memory that was used once goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamasrv.binding import heap

#: Threads one after the other, all of them alive, each of which uses 16 MiB in blocks of 128 KiB and keeps a crumb.
CROWD = """
import sys, threading
from llamasrv.binding import heap

if sys.argv[1] == "limit":
    assert heap.limit({})
crumbs, end = [], threading.Event()

def work(done):
    blocks = [bytearray(131072) for _ in range(128)]
    crumbs.append(bytearray(1000))
    del blocks
    done.set()
    end.wait()

def rss():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS:")) // 1024

before = rss()
threads = []
for _ in range(16):
    done = threading.Event()
    threads.append(threading.Thread(target=work, args=(done,)))
    threads[-1].start()
    done.wait()
print(rss() - before)
end.set()
"""


def grown(how: str) -> int:
    """By how many MiB the process is larger afterwards."""
    environment = {name: value for name, value in os.environ.items() if name not in heap.VARIABLES}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", CROWD, how]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_many_threads_do_not_keep_what_each_of_them_used_once() -> None:
    # without the limit 240
    assert grown("limit") < 100


@pytest.mark.parametrize("name", heap.VARIABLES)
def test_settings_of_the_environment_are_left_alone(name: str) -> None:
    assert not heap.limit({name: "1"})
