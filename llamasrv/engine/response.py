"""The way back: results from the main loop to the threads that wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from llamasrv.engine.result import ErrorResult, Result

#: Partial results that may wait for a reader whose client takes nothing; then its request ends.
MAX_UNREAD = 16384


class QueueFullError(Exception):
    """As many tasks as allowed wait for a slot already."""


class Mailbox:
    """Results for one reader, in order of sending, under a condition of its own: no other reader wakes."""

    __slots__ = ("condition", "is_interrupted", "results")

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self.results: deque[Result] = deque()
        self.is_interrupted = False

    def interrupt(self) -> None:
        """Have :meth:`ServerResponse.recv` return at once from now on. Any thread."""
        with self.condition:
            self.is_interrupted = True
            self.condition.notify()


class ServerResponse:
    """Routes each result to the mailbox that waits for its task id; a result nobody waits for is dropped."""

    def __init__(self) -> None:
        self._boxes: dict[int, Mailbox] = {}
        #: Tasks that hold a slot or wait for one.
        self._open: set[int] = set()
        #: Requests refused by :meth:`open`.
        self.n_refused = 0
        self._lock = threading.Lock()
        self._terminated = False
        self._on_overflow: Callable[[list[int]], None] = lambda ids: None

    def on_overflow(self, callback: Callable[[list[int]], None]) -> None:
        """``callback(ids)`` hears of the tasks of a request whose results nobody fetches, on the sending thread."""
        self._on_overflow = callback

    @property
    def terminated(self) -> bool:
        return self._terminated

    @property
    def n_open(self) -> int:
        """Tasks that hold a slot or wait for one."""
        return len(self._open)

    def is_open(self, id_task: int) -> bool:
        """Whether this task holds a slot or waits for one."""
        return id_task in self._open

    def open(self, ids: Iterable[int], limit: int | None) -> None:
        """Count these tasks among those that want a slot, until their last result is sent or nobody waits for them.

        Raises :class:`QueueFullError` where there are ``limit`` of them already: a request is taken as a whole.
        """
        with self._lock:
            if limit is not None and len(self._open) >= limit:
                self.n_refused += 1
                raise QueueFullError
            self._open.update(ids)

    def add_waiting_task_ids(self, ids: Iterable[int]) -> Mailbox:
        """Open one mailbox for all these task ids."""
        box = Mailbox()
        with self._lock:
            for id_task in ids:
                self._boxes[id_task] = box
        return box

    def remove_waiting_task_ids(self, ids: Iterable[int]) -> None:
        """Results for these ids are dropped from now on."""
        with self._lock:
            for id_task in ids:
                self._boxes.pop(id_task, None)
                self._open.discard(id_task)

    def is_waiting(self, id_task: int) -> bool:
        """Whether somebody still waits for results of this task."""
        return id_task in self._boxes

    def send(self, result: Result) -> None:
        """Deliver a result and wake its reader. Never blocks on a reader.

        After termination nothing is delivered: what fails then fails because of it.
        """
        box = self._boxes.get(result.id)
        if box is None or self._terminated:
            return
        if result.is_stop:
            with self._lock:
                self._open.discard(result.id)
        with box.condition:
            is_full = len(box.results) >= MAX_UNREAD and not result.is_stop
            if not is_full:
                box.results.append(result)
                box.condition.notify()
        if is_full:
            self._overflow(box)

    def _overflow(self, box: Mailbox) -> None:
        with self._lock:
            ids = sorted(id_task for id_task, owner in self._boxes.items() if owner is box)
            for id_task in ids:
                del self._boxes[id_task]
                self._open.discard(id_task)
        if not ids:
            return
        with box.condition:
            box.results.append(ErrorResult(id=ids[0], message="The client does not read what it asked for"))
        self._on_overflow(ids)

    def recv(self, box: Mailbox, timeout: float) -> Result | None:
        """The next result of a mailbox.

        None after ``timeout`` seconds, when the server terminates or when the mailbox is interrupted. Results that were
        sent before are still handed out.
        """
        deadline = time.monotonic() + timeout
        with box.condition:
            while not box.results:
                remaining = deadline - time.monotonic()
                if self._terminated or box.is_interrupted or remaining <= 0 or not box.condition.wait(remaining):
                    break
            return box.results.popleft() if box.results else None

    def terminate(self) -> None:
        """Wake every reader, for good."""
        with self._lock:
            self._terminated = True
            boxes = set(self._boxes.values())
        for box in boxes:
            with box.condition:
                box.condition.notify_all()
