"""Bytes that are no HTTP, or nearly: each gets a well-formed answer or a closed connection, and the server lives."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from http_harness import Harness, serve, wait_for
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from llamasrv.http.config import HttpConfig

BODY = b'{"stream": false}'
VALID = [
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS /echo HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
    b"POST /echo HTTP/1.0\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nhi",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
]
PIECES = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"%00", b"%zz", b"/..//", b"\xff\xfe",
    b"\xf0\x9f\x98\x80", b"Content-Length: 5\r\n", b"Content-Length: +5\r\n", b"Content-Length: 5, 5\r\n",
    b"Content-Length: 1e3\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length:\r\n",
    b"Content-Length : 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity, chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n", b"Transfer-Encoding: chunked, chunked\r\n", b" obs-fold\r\n",
    b"\tobs-fold\r\n", b"A: " + b"a" * 9000 + b"\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"0x5\r\n", b"5\r\n",
    b"0\r\n\r\n", b"HTTP/9.9", b"HTTP/1.1\r\n", b"GET http://x/ ", b"Upgrade: h2c\r\n", b"Connection: close\r\n",
    b"Host: x\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"X-Api-Key: \xff\r\n",
    b"Authorization: Bearer \0\r\n", b"Range: bytes=0-\r\n", b"Origin: null\r\n",
]  # fmt: skip
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) [ -~]*\r\n")


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Valid requests one after the other, with some bytes put in, taken out, doubled or changed."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(VALID), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at:at] = draw(st.sampled_from(PIECES))
            case 1:
                del data[at : at + draw(st.integers(1, 12))]
            case 2:
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
            case 3 if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case _:
                # between two lines, where it is a header
                place = data.find(b"\r\n", at)
                data[place + 2 : place + 2] = draw(st.sampled_from(PIECES))
    return bytes(data)


@pytest.fixture(scope="module")
def served() -> Iterator[Harness]:
    with serve(HttpConfig(port=0, max_body_bytes=1 << 16)) as harness:
        yield harness


def talk(harness: Harness, data: bytes, cuts: list[int]) -> bytes:
    """What comes back to ``data``, sent in pieces, after which our side is shut."""
    answer = b""
    with socket.create_connection(("127.0.0.1", harness.port), timeout=30) as sock, contextlib.suppress(OSError):
        start = 0
        for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
            sock.sendall(data[start:cut])
            start = cut
        sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(65536):
            answer += part
    return answer


def check_answers(answer: bytes) -> int:
    """Number of whole HTTP responses that ``answer`` is made of; the last may be one to HEAD, without its body."""
    n_answers = 0
    while answer:
        match = STATUS_LINE.match(answer)
        assert match, answer[:200]
        status = int(match[1])
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert status in (100, 200, 400, 401, 404, 413, 417, 431, 500, 501, 505), head
        assert status != 500, answer[:500]
        if status == 100:
            answer = rest
            continue
        n_answers += 1
        length = re.search(rb"\r\nContent-Length: (\d+)", head)
        assert length, head
        size = int(length[1])
        if rest.startswith(b"HTTP/1.") or not rest:
            answer = rest  # to HEAD
            continue
        assert len(rest) >= size
        if status >= 400:
            assert b"application/json" in head
            assert rest[:size].startswith(b'{"error":')
        answer = rest[size:]
    return n_answers


@settings(
    max_examples=400,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=messages(), cuts=st.lists(st.integers(0, 500), max_size=4))
@example(VALID[3].replace(b"Host", b"Transfer-Encoding: chunked\r\nHost") + VALID[0], [])
@example(VALID[4].replace(b"Host", b"Content-Length: 4\r\nHost") + VALID[0], [])
@example(b"\r\n\r\n\r\n" + VALID[0], [2])
@example(b"\0" * 70_000, [])
@example(b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 60_000 + b"\r\n", [])
@example(b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n", [])
def test_every_answer_is_whole(served: Harness, data: bytes, cuts: list[int]) -> None:
    check_answers(talk(served, data, cuts))


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300))
def test_random_bytes_are_answered_or_cut_off(served: Harness, data: bytes) -> None:
    assert check_answers(talk(served, data, [])) <= 1 + data.count(b"\n")


@pytest.mark.parametrize(
    "data",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled ",
        b"Content-Length: 4\r\nContent-Length: 40\r\n\r\nabcdGET /smuggled HTTP/1.1\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\nGET /smuggled HTTP/1.1",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"A: b\r\n Content-Length: 40\r\n\r\n",
    ],
)
def test_a_request_of_two_lengths_hides_no_other(served: Harness, data: bytes) -> None:
    answer = talk(served, b"POST /echo HTTP/1.1\r\nHost: x\r\n" + data + b"HTTP/1.1\r\nHost: x\r\n\r\n", [])
    assert check_answers(answer) <= 2
    assert b"smuggled" not in answer
    old = b"POST /echo HTTP/1.0\r\nConnection: keep-alive\r\n" + data + b"HTTP/1.0\r\n\r\n"
    # the continued line belongs to A: a request without a body, and what follows is another, which is none
    is_whole = data.startswith(b"A:")
    assert check_answers(talk(served, old, [])) <= 1 + is_whole
    # what follows a request whose end is doubtful is not read
    if b"HTTP/1.1 200" in answer:
        assert answer.count(b"HTTP/1.1 404") == 0


def test_nothing_is_left_behind(served: Harness) -> None:
    threads = threading.active_count()
    for data in VALID * 5:
        talk(served, data[: len(data) // 2], [3])
        talk(served, data, [])
    assert served.request("GET", "/health")[0].status == 200
    assert wait_for(lambda: threading.active_count() <= threads + 1, 30)
