"""Requests have names: they are listed, logged, bounded in time and cancelled by them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from http_harness import Harness, read_all, read_until, serve, wait_for
from test_http_routes import answer_with, final, prepare, serve_api

from llamasrv.engine import log
from llamasrv.engine.result import EmbeddingResult, PartialResult, SlotSnapshot, SlotsResult
from llamasrv.engine.task import Task, TaskParams, TaskType
from llamasrv.http.config import HttpConfig

OWN_ID = re.compile(r"req_[0-9a-f]{24}")


@pytest.fixture
def served() -> Iterator[Harness]:
    with serve_api(endpoint_metrics=True) as harness:
        yield prepare(harness)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Lines of the log at the level that is on by default."""
    found: list[str] = []
    log.set_sink(lambda level, text: found.append(text), log.INFO)
    yield found
    log.set_sink(lambda level, text: None, 0)


def of_access(lines: list[str]) -> list[str]:
    return [line.partition("access: ")[2].rstrip("\n") for line in lines if "access: " in line]


def with_slots(served: Harness, *slots: SlotSnapshot) -> None:
    """Answer who asks for the slots, and keep all other tasks for the test."""

    def on_task(task: Task) -> None:
        if task.type is TaskType.SLOT_GET:
            served.context.send(SlotsResult(id=task.id, slots=list(slots)))
        else:
            served.context.tasks.put(task)

    served.context.on_task = on_task


def listed(served: Harness) -> list[dict[str, Any]]:
    response, body = served.request("GET", "/v1/requests")
    assert response.status == 200
    value = json.loads(body)
    assert value["object"] == "list"
    return list(value["data"])


def in_background(served: Harness, path: str, body: Any, name: str) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []

    def ask() -> None:
        response, data = served.request("POST", path, body, {"X-Request-Id": name})
        answers.append((response.status, json.loads(data)))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


# -- names


