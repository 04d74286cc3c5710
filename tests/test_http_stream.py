"""Streams over real sockets: when bytes leave, how a stream ends, and who notices that a client has gone."""

from __future__ import annotations

import json
import threading

import pytest
from http_harness import Harness, plain_routes, read_all, read_until, serve, wait_for

from llamasrv.api.errors import ApiError
from llamasrv.engine.result import ErrorResult, ErrorType, Result
from llamasrv.http import sse
from llamasrv.http.route import Route
from llamasrv.http.state import ServerState

CHUNK_END = b"\n\n\r\n"


@pytest.fixture
def served():
    with serve() as harness:
        yield harness


def frames(data: bytes) -> list[object]:
    """JSON of each data frame in a body, chunked or not."""
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line[6:]) if line != b"data: [END]" else "[END]" for line in lines]


def test_a_chunk_arrives_before_the_next_result_exists(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    for text in ("one", "two", "three"):
        served.context.part(task, text)
        assert f'data: "{text}"'.encode() in read_until(sock, CHUNK_END)
    served.context.end(task, "end")
    assert frames(read_until(sock, b"0\r\n\r\n")) == ["end", "[END]"]


def test_headers_leave_with_the_first_result_even_if_it_has_no_text(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    served.context.begin(task)
    head = read_until(sock, b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Type: text/event-stream\r\n" in head
    assert b"\r\nX-Accel-Buffering: no\r\n" in head
    assert b"\r\nTransfer-Encoding: chunked\r\n" in head
    served.context.end(task)


def test_an_error_before_the_first_result_has_its_own_status(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True}, headers="Connection: close\r\n")
    task = served.context.next_task()
    error = ErrorResult(id=task.id, type=ErrorType.EXCEED_CONTEXT_SIZE, message="too long", n_prompt_tokens=9, n_ctx=8)
    served.context.send(error)
    head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body) == {
        "error": {
            "code": 400,
            "message": "too long",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 9,
            "n_ctx": 8,
        }
    }


def test_an_error_after_the_first_result_is_a_frame_and_ends_the_stream(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    served.context.part(task, "a")
    read_until(sock, CHUNK_END)
    served.context.send(ErrorResult(id=task.id, type=ErrorType.SERVER, message="decode failed"))
    rest = read_until(sock, b"0\r\n\r\n")
    assert rest.endswith(b"0\r\n\r\n")
    assert frames(rest) == [{"error": {"code": 500, "message": "decode failed", "type": "server_error"}}]


def test_silence_is_filled_with_comments(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True, "ping": 1})
    task = served.context.next_task()
    served.context.begin(task)
    read_until(sock, b"\r\n\r\n")
    assert read_until(sock, CHUNK_END) == b"3\r\n:\n\n\r\n"
    assert read_until(sock, CHUNK_END) == b"3\r\n:\n\n\r\n"
    served.context.end(task, "x")
    assert frames(read_until(sock, b"0\r\n\r\n")) == ["x", "[END]"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_while_waiting_cancels_its_task(served: Harness, stream: bool) -> None:
    sock = served.post_raw("/run", {"stream": stream})
    task = served.context.next_task()
    sock.close()
    assert served.context.cancelled.get(timeout=60) == task.id


def test_a_client_that_hangs_up_mid_stream_cancels_its_task(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    served.context.part(task, "a")
    read_until(sock, CHUNK_END)
    sock.close()
    assert served.context.cancelled.get(timeout=60) == task.id


def test_a_client_that_leaves_while_text_flows_cancels_its_task(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    done = threading.Event()

    def produce() -> None:
        while not done.wait(0.002):
            served.context.part(task, "text")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        read_until(sock, CHUNK_END)
        sock.close()
        assert served.context.cancelled.get(timeout=60) == task.id
    finally:
        done.set()
        thread.join()


def test_a_finished_stream_cancels_nothing(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    served.context.end(task, "x")
    read_until(sock, b"0\r\n\r\n")
    sock.close()
    # a second request proves that whatever the first one posted has been handled
    other = served.post_raw("/run", {"stream": True})
    served.context.end(served.context.next_task())
    read_until(other, b"0\r\n\r\n")
    assert served.context.cancelled.empty()


def test_the_connection_lives_on_after_a_stream(served: Harness) -> None:
    connection = served.connect()
    for _ in range(3):
        connection.request("POST", "/run", json.dumps({"stream": True}), {"Content-Type": "application/json"})
        task = served.context.next_task()
        served.context.part(task, "a")
        served.context.end(task, "b")
        response = connection.getresponse()
        assert frames(response.read()) == ["a", "b", "[END]"]
        assert not response.will_close
    assert served.request("GET", "/health", connection=connection)[0].status == 200


def test_http_1_0_streams_end_with_the_connection(served: Harness) -> None:
    sock = served.post_raw("/run", {"stream": True}, version="1.0")
    task = served.context.next_task()
    served.context.part(task, "a")
    assert b'data: "a"\n\n' in read_until(sock, b"\n\n")
    served.context.end(task, "b")
    assert read_all(sock) == b'data: "b"\n\ndata: [END]\n\n'


def test_termination_ends_open_streams_with_an_error_frame_and_waiting_requests_with_503(served: Harness) -> None:
    stream = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    served.context.part(task, "a")
    read_until(stream, CHUNK_END)
    waiting = served.post_raw("/run", {"stream": False})
    served.context.next_task()
    served.context.terminate()
    assert frames(read_until(stream, b"0\r\n\r\n")) == [
        {"error": {"code": 503, "message": "The server is shutting down", "type": "unavailable_error"}}
    ]
    assert read_until(waiting, b"\r\n").startswith(b"HTTP/1.1 503 ")


class BrokenFormat:
    """Fails on the second result."""

    def __init__(self) -> None:
        self.n = 0

    def frame(self, result: Result) -> bytes:
        self.n += 1
        if self.n > 1:
            raise ValueError("cannot format this")
        return b"data: 1\n\n"

    def error(self, error: ApiError) -> bytes:
        return f"data: [{error.status}]\n\n".encode()

    def end(self) -> bytes:
        return b"data: 2\n\n"


def test_a_failing_format_ends_the_stream_with_an_error_frame_and_cancels() -> None:
    def routes(state: ServerState) -> list[Route]:
        def run():
            from flask import request

            from llamasrv.engine.task import Task, TaskType

            reader = state.context.reader()
            reader.post_task(Task(id=reader.new_id(), type=TaskType.COMPLETION))
            return sse.stream_response(reader, BrokenFormat(), sse.Client(request.environ), 0)

        return [*plain_routes(state), Route("POST", "/broken", run)]

    with serve(routes=routes) as served:
        sock = served.post_raw("/broken", {})
        task = served.context.next_task()
        served.context.part(task, "a")
        served.context.part(task, "b")
        assert read_until(sock, b"0\r\n\r\n").endswith(b"data: [500]\n\n\r\n0\r\n\r\n")
        assert served.context.cancelled.get(timeout=60) == task.id


def test_a_slow_reader_blocks_nobody(served: Harness) -> None:
    slow = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    text = "x" * 200_000
    for _ in range(100):
        served.context.part(task, text)
    other = served.post_raw("/run", {"stream": True})
    other_task = served.context.next_task()
    served.context.end(other_task, "quick")
    assert frames(read_until(other, b"0\r\n\r\n")) == ["quick", "[END]"]
    assert served.request("GET", "/health")[0].status == 200
    served.context.end(task, "last")
    # and it gets everything, in order, once it reads
    got = frames(read_until_end_of_chunks(slow))
    assert got == [text] * 100 + ["last", "[END]"]


def read_until_end_of_chunks(sock) -> bytes:
    sock.settimeout(60)
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        more = sock.recv(1 << 20)
        if not more:
            break
        data += more
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    assert b"chunked" in head
    out = bytearray()
    while True:
        size, _, body = body.partition(b"\r\n")
        if int(size, 16) == 0:
            return bytes(out)
        out += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


def test_a_slow_reader_that_leaves_frees_its_worker(served: Harness) -> None:
    slow = served.post_raw("/run", {"stream": True})
    task = served.context.next_task()
    for _ in range(100):
        served.context.part(task, "x" * 200_000)
    assert wait_for(lambda: served.server.lanes.n_busy > 0)
    slow.close()
    assert served.context.cancelled.get(timeout=60) == task.id
    assert wait_for(lambda: served.server.lanes.n_busy == 0)
