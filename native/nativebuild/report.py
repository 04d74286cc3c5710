"""What the person at the terminal gets to see: progress lines on stderr and errors that say what to do."""

from __future__ import annotations

import sys
import time


class BuildError(Exception):
    """The build cannot go on. The text is complete: what happened and what helps."""


def say(text: str) -> None:
    """Write one progress line to stderr (stdout is kept for results such as paths)."""
    print(f"llamasrv: {text}", file=sys.stderr, flush=True)


class Progress:
    """A percentage: one line rewritten in place on a terminal, else a new line every tenth or half minute."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._last_percent = -10
        self._last_time = self._start

    def update(self, done: int, total: int) -> None:
        """Report that `done` of `total` steps are finished."""
        percent = 100 * done // max(total, 1)
        now = time.monotonic()
        text = f"{self._what}: {percent}% ({done}/{total}, {now - self._start:.0f} s)"
        if self._terminal:
            print(f"\r\x1b[Kllamasrv: {text}", end="", file=sys.stderr, flush=True)
        elif percent >= self._last_percent + 10 or now >= self._last_time + 30:
            say(text)
            self._last_percent = percent - percent % 10
            self._last_time = now

    def close(self) -> None:
        """End the line that was rewritten in place."""
        if self._terminal:
            print(file=sys.stderr, flush=True)
