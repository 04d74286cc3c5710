"""What an HTTP thread holds while its request is worked on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from llamasrv.engine.log import srv_wrn
from llamasrv.engine.queue import ServerQueue
from llamasrv.engine.response import Mailbox, ServerResponse
from llamasrv.engine.result import (
    DecisionResult,
    EmbeddingResult,
    ErrorResult,
    ErrorType,
    FinalResult,
    PartialResult,
    RerankResult,
    Result,
)
from llamasrv.engine.task import NEEDS_SLOT, Task, TaskType

#: How often a waiting reader looks whether its client is still there, seconds.
POLL_S = 1.0


@dataclass(slots=True)
class Usage:
    """Tokens of a request, as far as its results told; ``n_prompt`` with, ``n_cached`` of them from a cache."""

    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0


class ResponseReader:
    """Posts the tasks of one request and reads their results; cancels what is unfinished when it is left.

    Used by one thread, for one post; :meth:`cancel` and the properties by any thread. ``limit``: the request is refused
    when so many tasks hold a slot or wait for one (None: never).
    """

    def __init__(
        self, queue: ServerQueue, response: ServerResponse, poll_s: float = POLL_S, limit: int | None = None
    ) -> None:
        self._queue = queue
        self._response = response
        self._poll_s = poll_s
        self._limit = limit
        self._deadline: float | None = None
        self._timeout_s = 0.0
        #: Why the request ends before its time.
        self._error: ErrorResult | None = None
        self._is_reserved = False
        self._ids: list[int] = []
        self._unfinished: set[int] = set()
        #: The latest result of each task.
        self._last: dict[int, Result] = {}
        self._children: set[int] = set()
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

    @property
    def ids(self) -> list[int]:
        """Ids of the tasks posted, children too."""
        return self._ids

    @property
    def is_answered(self) -> bool:
        """Whether tasks were posted of which none wants a slot any more."""
        return self._box is not None and not any(self._response.is_open(id_task) for id_task in self._ids)

    @property
    def usage(self) -> Usage:
        """All tokens so far; a prompt that several completions share counts once."""
        total = Usage()
        for id_task, result in list(self._last.items()):
            if isinstance(result, PartialResult | FinalResult):
                total.n_generated += result.n_decoded
                n_prompt, n_cached = result.n_prompt_tokens, result.n_prompt_tokens_cache
            elif isinstance(result, EmbeddingResult | RerankResult | DecisionResult):
                n_prompt, n_cached = result.n_tokens, 0
            else:
                continue
            if id_task not in self._children:
                total.n_prompt += n_prompt
                total.n_cached += n_cached
        return total

    def set_timeout(self, timeout_s: float, began: float) -> None:
        """End the request with an error ``timeout_s`` seconds after ``began`` (monotonic clock)."""
        self._timeout_s = timeout_s
        self._deadline = began + timeout_s

    def cancel(self, message: str, type_: ErrorType = ErrorType.INVALID_REQUEST) -> None:
        """End the request with an error, from any thread. Without effect once its last result was read."""
        self._error = ErrorResult(id=-1, type=type_, message=message)
        box = self._box
        if box is not None:
            box.interrupt()

    def new_id(self) -> int:
        return self._queue.get_new_id()

    def reserve(self, tasks: list[Task]) -> None:
        """Claim the places in the queue that the tasks need. :meth:`post_tasks` does so where nobody has before.

        Raises :class:`QueueFullError`.
        """
        if not self._is_reserved:
            self._is_reserved = True
            wanted = [id_task for task in tasks if task.type in NEEDS_SLOT for id_task in task.ids()]
            if wanted:
                self._response.open(wanted, self._limit)
                self._ids = wanted  # stop() gives the places back

    def post_task(self, task: Task, front: bool = False) -> None:
        self.post_tasks([task], front)

    def post_tasks(self, tasks: list[Task], front: bool = False) -> None:
        """Number the tasks and their children in order (``index``), wait for all their ids and post them.

        Raises RuntimeError when called twice, and :class:`QueueFullError`.
        """
        if self._box is not None:
            raise RuntimeError("a reader posts once")
        self.reserve(tasks)
        ids: list[int] = []
        index = 0
        for task in tasks:
            for part in (task, *task.child_tasks):
                part.index = index
                index += 1
                ids.append(part.id)
                if part.is_child:
                    self._children.add(part.id)
        self._ids = ids
        self._unfinished = set(ids)
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
            if self._error is not None:
                return self._fail(self._error)
            wait = self._poll_s
            if deadline is not None or self._deadline is not None:
                now = time.monotonic()
                if self._deadline is not None:
                    if now >= self._deadline:
                        message = f"The request took longer than its timeout_s of {self._timeout_s:g} seconds"
                        return self._fail(ErrorResult(id=-1, type=ErrorType.TIMEOUT, message=message))
                    wait = min(wait, self._deadline - now)
                if deadline is not None:
                    wait = min(wait, max(0.0, deadline - now))
            result = self._response.recv(self._box, wait)
            if result is not None:
                self._last[result.id] = result
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

    def _fail(self, error: ErrorResult) -> ErrorResult:
        self.stop()
        return error

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
