"""Resumable streams over real sockets: the writer goes on, readers come and go, a delete stops the work."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from http_harness import Harness, PlainFormat, read_all, read_until, serve, wait_for

from llamasrv.engine.result import ErrorResult, ErrorType
from llamasrv.engine.task import Task, TaskParams, TaskType
from llamasrv.http import resume
from llamasrv.http.config import HttpConfig
from llamasrv.http.errors import json_response
from llamasrv.http.resume import attach
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState

CHUNK_END = b"\n\n\r\n"
END = b"0\r\n\r\n"


def make_routes(state: ServerState) -> list[Route]:
    """POST /run posts one task and streams; streams are read again as in the product."""
    from flask import request

    def run() -> Any:
        client = Client(request.environ)
        reader = state.context.reader()
        ping = request.get_json().get("ping", 0)
        params = TaskParams(stream=True, sse_ping_interval=ping)
        task = Task(id=reader.new_id(), type=TaskType.COMPLETION, params=params)
        return attach(state, request.environ, reader, [task], PlainFormat(), client)

    health = Route("GET", "/health", lambda: json_response({"status": "ok"}), is_short=True)
    return [health, Route("POST", "/run", run), *resume.routes(state)]


@pytest.fixture
def served() -> Iterator[Harness]:
    with serve(HttpConfig(port=0, n_threads_http=1), make_routes) as harness:
        yield harness
        harness.state.streams.close()


def start(served: Harness, name: str = "c1") -> tuple[Any, Task]:
    """A stream under a conversation, and its task; the headers have been read."""
    sock = served.post_raw("/run", {}, headers=f"X-Conversation-Id: {name}\r\n")
    task = served.context.next_task()
    served.context.part(task, "one")
    read_until(sock, CHUNK_END)
    return sock, task


def replay(served: Harness, query: str) -> tuple[int, bytes, dict[str, str]]:
    response, body = served.request("GET", f"/v1/stream?{query}")
    return response.status, body, dict(response.getheaders())


def lookup(served: Harness, *names: str) -> list[dict[str, Any]]:
    response, body = served.request("POST", "/v1/streams/lookup", {"conversation_ids": list(names)})
    assert response.status == 200
    found: list[dict[str, Any]] = json.loads(body)
    return found


def is_done(served: Harness, name: str = "c1") -> bool:
    return [entry["is_done"] for entry in lookup(served, name)] == [True]


ALL = b'data: "one"\n\ndata: "two"\n\ndata: "end"\n\ndata: [END]\n\n'


def test_a_finished_stream_is_read_again(served: Harness) -> None:
    sock, task = start(served)
    served.context.part(task, "two")
    served.context.end(task, "end")
    read_until(sock, END)
    assert wait_for(lambda: is_done(served))
    status, body, headers = replay(served, "conv_id=c1")
    assert (status, body) == (200, ALL)
    assert headers["Content-Type"] == "text/event-stream"
    [entry] = lookup(served, "c1", "unknown")
    assert entry["conversation_id"] == "c1"
    assert entry["total_bytes"] == len(ALL)
    assert entry["completed_at"] >= entry["started_at"] > 1_700_000_000


def test_generation_goes_on_without_the_client(served: Harness) -> None:
    sock, task = start(served)
    sock.close()
    served.context.part(task, "two")
    assert wait_for(lambda: lookup(served, "c1")[0]["total_bytes"] == len(b'data: "one"\n\ndata: "two"\n\n'))
    assert not is_done(served)
    served.context.end(task, "end")
    assert wait_for(lambda: is_done(served))
    assert replay(served, "conv_id=c1&from=0")[1] == ALL
    assert served.context.cancelled.empty()


def test_a_client_that_leaves_before_the_first_byte_is_not_missed(served: Harness) -> None:
    sock = served.post_raw("/run", {}, headers="X-Conversation-Id: c1\r\n")
    task = served.context.next_task()
    sock.close()
    for text in ("one", "two"):
        served.context.part(task, text)
    served.context.end(task, "end")
    assert wait_for(lambda: is_done(served))
    assert replay(served, "conv_id=c1")[1] == ALL


def test_without_the_header_nothing_is_kept(served: Harness) -> None:
    sock = served.post_raw("/run", {})
    task = served.context.next_task()
    served.context.part(task, "one")
    read_until(sock, CHUNK_END)
    sock.close()
    assert served.context.cancelled.get(timeout=60) == task.id
    assert served.state.streams.find([""]) == []


def test_a_replay_begins_on_a_whole_frame(served: Harness) -> None:
    sock, task = start(served)
    served.context.part(task, "two")
    served.context.end(task, "end")
    read_until(sock, END)
    first = len(b'data: "one"\n\n')
    for offset, begin in ((0, 0), (1, 0), (first - 1, 0), (first, first), (first + 3, first), (len(ALL), len(ALL))):
        status, body, headers = replay(served, f"conv_id=c1&from={offset}")
        assert (status, body) == (200, ALL[begin:])
        assert headers["X-Stream-Offset"] == str(begin)
    assert replay(served, f"conv_id=c1&from={len(ALL) + 100}")[:2] == (200, b"")


def test_a_live_reader_gets_what_comes(served: Harness) -> None:
    sock, task = start(served)
    sock.close()
    reader = served.raw(b"GET /v1/stream?conv_id=c1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b'data: "one"' in read_until(reader, CHUNK_END)
    served.context.part(task, "two")
    assert b'data: "two"' in read_until(reader, CHUNK_END)
    served.context.end(task, "end")
    assert read_until(reader, END).endswith(END)


def test_a_live_reader_without_a_byte_to_read_has_its_headers(served: Harness) -> None:
    sock, task = start(served)
    reader = served.raw(b"GET /v1/stream?conv_id=c1&from=999 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200 OK" in read_until(reader, b"\r\n\r\n")
    served.context.end(task)
    read_until(sock, END)


def test_a_reader_that_leaves_frees_its_worker_and_harms_nobody(served: Harness) -> None:
    sock, task = start(served)
    reader = served.raw(b"GET /v1/stream?conv_id=c1 HTTP/1.1\r\nHost: x\r\n\r\n")
    read_until(reader, CHUNK_END)
    assert served.server.lanes.n_busy == 2
    reader.close()
    assert wait_for(lambda: served.server.lanes.n_busy == 1)
    served.context.end(task, "end")
    assert b"[END]" in read_until(sock, END)
    assert served.context.cancelled.empty()


def test_a_delete_stops_the_work(served: Harness) -> None:
    sock, task = start(served)
    reader = served.raw(b"GET /v1/stream?conv_id=c1 HTTP/1.1\r\nHost: x\r\n\r\n")
    read_until(reader, CHUNK_END)
    response, body = served.request("DELETE", "/v1/stream?conv_id=c1")
    assert (response.status, body) == (204, b"")
    assert served.context.cancelled.get(timeout=60) == task.id
    assert read_until(reader, END).endswith(END)
    assert b"[END]" not in read_until(sock, END)
    assert replay(served, "conv_id=c1")[0] == 404
    assert lookup(served, "c1") == []
    assert served.request("DELETE", "/v1/stream?conv_id=c1")[0].status == 204


def test_a_delete_before_the_first_result_is_an_error(served: Harness) -> None:
    sock = served.post_raw("/run", {}, headers="X-Conversation-Id: c1\r\nConnection: close\r\n")
    task = served.context.next_task()
    assert served.request("DELETE", "/v1/stream?conv_id=c1")[0].status == 204
    assert served.context.cancelled.get(timeout=60) == task.id
    head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert "cancelled" in json.loads(body)["error"]["message"]


def test_a_new_stream_ends_the_one_before(served: Harness) -> None:
    sock, first = start(served)
    other, second = start(served)
    assert served.context.cancelled.get(timeout=60) == first.id
    assert b"[END]" not in read_until(sock, END)
    served.context.end(second, "new")
    assert b'"new"' in read_until(other, END)
    assert wait_for(lambda: is_done(served))
    assert replay(served, "conv_id=c1")[1] == b'data: "one"\n\ndata: "new"\n\ndata: [END]\n\n'


def test_a_request_that_fails_leaves_nothing(served: Harness) -> None:
    sock = served.post_raw("/run", {}, headers="X-Conversation-Id: c1\r\nConnection: close\r\n")
    task = served.context.next_task()
    served.context.send(ErrorResult(id=task.id, type=ErrorType.INVALID_REQUEST, message="no"))
    assert read_all(sock).startswith(b"HTTP/1.1 400 ")
    assert lookup(served, "c1") == []


def test_an_error_in_the_middle_is_kept(served: Harness) -> None:
    sock, task = start(served)
    sock.close()
    served.context.send(ErrorResult(id=task.id, type=ErrorType.SERVER, message="broken"))
    assert wait_for(lambda: is_done(served))
    assert b'"broken"' in replay(served, "conv_id=c1")[1]


def test_names_may_hold_anything(served: Harness) -> None:
    name = "chat/1::org/model é"
    sock = served.post_raw("/run", {}, headers=f"X-Conversation-Id: {name}\r\n")
    sock.close()
    task = served.context.next_task()
    served.context.end(task, "x")
    assert wait_for(lambda: is_done(served, name) and is_done(served, "chat/1"))
    assert replay(served, "conv_id=chat%2F1%3A%3Aorg%2Fmodel%20%C3%A9")[0] == 200


@pytest.mark.parametrize(
    ("method", "query", "status", "text"),
    [
        ("GET", "", 400, "Missing conversation id"),
        ("GET", "?conv_id=", 400, "Missing conversation id"),
        ("DELETE", "", 400, "Missing conversation id"),
        ("GET", "?conv_id=none", 404, "not found or expired"),
        ("GET", "?conv_id=c1&from=x", 400, "Invalid 'from' offset"),
        ("GET", "?conv_id=c1&from=-1", 400, "Invalid 'from' offset"),
        ("GET", "?conv_id=c1&from=0", 400, "offset lost"),
    ],
)
def test_errors(served: Harness, method: str, query: str, status: int, text: str) -> None:
    session = served.state.streams.create_or_replace("c1")
    session._max_bytes = 4
    session.append(b"12345678")
    session.append(b"1234")
    response, body = served.request(method, f"/v1/stream{query}")
    assert response.status == status
    assert text in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"conversation_ids": "c1"}, {"conversation_ids": [1, "", None]}])
def test_a_lookup_of_nothing_finds_nothing(served: Harness, body: Any) -> None:
    served.state.streams.create_or_replace("c1")
    response, data = served.request("POST", "/v1/streams/lookup", body)
    assert (response.status, json.loads(data)) == (200, [])


def test_a_lookup_that_is_no_json_is_an_error(served: Harness) -> None:
    assert served.request("POST", "/v1/streams/lookup", b"{:")[0].status == 400


def test_a_delete_needs_no_free_worker(served: Harness) -> None:
    streams = [start(served, f"c{i}") for i in range(8)]
    tasks = {task.id for _, task in streams}
    for i in range(8):
        assert served.request("DELETE", f"/v1/stream?conv_id=c{i}")[0].status == 204
    assert {served.context.cancelled.get(timeout=60) for _ in streams} == tasks


def test_the_end_of_the_server_ends_every_reader(served: Harness) -> None:
    sock, _ = start(served)
    sock.close()
    reader = served.raw(b"GET /v1/stream?conv_id=c1 HTTP/1.1\r\nHost: x\r\n\r\n")
    read_until(reader, CHUNK_END)
    ended = threading.Event()

    def read() -> None:
        read_until(reader, END)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    served.state.streams.close()
    assert ended.wait(60)


def test_a_long_stream_stays_bounded(served: Harness) -> None:
    sock, task = start(served)
    sock.close()
    served.state.streams.find(["c1"])[0]._max_bytes = 1000
    for i in range(500):
        served.context.part(task, f"{i:04d}")
    served.context.end(task, "end")
    assert wait_for(lambda: is_done(served))
    assert replay(served, "conv_id=c1&from=0")[0] == 400
    first = served.state.streams.find(["c1"])[0].n_dropped
    status, body, _ = replay(served, f"conv_id=c1&from={first}")
    assert status == 200
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [END]\n\n")
    assert len(body) <= 1000
