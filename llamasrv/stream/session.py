"""The bytes of one stream, kept for those who come back."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable

#: Bytes of a stream that are kept; the oldest go first.
MAX_BYTES = 4 * 1024 * 1024
#: Forgotten frames after which the lists are shortened.
_COMPACT = 1024


class OffsetLostError(Exception):
    """The bytes at an offset are no longer kept."""


class StreamSession:
    """Frames of one stream under the offsets of their first bytes. Any number of readers, one writer; thread-safe.

    Whole frames are dropped, so that what is left always begins with one. The latest is kept whatever its size.
    """

    def __init__(
        self, conversation_id: str, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time
    ) -> None:
        self.conversation_id = conversation_id
        #: Seconds since 1970.
        self.started_at = int(clock())
        self._clock = clock
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._frames: list[bytes] = []
        self._starts: list[int] = []
        #: Frames at the front of the lists that are dropped already.
        self._n_gone = 0
        self._total = 0
        self._is_done = False
        self._is_cancelled = False
        self._completed_at = 0

    @property
    def is_done(self) -> bool:
        """Whether no more bytes will come."""
        return self._is_done

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked the writer to stop."""
        return self._is_cancelled

    @property
    def total_bytes(self) -> int:
        """Bytes ever written: the offset of the next frame."""
        return self._total

    @property
    def completed_at(self) -> int:
        """Seconds since 1970; 0 while the stream goes on."""
        return self._completed_at

    @property
    def n_dropped(self) -> int:
        """The lowest offset that can be read."""
        with self._changed:
            return self._first_offset()

    def append(self, frame: bytes) -> bool:
        """Add a frame. False, and nothing is added, after the end."""
        with self._changed:
            if self._is_done:
                return False
            if not frame:
                return True
            self._frames.append(frame)
            self._starts.append(self._total)
            self._total += len(frame)
            self._drop()
            self._changed.notify_all()
            return True

    def finalize(self) -> None:
        """No more frames. Readers end once they have read what is there."""
        with self._changed:
            if not self._is_done:
                self._is_done = True
                self._completed_at = int(self._clock())
                self._changed.notify_all()

    def cancel(self) -> None:
        """Ask the writer to stop, and end the stream."""
        self._is_cancelled = True
        self.finalize()

    def wake(self) -> None:
        """Let waiting readers look at their ``should_stop`` again."""
        with self._changed:
            self._changed.notify_all()

    def frame_start(self, offset: int) -> int:
        """Offset of the frame that holds the byte at ``offset``; beyond the end ``offset`` itself.

        Raises :class:`OffsetLostError`.
        """
        with self._changed:
            return self._starts[self._find(offset)] if offset < self._total else self._checked(offset)

    def read(self, offset: int, should_stop: Callable[[], bool]) -> bytes:
        """All bytes from ``offset`` on; waits while there are none.

        Empty when the stream has ended there or ``should_stop()``, which is asked whenever something changes and after
        :meth:`wake`. Raises :class:`OffsetLostError`.
        """
        with self._changed:
            while offset >= self._total:
                self._checked(offset)
                if self._is_done or should_stop():
                    return b""
                self._changed.wait()
            place = self._find(offset)
            data = b"".join(self._frames[place:])
            return data[offset - self._starts[place] :]

    def _first_offset(self) -> int:
        return self._starts[self._n_gone] if self._n_gone < len(self._starts) else self._total

    def _checked(self, offset: int) -> int:
        if offset < self._first_offset():
            raise OffsetLostError(f"offset {offset} is lost, the stream is kept from {self._first_offset()} on")
        return offset

    def _find(self, offset: int) -> int:
        """Place of the frame that holds an offset below the end."""
        return bisect_right(self._starts, self._checked(offset)) - 1

    def _drop(self) -> None:
        last = len(self._frames) - 1
        while self._n_gone < last and self._total - self._starts[self._n_gone] > self._max_bytes:
            self._frames[self._n_gone] = b""
            self._n_gone += 1
        if self._n_gone > _COMPACT:
            del self._frames[: self._n_gone]
            del self._starts[: self._n_gone]
            self._n_gone = 0
