"""The routes over a scripted engine: what is posted, what comes back, with which status and headers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from http_harness import Harness, read_until, serve

from llamasrv import binding
from llamasrv.engine.metrics import ServerMetrics
from llamasrv.engine.result import (
    ErrorResult,
    ErrorType,
    FinalResult,
    MetricsResult,
    PartialResult,
    SlotSnapshot,
    SlotsResult,
    StopType,
)
from llamasrv.engine.task import Task, TaskType
from llamasrv.http.config import HttpConfig
from llamasrv.http.routes import api_routes


class ByteVocab:
    """Each byte is a token."""

    n_tokens = 256

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int, special: bool) -> bytes:
        return bytes([token])

    def detokenize(self, tokens: Sequence[int], special: bool) -> bytes:
        return bytes(tokens)

    def text(self, tokens: Sequence[int], special: bool) -> bytes:
        return bytes(tokens)


def serve_api(**config: Any):
    return serve(HttpConfig(port=0, **config), api_routes)


def prepare(served: Harness) -> Harness:
    with binding.Params() as params:
        served.context.params = {**params.to_dict(), "n_parallel": 2}
    served.context.vocab = ByteVocab()
    return served


@pytest.fixture
def served() -> Iterator[Harness]:
    with serve_api(endpoint_metrics=True) as harness:
        yield prepare(harness)


def final(task: Task, text: str, index: int = 0) -> FinalResult:
    return FinalResult(
        id=task.id, index=index, content=text.encode(), params=task.params, prompt=task.tokens, stop=StopType.LIMIT
    )


def answer_with(served: Harness, text: str) -> None:
    """Answer every task and its children with ``text`` and the place in the request."""

    def on_task(task: Task) -> None:
        for part in (task, *task.child_tasks):
            served.context.send(final(part, f"{text}{part.index}", part.index))

    served.context.on_task = on_task


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_is_one_object(served: Harness, path: str) -> None:
    answer_with(served, "answer")
    response, body = served.request("POST", path, {"prompt": "ab", "n_predict": 3})
    assert response.status == 200
    assert response.headers["Content-Type"] == "application/json; charset=utf-8"
    value = json.loads(body)
    assert (value["content"], value["index"], value["stop_type"], value["model"]) == ("answer0", 0, "limit", "tiny")
    assert value["generation_settings"]["n_predict"] == 3


def test_several_prompts_and_completions_are_a_list_in_order(served: Harness) -> None:
    answer_with(served, "answer")
    _, body = served.request("POST", "/completion", {"prompt": ["a", "b"], "n_cmpl": 2})
    assert [(value["index"], value["content"]) for value in json.loads(body)] == [(i, f"answer{i}") for i in range(4)]


def test_the_task_carries_what_was_asked_for(served: Harness) -> None:
    sock = served.post_raw("/completion", {"prompt": "ab", "id_slot": 1, "temperature": 0.5, "stop": ["x"]})
    task = served.context.next_task()
    assert task.type is TaskType.COMPLETION
    assert (task.tokens, task.id_slot, task.params.sampling.temp) == ([97, 98], 1, 0.5)
    assert task.params.antiprompt == ("x",)
    served.context.send(final(task, ""))
    read_until(sock, b"}")


def test_a_native_stream_has_frames_and_just_ends(served: Harness) -> None:
    sock = served.post_raw("/completion", {"prompt": "ab", "stream": True})
    task = served.context.next_task()
    served.context.begin(task)
    assert b"text/event-stream" in read_until(sock, b"\r\n\r\n")
    served.context.send(PartialResult(id=task.id, content="é".encode(), tokens=[5], n_decoded=1, n_prompt_tokens=2))
    chunk = read_until(sock, b"\n\n\r\n")
    assert json.loads(chunk.split(b"data: ")[1]) == {
        "index": 0,
        "content": "é",
        "tokens": [5],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": 1,
        "tokens_evaluated": 2,
    }
    served.context.send(final(task, ""))
    rest = read_until(sock, b"0\r\n\r\n")
    assert rest.count(b"data: ") == 1
    assert json.loads(rest.split(b"data: ")[1].split(b"\n")[0])["stop"] is True
    assert b"[DONE]" not in rest


def test_the_ping_interval_of_the_request_counts(served: Harness) -> None:
    sock = served.post_raw("/completion", {"prompt": "ab", "stream": True, "sse_ping_interval": 1})
    task = served.context.next_task()
    served.context.begin(task)
    read_until(sock, b"\r\n\r\n")
    assert read_until(sock, b"\n\n\r\n") == b"3\r\n:\n\n\r\n"
    sock.close()


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_of_the_engine_has_its_status(served: Harness, stream: bool) -> None:
    def on_task(task: Task) -> None:
        served.context.send(
            ErrorResult(id=task.id, type=ErrorType.EXCEED_CONTEXT_SIZE, message="too long", n_prompt_tokens=2, n_ctx=1)
        )

    served.context.on_task = on_task
    response, body = served.request("POST", "/completion", {"prompt": "ab", "stream": stream})
    assert response.status == 400
    error = json.loads(body)["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 2, 1)


@pytest.mark.parametrize(
    "body", [b"{:", b"", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}", b'{"prompt":{}}', b"[" * 100_000]
)
def test_a_bad_body_is_a_400_and_posts_nothing(served: Harness, body: bytes) -> None:
    response, answer = served.request("POST", "/completion", body)
    assert response.status == 400
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"
    assert served.context.tasks.empty()


def test_the_content_type_of_a_request_does_not_matter(served: Harness) -> None:
    answer_with(served, "x")
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response, _ = served.request("POST", "/completion", {"prompt": "a"}, {"Content-Type": kind})
        assert response.status == 200


def test_tokenize_and_detokenize(served: Harness) -> None:
    assert json.loads(served.request("POST", "/tokenize", {"content": "ab"})[1]) == {"tokens": [97, 98]}
    assert json.loads(served.request("POST", "/detokenize", {"tokens": [97, 98]})[1]) == {"content": "ab"}
    for path, body in [("/tokenize", b"{"), ("/detokenize", {"tokens": [999]}), ("/detokenize", {"tokens": "a"})]:
        assert served.request("POST", path, body)[0].status == 400


def test_facts_about_the_server(served: Harness) -> None:
    for path in ("/health", "/v1/health"):
        assert served.request("GET", path)[1] == b'{"status":"ok"}'
    props = json.loads(served.request("GET", "/props?model=tiny&autoload=false")[1])
    assert (props["total_slots"], props["model_alias"], props["is_sleeping"]) == (2, "tiny", False)
    for path in ("/models", "/v1/models"):
        models = json.loads(served.request("GET", path)[1])
        assert models["data"][0]["id"] == "tiny"
        assert models["object"] == "list"


def test_props_can_be_posted_only_when_allowed(served: Harness) -> None:
    response, body = served.request("POST", "/props", {})
    assert (response.status, json.loads(body)["error"]["type"]) == (501, "not_supported_error")
    with serve_api(endpoint_props=True) as allowed:
        assert prepare(allowed).request("POST", "/props", {})[1] == b'{"success":true}'


def test_slots_and_fail_on_no_slot(served: Harness) -> None:
    n_idle = 1

    def on_task(task: Task) -> None:
        assert task.type is TaskType.SLOT_GET
        slots = [SlotSnapshot(id=0, n_ctx=64, is_processing=True), SlotSnapshot(id=1, n_ctx=64, is_processing=False)]
        served.context.send(SlotsResult(id=task.id, slots=slots, n_idle_slots=n_idle))

    served.context.on_task = on_task
    slots = json.loads(served.request("GET", "/slots")[1])
    assert [(slot["id"], slot["n_ctx"], slot["is_processing"]) for slot in slots] == [(0, 64, True), (1, 64, False)]
    assert served.request("GET", "/slots?fail_on_no_slot=1")[0].status == 200
    n_idle = 0
    assert served.request("GET", "/slots")[0].status == 200
    assert served.request("GET", "/slots?fail_on_no_slot=")[0].status == 200
    response, body = served.request("GET", "/slots?fail_on_no_slot=1")
    assert response.status == 503
    assert json.loads(body)["error"] == {"code": 503, "message": "no slot available", "type": "unavailable_error"}


def test_metrics_are_text_with_the_start_of_the_server(served: Harness) -> None:
    def on_task(task: Task) -> None:
        assert task.type is TaskType.METRICS
        assert task.metrics_reset_bucket
        served.context.send(MetricsResult(id=task.id, metrics=ServerMetrics(t_start=123.7, n_decode=5)))

    served.context.on_task = on_task
    response, body = served.request("GET", "/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4"
    assert response.headers["Process-Start-Time-Unix"] == "123"
    assert b"\nllamacpp:n_decode_total 5" in body


def test_what_is_switched_off_says_so() -> None:
    with serve_api(endpoint_slots=False) as served:
        prepare(served)
        for path in ("/slots", "/metrics"):
            response, body = served.request("GET", path)
            assert (response.status, json.loads(body)["error"]["type"]) == (501, "not_supported_error")
        assert served.context.tasks.empty()


def test_a_monitor_that_hangs_up_is_forgotten(served: Harness) -> None:
    sock = served.raw(b"GET /slots HTTP/1.1\r\nHost: x\r\n\r\n")
    task = served.context.next_task()
    sock.close()
    assert served.context.cancelled.get(timeout=60) == task.id


def test_metrics_while_asleep_come_from_the_snapshot_and_wake_nobody() -> None:
    with serve_api(endpoint_metrics=True) as served:
        prepare(served)
        served.context.queue.is_sleeping = lambda: True  # type: ignore[method-assign]
        response, body = served.request("GET", "/metrics")
        assert response.status == 200
        assert b"llamacpp:prompt_tokens_total 0" in body
        assert json.loads(served.request("GET", "/props")[1])["is_sleeping"] is True
        assert served.context.tasks.empty()


def test_everything_lives_under_the_prefix() -> None:
    with serve_api(api_prefix="/ai") as served:
        answer_with(prepare(served), "x")
        assert served.request("POST", "/ai/completion", {"prompt": "a"})[0].status == 200
        assert served.request("POST", "/completion", {"prompt": "a"})[0].status == 404
