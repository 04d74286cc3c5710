"""Worker threads: a pool that grows under load, and a few threads kept back for short requests."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from waitress.task import ThreadedTaskDispatcher

from llamasrv.engine.log import srv_err, srv_wrn

#: How many workers may be added when all are busy.
MAX_EXTRA = 1024
#: Seconds without work after which an added worker ends.
IDLE_S = 3.0


class Job(Protocol):
    """A channel with a request to serve."""

    def service(self) -> None: ...
    def cancel(self) -> None: ...


class ElasticDispatcher(ThreadedTaskDispatcher):
    """``n_base`` threads that stay and up to ``n_extra`` that come when all are busy and go when idle.

    Waitress's own dispatcher has a fixed number of threads: as many open streams would leave none for anybody else.
    """

    queue: Any

    def __init__(self, name: str, n_base: int, n_extra: int = 0, idle_s: float = IDLE_S) -> None:
        super().__init__()
        self._name = name
        self._n_base = n_base
        self._n_extra = n_extra
        self._idle_s = idle_s
        self._stopping = False
        #: Numbers of workers that are still to be started, and who starts them.
        self._unborn: collections.deque[int] = collections.deque()
        self._unborn_cv = threading.Condition(self.lock)
        self._starter: threading.Thread | None = None
        for number in range(n_base):
            self.threads.add(number)
            self.active_count += 1
            self._start(number)

    @property
    def n_threads(self) -> int:
        with self.lock:
            return len(self.threads)

    @property
    def n_busy(self) -> int:
        """Threads at work, plus jobs that wait for one."""
        with self.lock:
            return self.active_count + len(self.queue)

    def add_task(self, task: Any) -> None:
        """``task``: a :class:`Job`."""
        with self.lock:
            if self._stopping:
                task.cancel()
                return
            self.queue.append(task)
            # idle threads that were woken but have not taken their job yet count as idle, their jobs as queued
            if len(self.queue) > len(self.threads) - self.active_count:
                if len(self.threads) < self._n_base + self._n_extra:
                    self._add_worker()
            else:
                self.queue_cv.notify()

    def shutdown(self, cancel_pending: bool = True, timeout: float = 5) -> bool:
        """Let idle threads end and wait for busy ones; True when none is left after ``timeout`` seconds."""
        with self.lock:
            self._stopping = True
            while self._unborn:
                self._forget(self._unborn.popleft())
            self._unborn_cv.notify_all()
            while cancel_pending and self.queue:
                self.queue.popleft().cancel()
            self.queue_cv.notify_all()
            return self.thread_exit_cv.wait_for(lambda: not self.threads, timeout)

    def _add_worker(self) -> None:
        """Have one started, with the lock held: not here, for that lasts until the new thread has had its first turn.

        In a crowd of threads turns are rare, and the I/O thread has everybody else to look after.
        """
        number = next(i for i in range(len(self.threads) + 1) if i not in self.threads)
        self.threads.add(number)
        self.active_count += 1
        if self._starter is None:
            starter = threading.Thread(target=self._start_all, name=f"{self._name}-starter", daemon=True)
            try:
                starter.start()
            except RuntimeError as exc:
                self._forget(number)
                srv_wrn("workers", "cannot start an HTTP worker: %s", exc)
                return
            self._starter = starter
        self._unborn.append(number)
        self._unborn_cv.notify()

    def _forget(self, number: int) -> None:
        """A worker that was not started, with the lock held."""
        self.threads.discard(number)
        self.active_count -= 1
        self.thread_exit_cv.notify_all()

    def _start_all(self) -> None:
        while True:
            with self.lock:
                self._unborn_cv.wait_for(lambda: self._stopping or self._unborn)
                if self._stopping:
                    return
                number = self._unborn.popleft()
            self._start(number)

    def _start(self, number: int) -> None:
        thread = threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the system allows no more threads: the job waits for one that exists
            with self.lock:
                self._forget(number)
            srv_wrn("workers", "cannot start an HTTP worker: %s", exc)

    def _has_news(self) -> bool:
        return self._stopping or bool(self.queue)

    def _work(self, number: int) -> None:
        while True:
            with self.lock:
                n_idle = len(self.threads) - self.active_count
                self.active_count -= 1
                is_extra = len(self.threads) > self._n_base
                if not is_extra or n_idle < self._n_base:
                    self.queue_cv.wait_for(self._has_news, self._idle_s if is_extra else None)
                if not self.queue and (self._stopping or len(self.threads) > self._n_base):
                    self.threads.discard(number)
                    self.thread_exit_cv.notify_all()
                    return
                self.active_count += 1
                if not self.queue:
                    continue
                job = self.queue.popleft()
            try:
                job.service()
            except BaseException as exc:
                srv_err("workers", "exception while serving a request: %r", exc)
            del job


class Lanes:
    """Chooses the pool for each request.

    ``is_short(job)`` names requests that are answered from memory. They have threads of their own, so that they are
    answered at once even when every thread of the main pool is busy.
    """

    def __init__(self, n_base: int, is_short: Callable[[Job], bool], n_short: int = 2) -> None:
        self.main = ElasticDispatcher("http", n_base, MAX_EXTRA)
        self.short = ElasticDispatcher("http-short", n_short)
        self._is_short = is_short

    @property
    def n_busy(self) -> int:
        return self.main.n_busy + self.short.n_busy

    def add_task(self, task: Job) -> None:
        (self.short if self._is_short(task) else self.main).add_task(task)

    def shutdown(self, timeout: float) -> bool:
        """End all threads; True when none is left after ``timeout`` seconds at most."""
        deadline = time.monotonic() + timeout
        self.short.shutdown(timeout=0)
        ended = self.main.shutdown(timeout=timeout)
        return self.short.shutdown(timeout=max(0.0, deadline - time.monotonic())) and ended
