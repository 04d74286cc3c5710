"""Threads: the pool grows and shrinks, and what is answered from memory never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from http_harness import Harness, read_until, serve, wait_for
from waitress import wasyncore

from llamasrv.http import workers
from llamasrv.http.channel import ApiChannel
from llamasrv.http.config import HttpConfig
from llamasrv.http.workers import ElasticDispatcher


class BlockingJob:
    """Runs until it is released."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.release = threading.Event()
        self.done = threading.Event()
        self.cancelled = False

    def service(self) -> None:
        self.started.set()
        assert self.release.wait(300)
        self.done.set()

    def cancel(self) -> None:
        self.cancelled = True


class QuickJob:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def service(self) -> None:
        self.call()

    def cancel(self) -> None: ...


def test_workers_are_added_while_all_are_busy_and_go_when_idle() -> None:
    pool = ElasticDispatcher("test", n_base=2, n_extra=50, idle_s=0.05)
    assert wait_for(lambda: pool.n_busy == 0)  # until then the base counts as busy, and more workers would come
    jobs = [BlockingJob() for _ in range(20)]
    for job in jobs:
        pool.add_task(job)
    for job in jobs:
        assert job.started.wait(60)
    assert pool.n_threads == 20
    for job in jobs:
        job.release.set()
    assert wait_for(lambda: pool.n_threads == 2)
    again = BlockingJob()
    pool.add_task(again)
    assert again.started.wait(60)
    again.release.set()
    assert pool.shutdown(timeout=60)


def test_jobs_beyond_the_limit_wait_and_are_done_in_order() -> None:
    pool = ElasticDispatcher("test", n_base=1, n_extra=1)
    blockers = [BlockingJob(), BlockingJob()]
    for job in blockers:
        pool.add_task(job)
        assert job.started.wait(60)
    order: list[int] = []
    for i in range(5):
        pool.add_task(QuickJob(lambda i=i: order.append(i)))
    assert pool.n_threads == 2
    assert pool.n_busy == 7
    assert order == []
    blockers[0].release.set()
    assert wait_for(lambda: len(order) == 5)
    assert order == [0, 1, 2, 3, 4]
    blockers[1].release.set()
    assert pool.shutdown(timeout=60)


def test_a_job_that_raises_does_not_cost_a_worker() -> None:
    pool = ElasticDispatcher("test", n_base=1)

    def fail() -> None:
        raise RuntimeError("broken job")

    done = threading.Event()
    pool.add_task(QuickJob(fail))
    pool.add_task(QuickJob(done.set))
    assert done.wait(60)
    assert pool.shutdown(timeout=60)


def test_shutdown_cancels_what_waits_and_reports_what_does_not_end() -> None:
    pool = ElasticDispatcher("test", n_base=1)
    running, waiting, late = BlockingJob(), BlockingJob(), BlockingJob()
    pool.add_task(running)
    assert running.started.wait(60)
    pool.add_task(waiting)
    assert pool.shutdown(timeout=0.05) is False
    assert waiting.cancelled
    pool.add_task(late)
    assert late.cancelled
    running.release.set()
    assert pool.shutdown(timeout=60)


def test_many_jobs_are_all_done_whatever_the_growth_and_shrinking() -> None:
    pool = ElasticDispatcher("test", n_base=1, n_extra=8, idle_s=0.001)
    count = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal count
        with lock:
            count += 1

    def feed() -> None:
        for _ in range(500):
            pool.add_task(QuickJob(work))

    feeders = [threading.Thread(target=feed) for _ in range(4)]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    assert wait_for(lambda: count == 2000)
    assert pool.shutdown(timeout=60)


def open_streams(served: Harness, n: int) -> list:
    socks = [served.post_raw("/run", {"stream": True}) for _ in range(n)]
    for _ in range(n):
        served.context.begin(served.context.next_task())
    for sock in socks:
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    return socks


def test_health_answers_while_two_hundred_streams_are_open() -> None:
    with serve(HttpConfig(port=0, n_threads_http=2)) as served:
        socks = open_streams(served, 200)
        assert served.server.lanes.main.n_threads >= 200
        for path in ["/health", "/v1/models"]:
            assert served.request("GET", path)[0].status == 200
        assert served.request("POST", "/echo", b"abc")[1] == b'{"size":3}'
        for sock in socks:
            sock.close()
        assert wait_for(lambda: served.server.lanes.n_busy == 0)


def test_health_answers_even_when_no_worker_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_EXTRA", 0)
    with serve(HttpConfig(port=0, n_threads_http=3)) as served:
        socks = open_streams(served, 3)
        waiting = served.post_raw("/echo", {})
        for method, path in [("GET", "/health"), ("GET", "/v1/models"), ("HEAD", "/health"), ("OPTIONS", "/run")]:
            assert served.request(method, path)[0].status == 200
        assert served.raw(b"GARBAGE\r\n\r\n").recv(12) == b"HTTP/1.0 400"
        assert wait_for(lambda: served.server.lanes.main.n_busy == 4)
        socks[0].close()
        assert read_until(waiting, b"}").endswith(b'{"size":2}')
        for sock in socks:
            sock.close()


def test_a_crowd_is_accepted_at_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    seen: list[int] = []
    poll = wasyncore.poll2

    def counting(timeout: float, socket_map: dict[int, Any]) -> None:
        seen.append(sum(isinstance(each, ApiChannel) for each in socket_map.values()))
        poll(timeout, socket_map)

    monkeypatch.setattr(wasyncore, "poll2", counting)
    with serve() as served:
        blocked = threading.Event()

        def block() -> None:
            blocked.set()
            gate.wait(60)

        served.server._in_loop(block)
        assert blocked.wait(60)
        socks = [served.raw(b"") for _ in range(100)]
        gate.set()
        assert wait_for(lambda: seen[-1] == 100)
        assert set(seen) == {0, 100}
        for sock in socks:
            sock.close()
        assert wait_for(lambda: seen[-1] == 0)


def test_nobody_waits_while_a_thread_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ElasticDispatcher("test", n_base=1, n_extra=5)
    blocker = BlockingJob()
    pool.add_task(blocker)
    assert blocker.started.wait(60)
    gate, held = threading.Event(), threading.Event()
    start = threading.Thread.start

    def slow_start(self: threading.Thread) -> None:
        if self.name == "test-1":
            held.set()
            assert gate.wait(300)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    order: list[int] = []
    for i in range(3):
        pool.add_task(QuickJob(lambda i=i: order.append(i)))
    assert held.wait(60)
    assert pool.n_busy >= 4
    # the one that there is does them meanwhile
    blocker.release.set()
    assert wait_for(lambda: len(order) == 3)
    assert order == [0, 1, 2]
    gate.set()
    assert pool.shutdown(timeout=60)


def test_a_lost_chance_to_start_a_thread_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ElasticDispatcher("test", n_base=1, n_extra=5)
    blocker = BlockingJob()
    pool.add_task(blocker)
    assert blocker.started.wait(60)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pool.add_task(QuickJob(done.set))
    blocker.release.set()
    assert done.wait(60)
    assert pool.shutdown(timeout=60)
