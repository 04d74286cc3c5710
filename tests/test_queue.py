"""ServerQueue: order, deferral, cancellation, yielding, sleep, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from llamasrv.engine.queue import MAX_PASSED, ServerQueue
from llamasrv.engine.task import Task, TaskType

#: How long a test waits for what must happen, seconds; never reached when all is well.
PATIENCE = 10.0


def completion(queue: ServerQueue, id_slot: int = -1) -> Task:
    return Task(id=queue.get_new_id(), type=TaskType.COMPLETION, id_slot=id_slot)


def cancel(queue: ServerQueue, id_target: int) -> Task:
    return Task(id=queue.get_new_id(), type=TaskType.CANCEL, id_target=id_target)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def ids(tasks: object) -> list[int]:
    return [task.id for task in tasks]  # type: ignore[attr-defined]


class Loop:
    """A queue whose loop runs in a thread; records what the callbacks saw."""

    def __init__(self) -> None:
        self.queue = ServerQueue()
        self.seen: list[int] = []
        self.threads: list[str] = []
        self.while_yielding: list[int] = []
        self.on_update: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.queue.on_new_task(self._new_task)
        self.queue.on_update_slots(lambda: self.on_update())
        self.thread = threading.Thread(target=self._run, name="main-loop")

    def _new_task(self, task: Task, is_yielding: bool) -> bool:
        if is_yielding and task.type not in (TaskType.METRICS, TaskType.SLOT_GET):
            return False
        self.seen.append(task.id)
        self.threads.append(threading.current_thread().name)
        if is_yielding:
            self.while_yielding.append(task.id)
        return True

    def _run(self) -> None:
        try:
            self.queue.start_loop()
        except BaseException as error:
            self.error = error

    def update_once(self, update: Callable[[], None]) -> None:
        """Run ``update`` in the next step only."""
        done = threading.Event()

        def once() -> None:
            self.on_update = lambda: None
            try:
                update()
            finally:
                done.set()

        self.on_update = once
        self.queue.post(Task(id=self.queue.get_new_id(), type=TaskType.NEXT_RESPONSE))
        assert done.wait(PATIENCE)


@contextmanager
def running() -> Iterator[Loop]:
    loop = Loop()
    loop.thread.start()
    try:
        yield loop
    finally:
        loop.queue.terminate()
        loop.thread.join(PATIENCE)
        assert not loop.thread.is_alive()


def test_ids_count_up_from_zero_across_threads() -> None:
    queue = ServerQueue()
    drawn: list[int] = []
    threads = [threading.Thread(target=lambda: drawn.extend(queue.get_new_id() for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(800))


def test_tasks_are_handled_in_order_of_posting() -> None:
    with running() as loop:
        tasks = [completion(loop.queue) for _ in range(50)]
        loop.queue.post(tasks[:10])
        for task in tasks[10:]:
            loop.queue.post(task)
        wait_for(lambda: len(loop.seen) == 50)
    assert loop.seen == ids(tasks)
    assert set(loop.threads) == {"main-loop"}


def test_front_puts_a_batch_before_all_others_and_keeps_its_own_order() -> None:
    queue = ServerQueue()
    first, second, third, fourth = (completion(queue) for _ in range(4))
    queue.post(first)
    queue.post([second, third], front=True)
    queue.post(fourth)
    assert ids(queue.tasks) == [second.id, third.id, first.id, fourth.id]


def test_cancel_removes_its_target_from_every_deque() -> None:
    queue = ServerQueue()
    tasks = [completion(queue) for _ in range(6)]
    queue.post(tasks[:2])
    for task in tasks[2:4]:
        queue.defer(task)
    queue.unhandled.extend(tasks[4:])
    for target in (tasks[0], tasks[2], tasks[4]):
        queue.post(cancel(queue, target.id), front=True)
    assert [task.id for task in queue.tasks if task.type is TaskType.COMPLETION] == [tasks[1].id]
    assert ids(queue.deferred) == [tasks[3].id]
    assert ids(queue.unhandled) == [tasks[5].id]
    # the main loop still has to hear of it: the target may be running
    assert [task.id_target for task in queue.tasks if task.type is TaskType.CANCEL] == [4, 2, 0]


def test_cancel_of_an_unknown_task_touches_nothing() -> None:
    queue = ServerQueue()
    task = completion(queue)
    queue.post(task)
    queue.post(cancel(queue, 12345))
    assert task in queue.tasks


def test_deferred_tasks_come_back_one_by_one_in_order_of_arrival() -> None:
    queue = ServerQueue()
    tasks = [completion(queue) for _ in range(3)]
    queue.post(tasks)
    for _ in tasks:
        queue.defer(queue.tasks.popleft())
    assert queue.n_deferred == 3
    returned = []
    while queue.pop_deferred_task(0):
        assert len(queue.tasks) == 1
        returned.append(queue.tasks.popleft())
    assert returned == tasks
    assert queue.n_deferred == 0


def test_a_task_deferred_again_keeps_its_place() -> None:
    queue = ServerQueue()
    older, newer = completion(queue), completion(queue)
    queue.post([older, newer])
    queue.tasks.clear()
    queue.defer(newer)
    queue.defer(older)
    assert list(queue.deferred) == [older, newer]


def test_the_freed_slot_goes_to_the_task_that_named_it() -> None:
    queue = ServerQueue()
    any_slot, slot_1, slot_0 = completion(queue), completion(queue, 1), completion(queue, 0)
    queue.post([any_slot, slot_1, slot_0])
    for _ in range(3):
        queue.defer(queue.tasks.popleft())
    assert queue.pop_deferred_task(0)
    assert queue.tasks.popleft() is slot_0
    assert queue.pop_deferred_task(0)
    assert queue.tasks.popleft() is any_slot
    # what waits for slot 1 has no use of slot 0
    assert not queue.pop_deferred_task(0)
    assert queue.pop_deferred_task(1)
    assert queue.tasks.popleft() is slot_1


def test_a_returning_task_goes_before_newcomers() -> None:
    queue = ServerQueue()
    waiting, newcomer = completion(queue), completion(queue)
    queue.post(waiting)
    queue.defer(queue.tasks.popleft())
    queue.post(newcomer)
    queue.pop_deferred_task(0)
    assert list(queue.tasks) == [waiting, newcomer]


def test_tasks_that_name_a_slot_do_not_keep_others_out_for_ever() -> None:
    queue = ServerQueue()
    patient = completion(queue)
    queue.post(patient)
    queue.defer(queue.tasks.popleft())
    for n_passed in range(MAX_PASSED * 2):
        queue.post(completion(queue, 0))
        queue.defer(queue.tasks.pop())
        queue.pop_deferred_task(0)
        if queue.tasks.popleft() is patient:
            assert n_passed == MAX_PASSED
            return
    pytest.fail("the older task was passed over again and again")


def test_yielding_answers_read_only_tasks_on_the_worker_thread() -> None:
    with running() as loop:
        metrics = Task(id=loop.queue.get_new_id(), type=TaskType.METRICS)
        slots = Task(id=loop.queue.get_new_id(), type=TaskType.SLOT_GET)

        def work() -> str:
            loop.queue.post([metrics, slots])
            wait_for(lambda: len(loop.while_yielding) == 2)
            return "done"

        results: list[str] = []
        loop.update_once(lambda: results.append(loop.queue.yield_to_queue(work)))
        assert results == ["done"]
    assert loop.while_yielding == [metrics.id, slots.id]
    assert loop.threads[-2:] == ["queue-worker"] * 2


def test_read_only_tasks_that_waited_before_the_native_call_are_answered_during_it() -> None:
    with running() as loop:
        task = Task(id=loop.queue.get_new_id(), type=TaskType.METRICS)

        def update() -> None:
            loop.queue.post(task)
            loop.queue.yield_to_queue(lambda: wait_for(lambda: loop.while_yielding == [task.id]))

        loop.update_once(update)
    assert loop.while_yielding == [task.id]


def test_tasks_refused_while_yielding_come_back_in_their_order() -> None:
    with running() as loop:
        refused = [completion(loop.queue) for _ in range(5)]
        metrics = Task(id=loop.queue.get_new_id(), type=TaskType.METRICS)
        later = completion(loop.queue)
        in_queue: list[int] = []

        def work() -> None:
            loop.queue.post(refused[:3])
            loop.queue.post([*refused[3:], metrics])
            wait_for(lambda: loop.while_yielding == [metrics.id])
            loop.queue.post(later)

        def update() -> None:
            loop.queue.yield_to_queue(work)
            in_queue.extend(ids(loop.queue.tasks))

        loop.update_once(update)
        wait_for(lambda: later.id in loop.seen)
    expected = [*ids(refused), later.id]
    assert in_queue == expected
    assert [id_task for id_task in loop.seen if id_task in expected] == expected


def test_a_task_cancelled_while_it_waits_among_the_refused_never_starts() -> None:
    with running() as loop:
        task = completion(loop.queue)
        metrics = Task(id=loop.queue.get_new_id(), type=TaskType.METRICS)

        def work() -> None:
            loop.queue.post([task, metrics])
            wait_for(lambda: loop.while_yielding == [metrics.id])
            loop.queue.post(cancel(loop.queue, task.id), front=True)

        loop.update_once(lambda: loop.queue.yield_to_queue(work))
        last = completion(loop.queue)
        loop.queue.post(last)
        wait_for(lambda: last.id in loop.seen)
    assert task.id not in loop.seen


def test_an_exception_of_the_work_leaves_the_queue_whole() -> None:
    with running() as loop:
        task = completion(loop.queue)
        caught: list[str] = []

        def work() -> None:
            loop.queue.post(task)
            raise ValueError("native call failed")

        def update() -> None:
            try:
                loop.queue.yield_to_queue(work)
            except ValueError as error:
                caught.append(str(error))

        loop.update_once(update)
        wait_for(lambda: task.id in loop.seen)
        loop.update_once(lambda: loop.queue.yield_to_queue(lambda: None))
    assert caught == ["native call failed"]


def test_an_exception_of_the_worker_is_raised_by_yield() -> None:
    with running() as loop:
        handled: list[bool] = []

        def fail(task: Task, is_yielding: bool) -> bool:
            if is_yielding:
                handled.append(True)
                raise KeyError("no such slot")
            return True

        loop.queue.on_new_task(fail)
        caught: list[BaseException] = []

        def work() -> None:
            loop.queue.post(Task(id=loop.queue.get_new_id(), type=TaskType.METRICS))
            wait_for(lambda: bool(handled))

        def update() -> None:
            try:
                loop.queue.yield_to_queue(work)
            except KeyError as error:
                caught.append(error)

        loop.update_once(update)
        assert len(caught) == 1
        # the worker survives it
        loop.queue.on_new_task(loop._new_task)
        metrics = Task(id=loop.queue.get_new_id(), type=TaskType.METRICS)

        def again() -> None:
            loop.queue.post(metrics)
            wait_for(lambda: loop.while_yielding == [metrics.id])

        loop.update_once(lambda: loop.queue.yield_to_queue(again))


def test_yield_outside_the_loop_and_nested_is_refused() -> None:
    with pytest.raises(RuntimeError, match="outside"):
        ServerQueue().yield_to_queue(lambda: None)
    with running() as loop:
        caught: list[str] = []

        def nested() -> None:
            try:
                loop.queue.yield_to_queue(lambda: None)
            except RuntimeError as error:
                caught.append(str(error))

        loop.update_once(lambda: loop.queue.yield_to_queue(nested))
    assert len(caught) == 1
    assert "nested" in caught[0]


def test_terminate_ends_an_idle_loop_and_a_busy_one() -> None:
    with running() as loop:
        loop.queue.post(completion(loop.queue))
        wait_for(lambda: len(loop.seen) == 1)
    assert loop.error is None
    assert loop.queue.terminated

    with running() as loop:
        started = threading.Event()

        def work() -> None:
            started.set()
            wait_for(lambda: loop.queue.terminated)

        loop.on_update = lambda: loop.queue.yield_to_queue(work)
        loop.queue.post(completion(loop.queue))
        assert started.wait(PATIENCE)
        loop.queue.terminate()
        loop.thread.join(PATIENCE)
        assert not loop.thread.is_alive()
    assert loop.error is None


def test_tasks_posted_after_terminate_are_not_handled() -> None:
    with running() as loop:
        loop.queue.terminate()
        loop.thread.join(PATIENCE)
        loop.queue.post(completion(loop.queue))
    assert loop.seen == []


def test_no_worker_thread_outlives_the_loop() -> None:
    with running() as loop:
        loop.update_once(lambda: None)
        assert any(thread.name == "queue-worker" for thread in threading.enumerate())
    assert not any(thread.name == "queue-worker" for thread in threading.enumerate())


class Sleeper(Loop):
    """A loop that falls asleep after 30 ms without work."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[str, bool]] = []
        self.queue.on_sleeping_state(lambda asleep: self.states.append(("first", asleep)))
        self.queue.on_sleeping_state(lambda asleep: self.states.append(("second", asleep)))

    def _run(self) -> None:
        self.queue.start_loop(idle_sleep_ms=30)


