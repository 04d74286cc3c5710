"""The queue through which every request reaches the main loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from llamasrv.engine.log import que_dbg, que_inf
from llamasrv.engine.stats import now_us
from llamasrv.engine.task import NEEDS_SLOT, READ_ONLY, SLOT_ACTIONS, Posting, Task, TaskType

T = TypeVar("T")

#: How often an idle loop looks whether it may go to sleep, seconds.
MAX_WAIT_S = 1.0
#: How many tasks that name a slot may start before an older task that names none.
MAX_PASSED = 8
#: What does not start any more while the queue is drained.
_STARTS = NEEDS_SLOT | SLOT_ACTIONS


class ServerQueue:
    """Three deques and the loop that drains them.

    ``tasks`` holds work in order of arrival, ``deferred`` what waits for a slot (always in order of arrival),
    ``unhandled`` what the worker thread was offered during a native call and refused.

    Any thread may post. Callbacks run on the thread inside :meth:`start_loop`, except that the worker thread offers
    tasks to ``on_new_task`` while :meth:`yield_to_queue` runs. No lock is held while a callback runs.
    """

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.deferred: deque[Task] = deque()
        self.unhandled: deque[Task] = deque()
        self._lock = threading.Lock()
        self._wake_main = threading.Condition(self._lock)
        self._wake_worker = threading.Condition(self._lock)
        self._worker_idle = threading.Condition(self._lock)
        self._awake = threading.Condition(self._lock)
        self._loop_left = threading.Condition(self._lock)
        self._next_id = 0
        self._arrivals = 0
        self._terminated = False
        self._draining = False
        self._looping = False
        self._sleeping = False
        self._stop_sleeping = False
        self._n_awake_holders = 0
        self._time_last_task = time.monotonic()
        self._worker: threading.Thread | None = None
        self._worker_stop = False
        self._worker_busy = False
        self._worker_error: BaseException | None = None
        self._yielding = False
        self._on_new_task: Callable[[Task, bool], bool] = lambda task, is_yielding: True
        self._on_update_slots: Callable[[], None] = lambda: None
        self._on_cancel: Callable[[int], None] = lambda id_target: None
        self._on_refused: Callable[[Task], None] = lambda task: None
        self._on_sleeping_state: list[Callable[[bool], None]] = []

    # -- wiring, before the loop starts

    def on_new_task(self, callback: Callable[[Task, bool], bool]) -> None:
        """``callback(task, is_yielding)`` handles one task. It may return False to refuse, only while yielding."""
        self._on_new_task = callback

    def on_update_slots(self, callback: Callable[[], None]) -> None:
        """``callback()`` runs one step of inference for all slots."""
        self._on_update_slots = callback

    def on_cancel(self, callback: Callable[[int], None]) -> None:
        """``callback(id_target)`` hears of a CANCEL at once, on the posting thread, before the loop takes it."""
        self._on_cancel = callback

    def on_refused(self, callback: Callable[[Task], None]) -> None:
        """``callback(task)`` hears of each task that will not start because of :meth:`drain`, on any thread."""
        self._on_refused = callback

    def on_sleeping_state(self, callback: Callable[[bool], None]) -> None:
        """``callback(True)`` on falling asleep, in order of registration; ``callback(False)`` on waking, reversed."""
        self._on_sleeping_state.append(callback)

    # -- any thread

    def get_new_id(self) -> int:
        with self._lock:
            self._next_id += 1
            return self._next_id - 1

    def post(self, tasks: Task | Sequence[Task], front: bool = False) -> None:
        """Append tasks, or put them before all others. A CANCEL also removes its target from all three deques."""
        batch = [tasks] if isinstance(tasks, Task) else list(tasks)
        posting = Posting()
        for task in batch:
            task.posting = posting
        with self._lock:
            refused = self._refused(batch)
            if refused:
                batch = [task for task in batch if task.type not in _STARTS]
            wake_worker = False
            for task in batch:
                if task.type is TaskType.CANCEL:
                    self._remove_pending(task.id_target)
                if task.arrival < 0:
                    task.t_posted = now_us()
                    task.arrival = self._arrivals
                    self._arrivals += 1
                wake_worker |= task.type in READ_ONLY
                if task.type is not TaskType.METRICS:
                    self._time_last_task = time.monotonic()
            if front:
                self.tasks.extendleft(reversed(batch))
            else:
                self.tasks.extend(batch)
            if self._yielding:
                # the worker refuses everything else: waking it for that would only cost the GIL
                if wake_worker:
                    self._wake_worker.notify()
            else:
                self._wake_main.notify()
        for task in refused:
            self._on_refused(task)
        for task in batch:
            if task.type is TaskType.CANCEL:
                self._on_cancel(task.id_target)

    def defer(self, task: Task) -> None:
        """Set a task aside until a slot is free; it keeps its place by arrival."""
        with self._lock:
            refused = self._refused([task])
            if not refused:
                que_dbg("defer", "defer task, id = %d", task.id)
                later: list[Task] = []
                while self.deferred and self.deferred[-1].arrival > task.arrival:
                    later.append(self.deferred.pop())
                self.deferred.append(task)
                self.deferred.extend(reversed(later))
                self._time_last_task = time.monotonic()
        for task in refused:
            self._on_refused(task)

    def pop_deferred_task(self, id_slot: int) -> bool:
        """Move one task that can use the freed slot to the head of ``tasks``; True if there was one.

        A task that names this slot goes first, unless too many already passed an older one that names none. Tasks
        that wait for another slot stay.
        """
        with self._lock:
            task = self._pick_deferred(id_slot)
            if task is not None:
                que_dbg("pop_deferred", "pop deferred task (slot %d), id_task = %d", id_slot, task.id)
                self.deferred.remove(task)
                self.tasks.appendleft(task)
            self._time_last_task = time.monotonic()
            return task is not None

    def take_deferred(self, id_slot: int) -> Task | None:
        """Remove and return the task that :meth:`pop_deferred_task` would move."""
        with self._lock:
            task = self._pick_deferred(id_slot)
            if task is not None:
                self.deferred.remove(task)
            return task

    def _pick_deferred(self, id_slot: int) -> Task | None:
        any_slot: Task | None = None
        for task in self.deferred:
            if task.id_slot == id_slot:
                if any_slot is not None:
                    if any_slot.n_passed >= MAX_PASSED:
                        break
                    any_slot.n_passed += 1
                return task
            if task.id_slot == -1 and any_slot is None:
                any_slot = task
        return any_slot

    def has_deferred(self, id_slot: int) -> bool:
        """Whether a waiting task has an older claim than a newcomer that would take ``id_slot`` (-1: any slot)."""
        with self._lock:
            return any(task.id_slot in (-1, id_slot) for task in self.deferred)

    @property
    def n_deferred(self) -> int:
        return len(self.deferred)

    def is_sleeping(self) -> bool:
        with self._lock:
            return self._sleeping

    def wait_until_no_sleep(self) -> None:
        """Return once the engine is awake, waking it if need be. However many threads wait, it wakes once."""
        with self._lock:
            while self._sleeping and not self.is_ending:
                if not self._stop_sleeping:
                    self._stop_sleeping = True
                    self._wake_main.notify()
                self._awake.wait()

    def keep_awake(self) -> None:
        """Do not fall asleep until as many calls of :meth:`allow_sleep`; a sleeping engine sleeps on."""
        with self._lock:
            self._n_awake_holders += 1

    def allow_sleep(self) -> None:
        with self._lock:
            self._n_awake_holders -= 1

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Wake the engine if it sleeps, and keep it from falling asleep inside the ``with`` block.

        For threads that use the model's vocabulary without a task in the queue.
        """
        self.keep_awake()
        try:
            self.wait_until_no_sleep()
            yield
        finally:
            self.allow_sleep()

    def drain(self) -> None:
        """Begin to end, for good: only requests that have started are worked on.

        What waits for a slot, or is posted later and needs one, is refused. :meth:`start_loop` ends by itself once
        nothing is left to do; a sleeping engine ends at once.
        """
        with self._lock:
            self._draining = True
            refused: list[Task] = []
            for pending in (self.tasks, self.deferred, self.unhandled):
                refused += self._refused(pending)
            for task in refused:
                self._remove_pending(task.id)
            self._wake_main.notify_all()
            self._awake.notify_all()
        for task in refused:
            self._on_refused(task)

    def wait_until_drained(self, timeout: float) -> bool:
        """After :meth:`drain`, wait until no request is worked on any more; False after ``timeout`` seconds."""
        with self._lock:
            return self._loop_left.wait_for(
                lambda: self._terminated or self._sleeping or not self._looping, max(0.0, timeout)
            )

    def terminate(self) -> None:
        """End :meth:`start_loop`, for good."""
        with self._lock:
            self._terminate()

    def _terminate(self) -> None:
        self._terminated = True
        for condition in (self._wake_main, self._wake_worker, self._awake, self._loop_left):
            condition.notify_all()

    @property
    def terminated(self) -> bool:
        return self._terminated

    @property
    def is_ending(self) -> bool:
        """Whether :meth:`drain` or :meth:`terminate` was called."""
        return self._draining or self._terminated

    def _refused(self, tasks: Iterable[Task]) -> list[Task]:
        """Those of the tasks that may not start any more."""
        if not self._draining:
            return []
        return [task for task in tasks if task.type in _STARTS and not task.posting.is_started]

    def remove_pending(self, id_target: int) -> None:
        """Forget a task that has not started."""
        with self._lock:
            self._remove_pending(id_target)

    def _remove_pending(self, id_target: int) -> None:
        for pending in (self.tasks, self.deferred, self.unhandled):
            if any(task.id == id_target for task in pending):
                kept = [task for task in pending if task.id != id_target]
                pending.clear()
                pending.extend(kept)

    # -- the main-loop thread

    def start_loop(self, idle_sleep_ms: int = -1) -> None:
        """Run until :meth:`terminate`.

        One turn: take all tasks, update the slots, wait for more. After ``idle_sleep_ms`` without a task (negative:
        never; a METRICS task does not count) the engine falls asleep until :meth:`wait_until_no_sleep`.
        """
        with self._lock:
            self._looping = True
            self._time_last_task = time.monotonic()
            self._worker_stop = False
            self._worker = threading.Thread(target=self._worker_loop, name="queue-worker", daemon=True)
        self._worker.start()
        try:
            while not self._process_new_tasks(is_yielding=False):
                started = time.monotonic()
                self._on_update_slots()
                with self._lock:
                    # a long update is not idleness; shift rather than reset, so that METRICS tasks do not delay sleep
                    now = time.monotonic()
                    self._time_last_task = min(now, self._time_last_task + (now - started))
                self._wait_for_tasks(idle_sleep_ms)
        finally:
            self._stop_worker()
            with self._lock:
                self._looping = False
                self._loop_left.notify_all()

    def _wait_for_tasks(self, idle_sleep_ms: int) -> None:
        while True:
            with self._lock:
                if self._terminated or self.tasks:
                    return
                if self._draining:
                    # whatever is processed has posted its next turn
                    self._terminate()
                    return
                idle_ms = (time.monotonic() - self._time_last_task) * 1e3
                if idle_sleep_ms < 0 or idle_ms < idle_sleep_ms or self._n_awake_holders:
                    self._wake_main.wait(MAX_WAIT_S)
                    continue
                que_inf("start_loop", "entering sleeping state")
                self._sleeping = True
                self._stop_sleeping = False
            for callback in self._on_sleeping_state:
                callback(True)
            with self._lock:
                self._loop_left.notify_all()
                self._wake_main.wait_for(lambda: self.is_ending or self._stop_sleeping)
                if self.is_ending:
                    self._terminate()
                    return
                que_inf("start_loop", "exiting sleeping state")
            for callback in reversed(self._on_sleeping_state):
                callback(False)
            with self._lock:
                self._sleeping = False
                self._stop_sleeping = False
                self._time_last_task = time.monotonic()
                self._awake.notify_all()
            return

    def _process_new_tasks(self, is_yielding: bool) -> bool:
        """Offer every task to the callback. True when the queue is terminated."""
        while True:
            with self._lock:
                if self._terminated:
                    return True
                if not self.tasks or (is_yielding and not self._yielding):
                    return False
                task = self.tasks.popleft()
            if not self._on_new_task(task, is_yielding):
                # aside, not back: else it would be offered again at once
                with self._lock:
                    self.unhandled.append(task)

    def yield_to_queue(self, work: Callable[[], T]) -> T:
        """Run ``work`` on this thread while the worker thread answers read-only tasks; return its value.

        All other tasks are back in the queue, in their order, when this returns or raises. Must be called from
        within :meth:`start_loop`; cannot be nested. An exception of the worker is raised here.
        """
        with self._lock:
            if self._worker is None:
                raise RuntimeError("yield_to_queue() outside start_loop()")
            if self._yielding:
                raise RuntimeError("yield_to_queue() cannot be nested")
            self._yielding = True
            if any(task.type in READ_ONLY for task in self.tasks):
                self._wake_worker.notify()
        try:
            return work()
        finally:
            with self._lock:
                self._yielding = False
                while self._worker_busy:
                    self._worker_idle.wait()
                self.tasks.extendleft(reversed(self.unhandled))
                self.unhandled.clear()
                self._time_last_task = time.monotonic()
                error, self._worker_error = self._worker_error, None
            if error is not None:
                raise error

    # -- the worker thread

    def _worker_loop(self) -> None:
        while True:
            with self._lock:
                while not self._worker_stop and not (
                    self._yielding and any(task.type in READ_ONLY for task in self.tasks)
                ):
                    self._wake_worker.wait()
                if self._worker_stop:
                    return
                self._worker_busy = True
            error: BaseException | None = None
            try:
                self._process_new_tasks(is_yielding=True)
            except Exception as exc:
                error = exc
            with self._lock:
                self._worker_error = error
                self._worker_busy = False
                self._worker_idle.notify_all()
                if self._terminated:
                    return

    def _stop_worker(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
            self._worker_stop = True
            self._wake_worker.notify_all()
        if worker is not None:
            worker.join()
