"""The Responses and Messages routes over a scripted engine: what the client sees of each kind of result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_fakes import FakeTools
from http_harness import Harness, read_all, serve
from test_http_chat import chat_routes, script

from llamasrv.api.context import ApiContext
from llamasrv.engine.result import ErrorResult, ErrorType, StopType
from llamasrv.engine.task import Task
from llamasrv.http.config import HttpConfig
from llamasrv.http.route import Route
from llamasrv.http.routes import anthropic, responses
from llamasrv.http.state import ServerState

CALL = '<call>{"name": "ping", "arguments": {"host": "a"}}</call>'
HOST = {"type": "object", "properties": {"host": {"type": "string"}}, "required": ["host"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", "name": "ping", "parameters": HOST}]},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "ping", "input_schema": HOST}],
        "max_tokens": 9,
    },
}
PATHS = list(BODIES)


def dialect_routes(state: ServerState) -> list[Route]:
    chat_routes(state)  # equips the scripted server with a vocabulary and a template
    context: Any = state.context
    api = ApiContext(context, FakeTools())
    return [*responses.routes(state, api), *anthropic.routes(state, api)]


@pytest.fixture
def harness() -> Iterator[Harness]:
    with serve(HttpConfig(port=0), dialect_routes) as harness:
        yield harness


def ask(harness: Harness, path: str, **body: Any) -> tuple[int, Any]:
    response, data = harness.request("POST", path, {**BODIES[path], **body})
    return response.status, json.loads(data)


def events(harness: Harness, path: str, **body: Any) -> list[Any]:
    with harness.post_raw(path, {**BODIES[path], "stream": True, **body}, "1.0") as sock:
        head, _, rest = read_all(sock).partition(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0]
    assert b"text/event-stream" in head
    frames = rest.decode().split("\n\n")
    assert frames.pop() == ""
    out = []
    for frame in frames:
        name, _, data = frame.partition("\ndata: ")
        out.append(json.loads(data))
        assert name == f"event: {out[-1]['type']}"
    return out


def test_the_prompt_and_the_limits_reach_the_task(harness: Harness) -> None:
    tasks: list[Task] = []
    script(harness, "x")
    answer = harness.context.on_task

    def on_task(task: Task) -> None:
        tasks.append(task)
        answer(task)

    harness.context.on_task = on_task
    ask(harness, "/v1/responses", instructions="be brief", max_output_tokens=7)
    ask(harness, "/v1/messages", system="be brief", max_tokens=7, stop_sequences=["END"])
    for task in tasks:
        prompt = bytes(token if token < 256 else 0 for token in task.tokens)
        assert b"<|system|>be brief" in prompt and b"<|user|>hi" in prompt
        assert task.params.n_predict == 7
        assert not task.child_tasks
    assert tasks[1].params.antiprompt[0] == "END"


def test_a_response(harness: Harness) -> None:
    script(harness, "<think>hm</think>", "So: ", CALL)
    status, body = ask(harness, "/v1/responses")
    assert status == 200
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(body["output"][2]["arguments"]) == {"host": "a"}
    assert body["model"] == "tiny"
    assert body["usage"]["total_tokens"] == 8


def test_a_message(harness: Harness) -> None:
    script(harness, "<think>hm</think>", "So: ", CALL)
    status, body = ask(harness, "/v1/messages")
    assert status == 200
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["content"][2]["input"] == {"host": "a"}
    assert body["stop_reason"] == "tool_use"
    assert body["usage"] == {"cache_read_input_tokens": 2, "input_tokens": 3, "output_tokens": 3}


def test_streams_hold_what_plain_answers_hold(harness: Harness) -> None:
    script(harness, "<think>h", "m</think>", "So: ", *CALL)
    ended = events(harness, "/v1/responses")[-1]
    assert ended["type"] == "response.completed"
    assert [item["type"] for item in ended["response"]["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(ended["response"]["output"][2]["arguments"]) == {"host": "a"}
    pieces = events(harness, "/v1/messages")
    text = "".join(event["delta"].get("partial_json", "") for event in pieces if "delta" in event)
    assert json.loads(text) == {"host": "a"}
    assert pieces[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_answer_that_is_cut_off(harness: Harness) -> None:
    script(harness, "<think></think>", "Hel", stop=StopType.LIMIT)
    assert events(harness, "/v1/responses")[-1]["type"] == "response.incomplete"
    assert events(harness, "/v1/messages")[-2]["delta"]["stop_reason"] == "max_tokens"
    assert ask(harness, "/v1/responses")[1]["status"] == "incomplete"


@pytest.mark.parametrize("path", PATHS)
def test_an_error_after_the_first_token_is_the_last_event(harness: Harness, path: str) -> None:
    def on_task(task: Task) -> None:
        harness.context.begin(task)
        harness.context.part(task, "<think></think>Hel")
        harness.context.send(ErrorResult(id=task.id, type=ErrorType.SERVER, message="it broke"))

    harness.context.on_task = on_task
    *before, last = events(harness, path)
    assert before
    assert last["type"] == "error"
    assert last["error"]["message"] == "it broke"
    assert last["error"]["code"] == 500


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_a_plain_answer(harness: Harness, path: str, stream: bool) -> None:
    def on_task(task: Task) -> None:
        error = ErrorType.EXCEED_CONTEXT_SIZE
        harness.context.send(ErrorResult(id=task.id, type=error, message="too long", n_prompt_tokens=9, n_ctx=4))

    harness.context.on_task = on_task
    status, body = ask(harness, path, stream=stream)
    assert status == 400
    assert body["error"] == {
        "code": 400,
        "message": "too long",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 9,
        "n_ctx": 4,
    }


def test_counting_posts_no_task(harness: Harness) -> None:
    tasks: list[Task] = []
    harness.context.on_task = tasks.append
    for path, counter in (("/v1/responses", "/input_tokens"), ("/v1/messages", "/count_tokens")):
        response, data = harness.request("POST", path + counter, BODIES[path])
        assert response.status == 200
        assert json.loads(data)["input_tokens"] > len("<|user|>hi<|end|>")
    assert tasks == []
