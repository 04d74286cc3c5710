"""ServerResponse and ResponseReader: results reach the one who waits, and nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from llamasrv.engine import response as response_module
from llamasrv.engine.queue import ServerQueue
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.response import QueueFullError, ServerResponse
from llamasrv.engine.result import EmbeddingResult, ErrorResult, ErrorType, FinalResult, PartialResult, Result
from llamasrv.engine.task import Task, TaskType

#: How long a test waits for what must happen, seconds; never reached when all is well.
PATIENCE = 10.0


def never() -> bool:
    return False


class Server:
    def __init__(self) -> None:
        self.queue = ServerQueue()
        self.response = ServerResponse()

    def reader(self, poll_s: float = 0.01, limit: int | None = None) -> ResponseReader:
        return ResponseReader(self.queue, self.response, poll_s, limit)

    def task(self) -> Task:
        return Task(id=self.queue.get_new_id(), type=TaskType.COMPLETION)

    def cancelled(self) -> list[int]:
        return [task.id_target for task in self.queue.tasks if task.type is TaskType.CANCEL]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_results_arrive_in_order_of_sending() -> None:
    response = ServerResponse()
    box = response.add_waiting_task_ids([1, 2])
    for id_task, content in ((1, b"a"), (2, b"b"), (1, b"c")):
        response.send(PartialResult(id=id_task, content=content))
    got = [response.recv(box, 0) for _ in range(3)]
    assert [(result.id, result.content) for result in got if isinstance(result, PartialResult)] == [
        (1, b"a"),
        (2, b"b"),
        (1, b"c"),
    ]


def test_a_result_goes_to_its_own_mailbox_only() -> None:
    response = ServerResponse()
    mine, other = response.add_waiting_task_ids([1]), response.add_waiting_task_ids([2])
    response.send(FinalResult(id=2))
    assert response.recv(mine, 0) is None
    result = response.recv(other, 0)
    assert result is not None
    assert result.id == 2


def test_results_nobody_waits_for_are_dropped() -> None:
    response = ServerResponse()
    response.send(FinalResult(id=1))
    box = response.add_waiting_task_ids([1])
    assert response.recv(box, 0) is None
    response.remove_waiting_task_ids([1])
    assert not response.is_waiting(1)
    response.send(FinalResult(id=1))
    assert response.recv(box, 0) is None


def test_recv_returns_none_after_its_time_out_and_not_before() -> None:
    response = ServerResponse()
    box = response.add_waiting_task_ids([1])
    started = time.monotonic()
    assert response.recv(box, 0.05) is None
    assert time.monotonic() - started >= 0.05


def test_recv_wakes_when_a_result_is_sent() -> None:
    response = ServerResponse()
    box = response.add_waiting_task_ids([1])
    got: list[Result | None] = []
    thread = in_thread(lambda: got.append(response.recv(box, PATIENCE)))
    response.send(FinalResult(id=1))
    thread.join(PATIENCE)
    assert [result.id for result in got if result is not None] == [1]


def test_terminate_wakes_all_but_hands_out_what_was_sent() -> None:
    response = ServerResponse()
    empty, full = response.add_waiting_task_ids([1]), response.add_waiting_task_ids([2])
    got: list[Result | None] = []
    thread = in_thread(lambda: got.append(response.recv(empty, PATIENCE)))
    response.send(FinalResult(id=2))
    response.terminate()
    thread.join(PATIENCE)
    assert got == [None]
    assert response.terminated
    assert response.recv(full, PATIENCE) is not None
    assert response.recv(full, PATIENCE) is None


def test_reader_numbers_tasks_and_children_in_order() -> None:
    server = Server()
    parent, last = server.task(), server.task()
    parent.add_child(server.queue.get_new_id())
    parent.add_child(server.queue.get_new_id())
    with server.reader() as reader:
        reader.post_tasks([parent, last])
        assert [parent.index, *(child.index for child in parent.child_tasks), last.index] == [0, 1, 2, 3]
        assert list(server.queue.tasks) == [parent, last]
        assert all(server.response.is_waiting(id_task) for id_task in [*parent.ids(), last.id])


def test_reader_collects_all_final_results_by_index() -> None:
    server = Server()
    tasks = [server.task() for _ in range(3)]
    with server.reader() as reader:
        reader.post_tasks(tasks)
        for task in (tasks[2], tasks[0], tasks[1]):
            server.response.send(PartialResult(id=task.id, index=task.index))
            server.response.send(FinalResult(id=task.id, index=task.index))
        results = reader.wait_for_all(never)
        assert isinstance(results, list)
        assert [result.id for result in results] == [task.id for task in tasks]
        assert not reader.has_next()
    assert server.cancelled() == []


def test_reader_yields_partial_results_until_the_last_task_ended() -> None:
    server = Server()
    first, second = server.task(), server.task()
    with server.reader() as reader:
        reader.post_tasks([first, second])
        for result in (
            PartialResult(id=first.id, content=b"x"),
            FinalResult(id=second.id),
            PartialResult(id=first.id, content=b"y"),
            FinalResult(id=first.id),
        ):
            server.response.send(result)
        seen = []
        while reader.has_next():
            result_ = reader.next(never)
            assert result_ is not None
            seen.append((result_.id, result_.is_stop))
    assert seen == [(first.id, False), (second.id, True), (first.id, False), (first.id, True)]


def test_leaving_a_reader_cancels_what_is_unfinished_first_in_the_queue() -> None:
    server = Server()
    tasks = [server.task() for _ in range(3)]
    with server.reader() as reader:
        reader.post_tasks(tasks)
        server.queue.tasks.clear()
        waiting = server.task()
        server.queue.post(waiting)
        server.response.send(FinalResult(id=tasks[1].id))
        assert reader.next(never) is not None
    assert server.cancelled() == [tasks[0].id, tasks[2].id]
    assert server.queue.tasks[-1] is waiting
    assert not any(server.response.is_waiting(task.id) for task in tasks)


def test_leaving_a_reader_by_an_exception_cancels_too() -> None:
    server = Server()
    task = server.task()
    with pytest.raises(BrokenPipeError), server.reader() as reader:
        reader.post_task(task)
        raise BrokenPipeError
    assert server.cancelled() == [task.id]
    assert task not in server.queue.tasks


def test_an_error_ends_the_request_and_cancels_the_others() -> None:
    server = Server()
    tasks = [server.task() for _ in range(3)]
    with server.reader() as reader:
        reader.post_tasks(tasks)
        server.response.send(FinalResult(id=tasks[0].id))
        server.response.send(ErrorResult(id=tasks[1].id, message="no room"))
        result = reader.wait_for_all(never)
        assert isinstance(result, ErrorResult)
        assert result.message == "no room"
        assert not reader.has_next()
        assert server.cancelled() == [tasks[2].id]
    assert server.cancelled() == [tasks[2].id]


def test_cancelling_a_parent_cancels_its_children() -> None:
    server = Server()
    parent = server.task()
    parent.add_child(server.queue.get_new_id())
    with server.reader() as reader:
        reader.post_task(parent)
    assert server.cancelled() == parent.ids()


def test_next_asks_whether_the_client_is_still_there() -> None:
    server = Server()
    asked: list[bool] = []

    def gone() -> bool:
        asked.append(True)
        return len(asked) == 3

    with server.reader() as reader:
        reader.post_task(server.task())
        assert reader.next(gone) is None
        assert len(asked) == 3
        assert not reader.terminated
    assert len(server.cancelled()) == 1


def test_next_gives_up_after_its_time_out() -> None:
    server = Server()
    with server.reader(poll_s=PATIENCE) as reader:
        reader.post_task(server.task())
        started = time.monotonic()
        assert reader.next(never, timeout=0.05) is None
        assert time.monotonic() - started >= 0.05
        # nothing is lost by that: the request goes on
        assert reader.has_next()


def test_termination_ends_a_waiting_reader() -> None:
    server = Server()
    with server.reader(poll_s=PATIENCE) as reader:
        reader.post_task(server.task())
        got: list[object] = []
        thread = in_thread(lambda: got.append(reader.wait_for_all(never)))
        server.response.terminate()
        thread.join(PATIENCE)
        assert got == [None]
        assert reader.terminated


def test_a_reader_posts_once_and_reads_only_after_posting() -> None:
    server = Server()
    with server.reader() as reader:
        with pytest.raises(RuntimeError):
            reader.next(never)
        reader.post_task(server.task())
        with pytest.raises(RuntimeError):
            reader.post_task(server.task())


def test_many_readers_get_their_own_results() -> None:
    server = Server()
    n_readers, n_results = 8, 200
    tasks = [server.task() for _ in range(n_readers)]
    ready = threading.Barrier(n_readers + 1)
    received: dict[int, list[bytes]] = {}

    def read(task: Task) -> None:
        with server.reader() as reader:
            reader.post_task(task)
            ready.wait(PATIENCE)
            contents = []
            while reader.has_next():
                result = reader.next(never)
                if isinstance(result, PartialResult):
                    contents.append(result.content)
            received[task.id] = contents

    threads = [in_thread(lambda task=task: read(task)) for task in tasks]  # type: ignore[misc]
    ready.wait(PATIENCE)
    for number in range(n_results):
        for task in tasks:
            server.response.send(PartialResult(id=task.id, content=f"{task.id}/{number}".encode()))
    for task in tasks:
        server.response.send(FinalResult(id=task.id))
    for thread in threads:
        thread.join(PATIENCE)
    assert received == {task.id: [f"{task.id}/{n}".encode() for n in range(n_results)] for task in tasks}
    assert server.cancelled() == []


def test_a_request_that_takes_too_long_ends_with_an_error_and_is_cancelled() -> None:
    server = Server()
    task = server.task()
    with server.reader(poll_s=PATIENCE) as reader:
        reader.set_timeout(0.05, time.monotonic())
        reader.post_task(task)
        result = reader.next(never)
        assert isinstance(result, ErrorResult)
        assert result.type is ErrorType.TIMEOUT
        assert "0.05 seconds" in result.message
        assert server.cancelled() == [task.id]
        assert not reader.has_next()


def test_what_came_before_the_limit_of_time_is_handed_out() -> None:
    server = Server()
    task = server.task()
    with server.reader() as reader:
        reader.set_timeout(PATIENCE, time.monotonic())
        reader.post_task(task)
        server.response.send(FinalResult(id=task.id))
        assert isinstance(reader.next(never), FinalResult)


def test_a_ping_is_due_before_the_limit_of_time() -> None:
    server = Server()
    with server.reader(poll_s=PATIENCE) as reader:
        reader.set_timeout(PATIENCE, time.monotonic())
        reader.post_task(server.task())
        assert reader.next(never, timeout=0.01) is None
        assert reader.has_next()


def test_a_cancelled_request_wakes_its_reader_at_once() -> None:
    server = Server()
    task = server.task()
    got: list[Result | None] = []
    with server.reader(poll_s=PATIENCE) as reader:
        reader.post_task(task)
        thread = in_thread(lambda: got.append(reader.next(never)))
        reader.cancel("enough")
        thread.join(PATIENCE)
    [result] = got
    assert isinstance(result, ErrorResult)
    assert (result.type, result.message) == (ErrorType.INVALID_REQUEST, "enough")
    assert server.cancelled() == [task.id]


def test_a_request_cancelled_before_its_tasks_are_posted_ends_too() -> None:
    server = Server()
    with server.reader(poll_s=PATIENCE) as reader:
        reader.cancel("enough")
        reader.post_task(server.task())
        assert isinstance(reader.wait_for_all(never), ErrorResult)


def test_a_full_queue_refuses_what_comes_and_keeps_what_is_there() -> None:
    server = Server()
    first, second, third = (server.reader(limit=2) for _ in range(3))
    parent = server.task()
    parent.add_child(server.queue.get_new_id())
    first.post_task(parent)
    with pytest.raises(QueueFullError):
        second.post_task(server.task())
    assert server.response.n_refused == 1
    assert list(server.queue.tasks) == [parent]
    # the child's place is free again as soon as its result is there, though nobody has read it
    server.response.send(FinalResult(id=parent.child_tasks[0].id))
    third.post_task(server.task())
    assert server.response.n_open == 2
    for reader in (first, second, third):
        reader.stop()
    assert server.response.n_open == 0


def test_a_request_larger_than_the_queue_is_taken_as_a_whole_when_there_is_room() -> None:
    server = Server()
    with server.reader(limit=2) as reader:
        reader.post_tasks([server.task() for _ in range(5)])
        assert server.response.n_open == 5
        with pytest.raises(QueueFullError):
            server.reader(limit=2).post_task(server.task())
    assert server.response.n_open == 0


def test_a_reserved_place_is_given_back_by_a_reader_that_never_posts() -> None:
    server = Server()
    with server.reader(limit=1) as reader:
        reader.reserve([server.task()])
        with pytest.raises(QueueFullError):
            server.reader(limit=1).reserve([server.task()])
    server.reader(limit=1).reserve([server.task()])


def test_tasks_without_a_slot_never_find_the_queue_full() -> None:
    server = Server()
    with server.reader(limit=0) as reader:
        reader.post_task(Task(id=server.queue.get_new_id(), type=TaskType.METRICS))
        assert server.response.n_open == 0


def test_the_usage_counts_a_shared_prompt_once_and_every_completion() -> None:
    server = Server()
    parent = server.task()
    parent.add_child(server.queue.get_new_id())
    [child] = parent.child_tasks
    other = Task(id=server.queue.get_new_id(), type=TaskType.EMBEDDING)
    with server.reader() as reader:
        assert reader.usage.n_prompt == 0
        reader.post_tasks([parent, other])
        server.response.send(PartialResult(id=child.id, n_decoded=3, n_prompt_tokens=10, n_prompt_tokens_cache=4))
        server.response.send(FinalResult(id=parent.id, n_decoded=5, n_prompt_tokens=10, n_prompt_tokens_cache=4))
        server.response.send(EmbeddingResult(id=other.id, n_tokens=7))
        for _ in range(3):
            reader.next(never)
        usage = reader.usage
        assert (usage.n_prompt, usage.n_cached, usage.n_generated) == (17, 4, 8)


def test_results_that_nobody_fetches_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_module, "MAX_UNREAD", 3)
    server = Server()
    overflown: list[list[int]] = []
    server.response.on_overflow(overflown.append)
    first, second, other = server.task(), server.task(), server.task()
    with server.reader() as reader, server.reader() as bystander:
        reader.post_tasks([first, second])
        bystander.post_task(other)
        for i in range(3):
            server.response.send(PartialResult(id=first.id, content=b"%d" % i))
        server.response.send(FinalResult(id=second.id))
        assert overflown == []
        for _ in range(5):
            server.response.send(PartialResult(id=first.id, content=b"lost"))
        assert overflown == [[first.id, second.id]]
        assert not server.response.is_waiting(first.id)
        assert server.response.is_waiting(other.id)
        got = [reader.next(never) for _ in range(5)]
        assert [result.content for result in got[:3] if isinstance(result, PartialResult)] == [b"0", b"1", b"2"]
        assert isinstance(got[3], FinalResult)
        assert isinstance(got[4], ErrorResult)
        assert not reader.has_next()