@contextmanager
def sleeper() -> Iterator[Sleeper]:
    loop = Sleeper()
    loop.thread.start()
    try:
        yield loop
    finally:
        loop.queue.terminate()
        loop.thread.join(PATIENCE)
        assert not loop.thread.is_alive()


def test_an_idle_loop_falls_asleep_and_many_waiters_wake_it_once() -> None:
    with sleeper() as loop:
        wait_for(loop.queue.is_sleeping)
        woken: list[bool] = []

        def wait() -> None:
            loop.queue.wait_until_no_sleep()
            woken.append(True)

        threads = [threading.Thread(target=wait) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(woken) == 10
        wakes = loop.states[: loop.states.index(("first", False)) + 1]
        task = completion(loop.queue)
        loop.queue.post(task)
        wait_for(lambda: task.id in loop.seen)
    assert wakes == [("first", True), ("second", True), ("second", False), ("first", False)]


def test_waiting_while_awake_returns_at_once_and_termination_ends_a_sleep() -> None:
    with running() as awake:
        awake.queue.wait_until_no_sleep()
    with sleeper() as loop:
        wait_for(loop.queue.is_sleeping)


def test_metrics_tasks_do_not_keep_the_loop_awake() -> None:
    with sleeper() as loop:
        deadline = time.monotonic() + PATIENCE
        while not loop.queue.is_sleeping():
            assert time.monotonic() < deadline, "kept awake"
            loop.queue.post(Task(id=loop.queue.get_new_id(), type=TaskType.METRICS))
            time.sleep(0.005)


# -- draining


class Refusals:
    """What a queue refused."""

    def __init__(self, queue: ServerQueue) -> None:
        self.ids: list[int] = []
        queue.on_refused(lambda task: self.ids.append(task.id))


def test_a_drain_refuses_what_waits_and_what_comes_but_not_what_only_looks() -> None:
    queue = ServerQueue()
    refusals = Refusals(queue)
    waiting = [completion(queue) for _ in range(3)]
    save = Task(id=queue.get_new_id(), type=TaskType.SLOT_SAVE)
    metrics = Task(id=queue.get_new_id(), type=TaskType.METRICS)
    queue.post([waiting[0], metrics])
    queue.post(save)
    queue.defer(waiting[1])
    queue.unhandled.append(waiting[2])
    queue.drain()
    assert sorted(refusals.ids) == sorted([*ids(waiting), save.id])
    assert ids(queue.tasks) == [metrics.id]
    assert not queue.deferred
    assert not queue.unhandled

    late = completion(queue)
    queue.post([late, cancel(queue, 0)])
    queue.defer(completion(queue))
    assert refusals.ids[4:] == [late.id, late.id + 2]
    assert [task.type for task in queue.tasks] == [TaskType.METRICS, TaskType.CANCEL]
    assert not queue.deferred


def test_a_request_that_has_started_gets_its_other_tasks_done_in_a_drain() -> None:
    queue = ServerQueue()
    refusals = Refusals(queue)
    tasks = [completion(queue) for _ in range(4)]
    queue.post(tasks[:3])
    queue.post(tasks[3])
    queue.tasks.popleft()
    tasks[0].posting.is_started = True
    queue.tasks.remove(tasks[1])
    queue.drain()
    queue.defer(tasks[1])
    assert refusals.ids == [tasks[3].id]
    assert ids(queue.tasks) == [tasks[2].id]
    assert ids(queue.deferred) == [tasks[1].id]


def test_a_drained_loop_ends_once_nothing_is_processed() -> None:
    with running() as loop:
        loop.update_once(lambda: None)
        assert loop.queue.wait_until_drained(0) is False
        busy = threading.Event()

        def work() -> None:
            if not busy.is_set():
                loop.queue.post(Task(id=loop.queue.get_new_id(), type=TaskType.NEXT_RESPONSE))

        loop.on_update = work
        loop.queue.post(completion(loop.queue))
        wait_for(lambda: len(loop.seen) > 10)
        loop.queue.drain()
        assert loop.queue.wait_until_drained(0.05) is False
        assert loop.thread.is_alive()
        busy.set()
        assert loop.queue.wait_until_drained(PATIENCE)
        loop.thread.join(PATIENCE)
        assert not loop.thread.is_alive()


def test_a_drain_ends_an_idle_loop_and_a_sleeping_one() -> None:
    for idle_sleep_ms in (-1, 0):
        queue = ServerQueue()
        awake: list[bool] = []
        queue.on_sleeping_state(lambda asleep, awake=awake: awake.append(not asleep))  # type: ignore[misc]
        thread = threading.Thread(target=queue.start_loop, args=(idle_sleep_ms,))
        thread.start()
        if idle_sleep_ms == 0:
            wait_for(queue.is_sleeping)
        queue.drain()
        assert queue.wait_until_drained(PATIENCE)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        # it does not wake for that, nor for those who would wait for it
        assert awake == ([False] if idle_sleep_ms == 0 else [])
        queue.wait_until_no_sleep()


def test_a_queue_without_a_loop_is_drained() -> None:
    queue = ServerQueue()
    queue.drain()
    assert queue.wait_until_drained(0)
    queue.start_loop()