@pytest.mark.parametrize("path", ["/health", "/completion", "/nothing"])
def test_every_response_names_its_request(served: Harness, path: str) -> None:
    answer_with(served, "x")
    method, body = ("POST", {"prompt": "a"}) if path == "/completion" else ("GET", None)
    ids = {served.request(method, path, body)[0].headers["X-Request-Id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(OWN_ID.fullmatch(name) for name in ids)


def test_a_client_may_choose_the_name(served: Harness) -> None:
    response, _ = served.request("GET", "/health", headers={"X-Request-Id": "order-7.a:b"})
    assert response.headers["X-Request-Id"] == "order-7.a:b"


@pytest.mark.parametrize("name", ["", "with space", "a/b", "x" * 129, 'quote"', "caf\u00e9", "a%0d%0ab", "<b>"])
def test_a_name_that_cannot_be_used_is_replaced(served: Harness, name: str) -> None:
    response, _ = served.request("GET", "/health", headers={"X-Request-Id": name.encode("latin-1")})  # type: ignore[dict-item]
    assert response.status == 200
    assert OWN_ID.fullmatch(response.headers["X-Request-Id"])


def test_refused_requests_have_names_too() -> None:
    with serve(HttpConfig(port=0, api_keys=("secret",))) as served:
        response, _ = served.request("POST", "/echo", b"", {"X-Request-Id": "me"})
        assert (response.status, response.headers["X-Request-Id"]) == (401, "me")


def test_clients_of_anthropic_find_the_name_where_they_look(served: Harness) -> None:
    response, _ = served.request("POST", "/v1/messages", b"{", {"X-Request-Id": "me"})
    assert (response.status, response.headers["Request-Id"]) == (400, "me")
    assert "Request-Id" not in served.request("GET", "/health")[0].headers


# -- the list


def test_the_list_tells_who_runs_and_who_waits_and_not_what_they_say(served: Harness) -> None:
    body = {"prompt": "my secret", "stream": True, "timeout_s": 600}
    first = served.post_raw("/completion", body, headers="X-Request-Id: first\r\n")
    running = served.context.next_task()
    served.context.begin(running)
    read_until(first, b"\r\n\r\n")
    thread, answers = in_background(served, "/completion", {"prompt": "another secret"}, "second")
    waiting = served.context.next_task()
    slot = SlotSnapshot(
        id=1, n_ctx=64, is_processing=True, id_task=running.id, n_prompt_tokens_processed=5, n_prompt_tokens_cache=4
    )
    slot.n_decoded = 3
    # what was in a slot before is not at work in it
    with_slots(served, slot, SlotSnapshot(id=0, n_ctx=64, is_processing=False, id_task=waiting.id))
    entries = listed(served)
    assert "secret" not in json.dumps(entries)
    one, two = entries
    assert one.pop("elapsed_ms") > 0
    assert one.pop("created") > 1_700_000_000
    assert one.pop("caller").startswith("127.0.0.1:")
    assert one == {
        "id": "first",
        "object": "request",
        "status": "running",
        "method": "POST",
        "path": "/completion",
        "stream": True,
        "timeout_s": 600,
        "id_slots": [1],
        "n_prompt_tokens_processed": 5,
        "n_prompt_tokens_cache": 4,
        "n_decoded": 3,
    }
    assert (two["id"], two["status"], two["stream"], two["timeout_s"]) == ("second", "queued", False, None)
    for task in (running, waiting):
        served.context.send(final(task, "x"))
    thread.join(60)
    assert [status for status, _ in answers] == [200]
    assert wait_for(lambda: listed(served) == [])
    first.close()


def test_a_request_whose_answer_is_on_the_way_is_ending(served: Harness) -> None:
    headers = "X-Request-Id: slow\r\nConnection: close\r\n"
    sock = served.post_raw("/completion", {"prompt": "a", "stream": True}, headers=headers)
    task = served.context.next_task()
    # more than the sockets hold: its worker waits for the reader
    for _ in range(40):
        served.context.send(PartialResult(id=task.id, content=b"x" * 500_000))
    served.context.send(final(task, ""))
    with_slots(served)
    [entry] = listed(served)
    assert (entry["id"], entry["status"]) == ("slow", "ending")
    read_all(sock)
    assert wait_for(lambda: listed(served) == [])


def test_a_sleeping_engine_is_not_woken_to_say_that_nobody_is_there(served: Harness) -> None:
    served.context.queue.is_sleeping = lambda: True  # type: ignore[method-assign]
    assert listed(served) == []
    assert served.context.tasks.empty()


def test_a_client_that_hung_up_leaves_the_list(served: Harness) -> None:
    sock = served.post_raw("/completion", {"prompt": "a"})
    task = served.context.next_task()
    with_slots(served)
    assert len(listed(served)) == 1
    sock.close()
    assert served.context.cancelled.get(timeout=60) == task.id
    assert wait_for(lambda: listed(served) == [])


# -- cancelling


def test_a_plain_request_can_be_cancelled_by_its_name(served: Harness) -> None:
    thread, answers = in_background(served, "/completion", {"prompt": "a"}, "mine")
    task = served.context.next_task()
    response, body = served.request("DELETE", "/v1/requests/mine")
    assert (response.status, json.loads(body)) == (200, {"id": "mine", "object": "request", "cancelled": True})
    thread.join(60)
    [(status, answer)] = answers
    assert (status, answer["error"]["message"]) == (400, "The request was cancelled")
    assert served.context.cancelled.get(timeout=60) == task.id
    # its worker may still be about to forget it
    assert wait_for(lambda: served.request("DELETE", "/v1/requests/mine")[0].status == 404)


def test_a_cancelled_stream_ends_with_an_error_frame(served: Harness) -> None:
    sock = served.post_raw("/v1/completions", {"prompt": "a", "stream": True}, headers="X-Request-Id: mine\r\n")
    other = served.post_raw("/v1/completions", {"prompt": "a", "stream": True}, headers="X-Request-Id: other\r\n")
    tasks = [served.context.next_task(), served.context.next_task()]
    for task in tasks:
        served.context.begin(task)
    for one in (sock, other):
        read_until(one, b"\r\n\r\n")
    assert served.request("DELETE", "/v1/requests/mine")[0].status == 200
    text = read_until(sock, b"0\r\n\r\n").decode()
    assert '"The request was cancelled"' in text
    cancelled = served.context.cancelled.get(timeout=60)
    [left] = [task for task in tasks if task.id != cancelled]
    # the other goes on
    served.context.send(final(left, "done"))
    assert "[DONE]" in read_until(other, b"0\r\n\r\n").decode()


def test_requests_of_the_same_name_are_cancelled_together(served: Harness) -> None:
    asked = [in_background(served, "/completion", {"prompt": "a"}, "both") for _ in range(2)]
    ids = {served.context.next_task().id for _ in asked}
    assert served.request("DELETE", "/v1/requests/both")[0].status == 200
    for thread, _ in asked:
        thread.join(60)
    assert [answers[0][0] for _, answers in asked] == [400, 400]
    assert {served.context.cancelled.get(timeout=60) for _ in asked} == ids


def test_nobody_without_the_key_lists_or_cancels() -> None:
    with serve_api(api_keys=("secret",)) as served:
        prepare(served)
        assert served.request("GET", "/v1/requests")[0].status == 401
        assert served.request("DELETE", "/v1/requests/x")[0].status == 401
        assert served.request("DELETE", "/v1/requests/x", headers={"X-Api-Key": "secret"})[0].status == 404


# -- time


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_a_request_that_takes_longer_than_it_may_is_a_408(served: Harness, path: str) -> None:
    response, body = served.request("POST", path, {"prompt": "a", "timeout_s": 0.1})
    task = served.context.next_task()
    error = json.loads(body)["error"]
    assert (response.status, error["code"], error["type"]) == (408, 408, "timeout_error")
    assert error["message"] == "The request took longer than its timeout_s of 0.1 seconds"
    assert served.context.cancelled.get(timeout=60) == task.id


def test_a_stream_that_takes_longer_than_it_may_ends_with_an_error_frame(served: Harness) -> None:
    sock = served.post_raw("/completion", {"prompt": "a", "stream": True, "timeout_s": 0.5})
    task = served.context.next_task()
    served.context.part(task, "some text")
    text = read_until(sock, b"0\r\n\r\n").decode()
    assert text.index("some text") < text.index("timeout_error")
    assert served.context.cancelled.get(timeout=60) == task.id


def test_embeddings_take_the_limit_too(served: Harness) -> None:
    served.context.params["embedding"] = True
    served.context.meta = replace(served.context.meta, pooling_type=1, n_ubatch=64)
    assert served.request("POST", "/embedding", {"content": "a", "timeout_s": 0.1})[0].status == 408
    served.context.on_task = lambda task: served.context.send(EmbeddingResult(id=task.id, embedding=[[1.0]]))
    assert served.request("POST", "/embedding", {"content": "a", "timeout_s": 60})[0].status == 200


@pytest.mark.parametrize("value", ["1", -1, True, [], 1e30])
def test_a_limit_that_is_none_is_refused(served: Harness, value: Any) -> None:
    response, body = served.request("POST", "/completion", {"prompt": "a", "timeout_s": value})
    assert response.status == 400
    assert json.loads(body)["error"]["message"].startswith("Field 'timeout_s': ")
    assert served.context.tasks.empty()


@pytest.mark.parametrize("value", [None, 0, 600])
def test_without_a_limit_or_with_a_long_one_all_goes_on(served: Harness, value: Any) -> None:
    answer_with(served, "x")
    assert served.request("POST", "/completion", {"prompt": "a", "timeout_s": value})[0].status == 200


# -- a bounded queue


def test_a_full_queue_is_a_503_that_says_when_to_come_again(served: Harness) -> None:
    served.context.limit = 1
    first = served.post_raw("/completion", {"prompt": "a"})
    task = served.context.next_task()
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
        response, data = served.request("POST", "/completion", body)
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        error = json.loads(data)["error"]
        assert (error["code"], error["type"]) == (503, "unavailable_error")
        assert "full" in error["message"]
    assert served.context.tasks.empty()
    served.context.send(final(task, "x"))
    read_until(first, b'"content":"x"')
    answer_with(served, "y")
    assert served.request("POST", "/completion", {"prompt": "a"})[0].status == 200


def test_a_refusal_leaves_the_conversation_s_stream_alone(served: Harness) -> None:
    served.context.limit = 1
    header = "X-Conversation-Id: talk\r\n"
    first = served.post_raw("/completion", {"prompt": "a", "stream": True}, headers=header)
    task = served.context.next_task()
    served.context.begin(task)
    read_until(first, b"\r\n\r\n")
    again = served.post_raw("/completion", {"prompt": "a", "stream": True}, headers=header)
    assert read_until(again, b"\r\n").startswith(b"HTTP/1.1 503")
    served.context.send(final(task, "done"))
    assert b"done" in read_until(first, b"0\r\n\r\n")


# -- the log


def test_each_request_is_a_line_with_what_happened(served: Harness, lines: list[str]) -> None:
    def on_task(task: Task) -> None:
        result = final(task, "the answer")
        result.n_prompt_tokens, result.n_prompt_tokens_cache, result.n_decoded = 12, 3, 30
        served.context.send(result)

    served.context.on_task = on_task
    served.request("POST", "/completion", {"prompt": "my secret"}, {"X-Request-Id": "me"})
    assert wait_for(lambda: bool(of_access(lines)))
    [line] = of_access(lines)
    expected = r"POST /completion 200, [0-9.]+ ms, tokens: 12 prompt \(3 cached\) \+ 30, id me, from 127\.0\.0\.1:\d+"
    assert re.fullmatch(expected, line)
    assert not re.search("secret|answer", "".join(lines))


def test_a_stream_is_logged_when_it_ends_and_who_left_is_named(served: Harness, lines: list[str]) -> None:
    sock = served.post_raw("/completion", {"prompt": "a", "stream": True})
    task = served.context.next_task()
    served.context.send(PartialResult(id=task.id, content=b"x", n_decoded=2, n_prompt_tokens=5))
    read_until(sock, b"data: ")
    assert of_access(lines) == []
    sock.close()
    assert wait_for(lambda: bool(of_access(lines)))
    [line] = of_access(lines)
    assert line.startswith("POST /completion 200, ")
    assert "5 prompt (0 cached) + 2" in line
    assert line.endswith(", client left")


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_after_the_answer_has_not_left(served: Harness, lines: list[str], stream: bool) -> None:
    answer_with(served, "x")
    for _ in range(20):
        sock = served.post_raw("/v1/completions", {"prompt": "a", "stream": stream})
        read_until(sock, b"[DONE]" if stream else b'"text":"x0"')
        sock.close()
    assert wait_for(lambda: len(of_access(lines)) == 20)
    assert not any("client left" in line for line in lines)


def test_monitoring_is_not_logged_unless_it_fails(served: Harness, lines: list[str]) -> None:
    answer_with(served, "x")
    for path in ("/health", "/v1/models", "/props"):
        assert served.request("GET", path)[0].status == 200
    served.request("GET", "/nothing")
    assert wait_for(lambda: bool(of_access(lines)))
    [line] = of_access(lines)
    assert line.startswith("GET /nothing 404, ")


def test_failures_of_all_kinds_are_logged_with_their_status(lines: list[str]) -> None:
    with serve(HttpConfig(port=0, api_keys=("secret",))) as served:
        served.request("POST", "/echo", b"")
        served.request("GET", "/fail", headers={"X-Api-Key": "secret"})
        assert wait_for(lambda: len(of_access(lines)) == 2)
    assert [line.split(",")[0] for line in of_access(lines)] == ["POST /echo 401", "GET /fail 500"]
    assert "secret" not in "".join(lines)


@pytest.mark.parametrize(
    ("data", "start"),
    [
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: me\r\nContent-Length: 5000000\r\n\r\n", "POST /echo 413, "),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Request-Id: me\r\nContent-Length: -1\r\n\r\n", "POST /echo 400, "),
        (b"GARBAGE\r\n\r\n", "- - 400, "),
    ],
)
def test_what_is_no_request_has_a_name_and_a_line_too(lines: list[str], data: bytes, start: str) -> None:
    with serve(HttpConfig(port=0, max_body_bytes=1000)) as served:
        answer = read_until(served.raw(data), b"}}").decode()
        assert wait_for(lambda: bool(of_access(lines)))
    [line] = of_access(lines)
    assert line.startswith(start)
    name = line.partition(", id ")[2].partition(",")[0]
    assert name == "me" or "GARBAGE" in data.decode()
    assert f"X-Request-Id: {name}\r\n" in answer


def test_a_path_cannot_forge_a_line(served: Harness, lines: list[str]) -> None:
    served.request("GET", "/a%0asrv%20%20access:%20forged")
    assert wait_for(lambda: bool(of_access(lines)))
    assert all(line.count("\n") == 1 for line in lines)
    assert "GET /a\\nsrv" in "".join(lines)


def test_the_name_of_a_stream_cannot_forge_a_line(served: Harness, lines: list[str]) -> None:
    assert served.request("DELETE", "/v1/stream?conv_id=a%0asrv%20%20access:%20forged%1b")[0].status == 204
    assert wait_for(lambda: bool(of_access(lines)))
    assert "conv_id=a\\nsrv  access: forged\\x1b\n" in "".join(lines)
    assert all(line.count("\n") == 1 and "\x1b" not in line for line in lines)


def test_an_error_that_quotes_the_request_is_told_to_the_client_alone(served: Harness, lines: list[str]) -> None:
    item = {"content": "my secret", "type": "sheet"}
    response, body = served.request("POST", "/v1/responses", {"input": [item]})
    assert response.status == 400
    assert b"my secret" in body
    assert wait_for(lambda: bool(of_access(lines)))
    assert "POST /v1/responses 400" in "".join(lines)
    assert "secret" not in "".join(lines)


def test_structured_lines_have_the_same_facts(served: Harness) -> None:
    found: list[tuple[str, dict[str, Any]]] = []
    log.set_sink(lambda level, text: None, log.INFO, lambda kind, data: found.append((kind, json.loads(data))))
    try:
        answer_with(served, "x")
        served.request("POST", "/completion", {"prompt": "a"}, {"X-Request-Id": "me"})
        assert wait_for(lambda: bool(found))
    finally:
        log.set_sink(lambda level, text: None, 0)
    [(kind, data)] = found
    assert kind == "access"
    assert data.pop("ms") > 0
    assert data.pop("time") > 1_700_000_000
    assert data.pop("caller").startswith("127.0.0.1:")
    assert data == {
        "method": "POST",
        "path": "/completion",
        "status": 200,
        "n_prompt_tokens": 0,
        "n_prompt_tokens_cache": 0,
        "n_decoded": 0,
        "request_id": "me",
        "client_left": False,
    }


def test_settings_of_a_request_are_not_touched_by_its_limits(served: Harness) -> None:
    thread, _ = in_background(served, "/completion", {"prompt": "a", "timeout_s": 60, "n_predict": 3}, "me")
    task = served.context.next_task()
    assert task.params.n_predict == 3
    assert not hasattr(TaskParams(), "timeout_s")
    served.context.send(final(task, "x"))
    thread.join(60)
