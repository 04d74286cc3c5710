"""SIGINT and SIGTERM, obeyed also while the main thread is inside a native call."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

from llamasrv.engine.log import srv_err

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalWatch:
    """Runs ``on_stop`` in a thread of its own at the first signal; the second ends the process at once.

    Python runs signal handlers on the main thread between two byte codes, that is not at all while it computes a
    batch. The C-level handler however writes to the wake-up descriptor at once, and this thread reads it.
    If the process has not ended ``grace_s`` seconds after ``on_stop`` returned, and ``limit_s`` seconds after the
    first signal at the latest, ``before_exit`` is called and the process ends with code 0 from here.
    """

    def __init__(
        self, on_stop: Callable[[], None], before_exit: Callable[[], None], grace_s: float, limit_s: float
    ) -> None:
        self._on_stop = on_stop
        self._before_exit = before_exit
        self._grace_s = grace_s
        self._limit_s = limit_s
        #: Set by the first signal.
        self._leave_at: float | None = None
        self._read_fd = -1
        self._write_fd = -1

    @property
    def is_stopping(self) -> bool:
        """Whether a signal has come."""
        return self._leave_at is not None

    def start(self) -> None:
        """Take over both signals. On the main thread."""
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in SIGNALS:
            # a handler has to exist, else there is nothing that writes to the descriptor
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="signal-watch", daemon=True).start()

    def _watch(self) -> None:
        while True:
            timeout = None if self._leave_at is None else self._leave_at - time.monotonic()
            if timeout is not None and timeout <= 0:
                self._leave(0, "the server did not end in time, leaving")
            if not select.select([self._read_fd], [], [], timeout)[0]:
                continue
            for number in os.read(self._read_fd, 64):
                if number not in SIGNALS:
                    continue
                if self._leave_at is not None:
                    self._leave(1, "Received second interrupt, terminating immediately.")
                self._leave_at = time.monotonic() + self._limit_s
                # beside this thread, which has to stay awake for the second signal
                threading.Thread(target=self._stop, name="signal-stop", daemon=True).start()

    def _stop(self) -> None:
        try:
            self._on_stop()
        except Exception as exc:
            srv_err("stop", "%r", exc)
        if self._leave_at is not None:
            self._leave_at = min(self._leave_at, time.monotonic() + self._grace_s)
        # no number of a signal: only wakes the thread that watches the time
        os.write(self._write_fd, b"\0")

    def _leave(self, code: int, message: str) -> None:
        print(message, file=sys.stderr, flush=True)
        try:
            self._before_exit()
        finally:
            os._exit(code)
