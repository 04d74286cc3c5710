"""What an HTTP thread holds while its request is worked on."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from llamasrv.engine.log import srv_wrn
from llamasrv.engine.queue import ServerQueue
from llamasrv.engine.response import Mailbox, ServerResponse
from llamasrv.engine.result import ErrorResult, Result
from llamasrv.engine.task import Task, TaskType

#: How often a waiting reader looks whether its client is still there, seconds.
POLL_S = 1.0


class ResponseReader:
    """Posts the tasks of one request and reads their results; cancels what is unfinished when it is left.

    Used by one thread, for one post.
    """

    def __init__(self, queue: ServerQueue, response: ServerResponse, poll_s: float = POLL_S) -> None:
        self._queue = queue
        self._response = response
        self._poll_s = poll_s
        self._ids: list[int] = []
        self._unfinished: set[int] = set()
        self._box: Mailbox | None = None
        self._stopped = False
        self._holds = False

    def __enter__(self) -> ResponseReader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def terminated(self) -> bool:
        """Whether the server is shutting down."""
        return self._response.terminated

    def new_id(self) -> int:
        return self._queue.get_new_id()

    def post_task(self, task: Task, front: bool = False) -> None:
        self.post_tasks([task], front)

    def post_tasks(self, tasks: list[Task], front: bool = False) -> None:
        """Number the tasks and their children in order (``index``), wait for all their ids and post them.

        Raises RuntimeError when called twice.
        """
        if self._ids:
            raise RuntimeError("a reader posts once")
        index = 0
        for task in tasks:
            for part in (task, *task.child_tasks):
                part.index = index
                index += 1
                self._ids.append(part.id)
        self._unfinished = set(self._ids)
        # what is read may need the model's vocabulary to be shown; who only looks at counters keeps nobody awake
        self._holds = any(task.type is not TaskType.METRICS for task in tasks)
        if self._holds:
            self._queue.keep_awake()
        self._box = self._response.add_waiting_task_ids(self._ids)
        self._queue.post(tasks, front)

    def has_next(self) -> bool:
        """Whether results are still to come."""
        return bool(self._unfinished) and not self._stopped

    def next(self, should_stop: Callable[[], bool], timeout: float | None = None) -> Result | None:
        """The next result of any of the tasks.

        None when ``should_stop()`` (asked at least once a second while waiting) is true, when the server terminates,
        or after ``timeout`` seconds. An ErrorResult ends the request: everything else in it is cancelled.
        """
        if self._box is None:
            raise RuntimeError("nothing was posted")
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.has_next():
            wait = self._poll_s
            if deadline is not None:
                wait = min(wait, max(0.0, deadline - time.monotonic()))
            result = self._response.recv(self._box, wait)
            if result is not None:
                if result.is_stop:
                    self._unfinished.discard(result.id)
                if result.is_error:
                    self.stop()
                return result
            if self._response.terminated or should_stop():
                return None
            if deadline is not None and time.monotonic() >= deadline:
                return None
        return None

    def wait_for_all(self, should_stop: Callable[[], bool]) -> list[Result] | ErrorResult | None:
        """All final results ordered by index, or the first error, or None as in :meth:`next`."""
        results: list[Result] = []
        while self.has_next():
            result = self.next(should_stop)
            if result is None:
                return None
            if isinstance(result, ErrorResult):
                return result
            if result.is_stop:
                results.append(result)
        return sorted(results, key=lambda result: result.index)

    def stop(self) -> None:
        """Stop waiting; cancel the tasks that have not ended."""
        if self._stopped:
            return
        self._stopped = True
        if self._holds:
            self._queue.allow_sleep()
        self._response.remove_waiting_task_ids(self._ids)
        if self._unfinished:
            srv_wrn("stop", "cancel tasks %s", sorted(self._unfinished))
            self._queue.post(
                [
                    Task(id=self._queue.get_new_id(), type=TaskType.CANCEL, id_target=id_task)
                    for id_task in sorted(self._unfinished)
                ],
                front=True,
            )
