"""The server under test: a process whose output is kept and whose disk can be made full."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from soaklib.wire import Address, LostError, ask

OURS = (sys.executable, "-m", "llamasrv")
N_SLOTS = 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """``slot_folder``: where it saves slots. The process ends when the object is closed."""

    def __init__(self, command: Sequence[str], flags: Sequence[str], slot_folder: Path) -> None:
        self.address = Address("127.0.0.1", free_port())
        self.slot_folder = slot_folder
        self._log: collections.deque[str] = collections.deque(maxlen=400)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
        self.process = subprocess.Popen(
            [
                *command,
                *("--host", self.address.host, "--port", str(self.address.port), "-np", str(N_SLOTS)),
                *("--metrics", "--slots", "--slot-save-path", f"{slot_folder}/"),
                *flags,
            ],
            # a pipe: the limit that makes the disk full must not meet the log
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # SIGXFSZ stays ignored, as Python has it: a full disk sends no signal either
            restore_signals=False,
        )
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.append(line.decode(errors="replace").rstrip())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._log)

    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self.process.poll()

    async def ready(self, patience: float) -> None:
        """Wait for it. Raises RuntimeError with the end of its log when it does not come up."""
        deadline = time.monotonic() + patience
        while self.exit_code() is None and time.monotonic() < deadline:
            with contextlib.suppress(LostError):
                if (await ask(self.address, "GET", "/health")).status == 200:
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the server did not start (code {self.exit_code()}):\n{self.log}")

    @contextlib.contextmanager
    def full_disk(self, room: int) -> Iterator[None]:
        """Let the server write files of no more than ``room`` bytes: the next write fails, as on a full disk.

        Needs no privileges: the limit of a process's file size. The error is EFBIG instead of ENOSPC.
        """
        soft, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (soft, hard))

    def stop(self, patience: float) -> int | None:
        """SIGTERM. The exit code, or None if it did not end in time and had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
