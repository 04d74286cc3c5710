"""Requests as they come over the wire, good and bad ones: every answer is HTTP with a JSON body."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from flask import Response
from http_harness import Harness, plain_routes, read_all, read_until, serve

from llamasrv.http import channel
from llamasrv.http.config import HttpConfig
from llamasrv.http.route import Route
from llamasrv.http.state import ServerState


@pytest.fixture
def served() -> Iterator[Harness]:
    with serve(HttpConfig(port=0, max_body_bytes=1 << 20)) as harness:
        yield harness


def error_of(data: bytes) -> tuple[int, dict[str, object]]:
    """Status and error object of a raw response; the status line and the body must agree on the code."""
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert b"Content-Type: application/json; charset=utf-8" in head
    error = json.loads(body)["error"]
    assert error["code"] == status
    return status, error


@pytest.mark.parametrize(
    ("request_bytes", "status", "kind"),
    [
        pytest.param(b"GARBAGE\r\n\r\n", 400, "invalid_request_error", id="no start line"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_request_error", id="TLS"),
        pytest.param(b"GET http://[ HTTP/1.1\r\n\r\n", 400, "invalid_request_error", id="no URI"),
        pytest.param(b"get /health HTTP/1.1\r\n\r\n", 400, "invalid_request_error", id="lower-case method"),
        pytest.param(b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400, "invalid_request_error", id="bad header"),
        pytest.param(b"GET /health HTTP/1.1\r\nA: b\nC: d\r\n\r\n", 400, "invalid_request_error", id="bare LF"),
        pytest.param(
            b"POST /echo HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400, "invalid_request_error", id="negative length"
        ),
        pytest.param(
            b"POST /echo HTTP/1.1\r\nContent-Length: 1, 2\r\n\r\n", 400, "invalid_request_error", id="two lengths"
        ),
        pytest.param(
            b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request_error", id="chunk"
        ),
        pytest.param(
            b"POST /echo HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "not_supported_error", id="coding"
        ),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"a" * 300_000, 431, "invalid_request_error", id="long header"),
        pytest.param(b"GET /nope HTTP/1.1\r\nConnection: close\r\n\r\n", 404, "not_found_error", id="no route"),
        pytest.param(b"GET /echo HTTP/1.1\r\nConnection: close\r\n\r\n", 404, "not_found_error", id="wrong method"),
        pytest.param(b"BREW /health HTTP/1.1\r\nConnection: close\r\n\r\n", 404, "not_found_error", id="odd method"),
        pytest.param(b"GET //health HTTP/1.1\r\nConnection: close\r\n\r\n", 404, "not_found_error", id="two slashes"),
        pytest.param(b"GET /health/ HTTP/1.1\r\nConnection: close\r\n\r\n", 404, "not_found_error", id="last slash"),
        pytest.param(b"GET /fail HTTP/1.1\r\nConnection: close\r\n\r\n", 500, "server_error", id="exception"),
    ],
)
def test_every_error_is_json(served: Harness, request_bytes: bytes, status: int, kind: str) -> None:
    got, error = error_of(read_all(served.raw(request_bytes)))
    assert (got, error["type"]) == (status, kind)
    assert error["message"]
    assert served.request("GET", "/health")[0].status == 200


def test_a_body_over_the_limit_is_answered_even_while_it_is_still_being_sent(served: Harness) -> None:
    size = 8 << 20
    sock = served.raw(f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
    # all of it is taken, so that no reset destroys the answer on its way
    sock.sendall(b"x" * size)
    status, error = error_of(read_all(sock))
    assert (status, error["type"]) == (413, "invalid_request_error")


def test_a_chunked_body_over_the_limit_is_refused(served: Harness) -> None:
    sock = served.raw(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    block = b"%x\r\n" % (1 << 18) + b"x" * (1 << 18) + b"\r\n"
    for _ in range(8):
        sock.sendall(block)
    assert error_of(read_all(sock))[0] == 413


def test_a_connection_that_lingers_after_a_refusal_is_closed_in_the_end(
    served: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LINGER_S", 0.2)
    sock = served.raw(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
    assert error_of(read_all(sock))[0] == 413
    deadline = time.monotonic() + 60
    with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe, as the system likes
        while time.monotonic() < deadline:
            sock.sendall(b"x" * 1000)
            time.sleep(0.02)


def test_a_chunked_body_arrives_whole(served: Harness) -> None:
    sock = served.raw(
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    )
    assert read_until(sock, b"}").endswith(b'{"size":11}')


def test_a_body_sent_byte_by_byte_arrives_whole(served: Harness) -> None:
    sock = served.raw(b"")
    for byte in b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello":
        sock.sendall(bytes([byte]))
    assert read_until(sock, b"}").endswith(b'{"size":5}')


def test_expect_100_continue_is_answered_before_the_body(served: Harness) -> None:
    sock = served.raw(b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(b"hi")
    assert read_until(sock, b"}").endswith(b'{"size":2}')


def test_a_connection_serves_many_requests_errors_included(served: Harness) -> None:
    connection = served.connect()
    statuses = [
        served.request(method, path, connection=connection)[0].status
        for method, path in [("GET", "/health"), ("GET", "/nope"), ("GET", "/fail"), ("POST", "/echo")]
    ]
    assert statuses == [200, 404, 500, 200]
    sock = connection.sock
    served.request("GET", "/health", connection=connection)
    assert connection.sock is sock


def test_pipelined_requests_are_answered_in_order(served: Harness) -> None:
    sock = served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    data = b""
    while data.count(b"\r\n\r\n") < 6 or not data.endswith(b"}"):
        data += sock.recv(65536)
    bodies = [part.split(b"HTTP/")[0] for part in data.split(b"\r\n\r\n")[1:]]
    assert bodies == [b'{"status":"ok"}', b'{"data":[]}'] * 3


@pytest.mark.parametrize(("keep_alive", "closed"), [(False, True), (True, False)])
def test_http_1_0_closes_unless_asked_to_keep_the_connection(served: Harness, keep_alive: bool, closed: bool) -> None:
    header = b"Connection: keep-alive\r\n" if keep_alive else b""
    sock = served.raw(b"GET /health HTTP/1.0\r\n" + header + b"\r\n")
    head = read_until(sock, b'{"status":"ok"}')
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"Content-Length: 15" in head
    if closed:
        assert sock.recv(1) == b""
    else:
        assert b"Connection: keep-alive" in head
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read_all(sock).endswith(b'{"status":"ok"}')


def test_connection_close_is_obeyed_and_said(served: Harness) -> None:
    data = read_all(served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert b"\r\nConnection: close\r\n" in data
    assert data.endswith(b'{"status":"ok"}')


def test_head_has_the_headers_of_get_and_no_body(served: Harness) -> None:
    sock = served.raw(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"Content-Length: 15" in head
    assert body == b""


def test_the_server_names_itself_as_the_original_does(served: Harness) -> None:
    assert served.request("GET", "/health")[0].headers["Server"] == "llama.cpp"


def test_headers_that_never_end_are_cut_off(served: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEADERS_S", 0.5)
    sock = served.raw(b"GET /health HTTP/1.1\r\n")
    deadline = time.monotonic() + 60
    with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe, as the system likes
        while time.monotonic() < deadline:
            sock.sendall(b"A: b\r\n")
            time.sleep(0.05)


def test_a_body_that_stops_coming_is_given_up_after_the_read_timeout() -> None:
    with serve(HttpConfig(port=0, timeout_read=1)) as served:
        sock = served.raw(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert sock.recv(1) == b""


def test_a_reader_that_takes_nothing_is_given_up_after_the_write_timeout() -> None:
    with serve(HttpConfig(port=0, timeout_write=1)) as served:
        sock = served.post_raw("/run", {"stream": True})
        task = served.context.next_task()
        for _ in range(200):  # more than any socket buffer takes
            served.context.part(task, "x" * 200_000)
        assert served.context.cancelled.get(timeout=60) == task.id
        sock.close()


def test_a_half_sent_request_at_the_end_of_input_costs_nothing(served: Harness) -> None:
    sock = served.raw(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    assert served.request("GET", "/health")[0].status == 200


def test_while_the_model_loads_everything_is_503_but_a_preflight() -> None:
    with serve(is_ready=False) as served:
        for method, path in [("GET", "/health"), ("POST", "/run"), ("GET", "/v1/models"), ("GET", "/nope")]:
            response, body = served.request(method, path)
            assert response.status == 503
            assert json.loads(body) == {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
        assert served.request("OPTIONS", "/run")[0].status == 200
        served.state.is_ready = True
        assert served.request("GET", "/health")[0].status == 200


def test_draining_refuses_new_connections_and_ends_open_ones_after_their_answer(served: Harness) -> None:
    idle = served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    read_until(idle, b"}")
    busy = served.post_raw("/run", {})
    task = served.context.next_task()
    served.server.stop_accepting()
    assert idle.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), timeout=60)
    served.context.end(task, "done")
    data = read_all(busy)
    assert b"\r\nConnection: close\r\n" in data
    assert data.endswith(b'["done"]')


def test_shutdown_cuts_what_does_not_end_in_time() -> None:
    inside, gate = threading.Event(), threading.Event()

    def wait() -> Response:
        inside.set()
        gate.wait(60)
        return Response()

    with serve(routes=lambda state: [Route("GET", "/wait", wait)]) as served:
        stuck = served.raw(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        assert inside.wait(60)
        assert served.server.shutdown(0.3) is False
        assert stuck.recv(1) == b""
        gate.set()


def test_routes_live_under_the_prefix_only() -> None:
    with serve(HttpConfig.from_params({"port": 0, "api_prefix": "ai/"}), routes=plain_routes) as served:
        assert served.request("GET", "/ai/health")[0].status == 200
        assert served.request("GET", "/health")[0].status == 404


def test_a_client_that_shuts_its_sending_side_still_gets_a_quick_answer(served: Harness) -> None:
    for _ in range(20):
        sock = served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock).endswith(b'{"status":"ok"}')


def test_large_bodies_need_no_room_on_the_disk() -> None:
    size = 32 << 20

    def routes(state: ServerState) -> list[Route]:
        large = Route("GET", "/large", lambda: Response(b"x" * size))
        return [*plain_routes(state), large]

    with serve(routes=routes) as served:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
            assert served.request("POST", "/echo", b"x" * size)[1] == b'{"size":%d}' % size
            assert len(served.request("GET", "/large")[1]) == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
