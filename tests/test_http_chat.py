"""POST /v1/chat/completions over a scripted engine: what the client sees of each kind of result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_fakes import FakeTools, FakeVocab, server_params
from http_harness import Harness, read_all, serve

from llamasrv.api.context import ApiContext
from llamasrv.binding import ChatTemplates
from llamasrv.engine.result import (
    ControlResult,
    ErrorResult,
    ErrorType,
    FinalResult,
    PartialResult,
    PromptProgress,
    StopType,
    TokenProb,
)
from llamasrv.engine.stats import SlotStats
from llamasrv.engine.task import Task, TaskType
from llamasrv.http.config import HttpConfig
from llamasrv.http.route import Route
from llamasrv.http.routes import chat
from llamasrv.http.state import ServerState

#: A template that knows tools and reasoning.
SOURCE = """
{%- for t in tools %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.tool_calls %}{% for c in m.tool_calls %}<call>
{{- '{"name": "' ~ c.function.name ~ '", "arguments": ' ~ (c.function.arguments | tojson) ~ '}' }}</call>{% endfor %}
{%- else %}{{ m.content }}{% endif %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"""
TEMPLATES = ChatTemplates(SOURCE)
USER = {"role": "user", "content": "hi"}
PING = {
    "type": "function",
    "function": {
        "name": "ping",
        "parameters": {"type": "object", "properties": {"host": {"type": "string"}}, "required": ["host"]},
    },
}
CALL = '<call>{"name": "ping", "arguments": {"host": "a"}}</call>'
CHAT = "/v1/chat/completions"


def chat_routes(state: ServerState) -> list[Route]:
    context: Any = state.context
    context.vocab = FakeVocab()
    context.chat_templates = TEMPLATES
    context.params = server_params(
        prefill_assistant=True,
        default_template_kwargs={},
        enable_reasoning=-1,
        force_pure_content_parser=False,
        preserve_reasoning_specified=False,
    )
    return chat.routes(state, ApiContext(context, FakeTools()))


@pytest.fixture
def harness() -> Iterator[Harness]:
    with serve(HttpConfig(port=0), chat_routes) as harness:
        yield harness


def final(task: Task, text: str = "", stop: StopType = StopType.EOS, **members: Any) -> FinalResult:
    return FinalResult(
        id=task.id,
        index=task.index,
        content=text.encode(),
        prompt=task.tokens,
        params=task.params,
        stop=stop,
        n_decoded=3,
        n_prompt_tokens=5,
        n_prompt_tokens_cache=2,
        **members,
    )


def script(harness: Harness, *texts: str, stop: StopType = StopType.EOS, **members: Any) -> None:
    """Answer every completion with these pieces, in a stream or in one."""

    def on_task(task: Task) -> None:
        for own in (task, *task.child_tasks):
            if task.params.stream:
                harness.context.begin(own)
                for text in texts:
                    harness.context.part(own, text)
            harness.context.send(final(own, "" if task.params.stream else "".join(texts), stop, **members))

    harness.context.on_task = on_task


def ask(harness: Harness, path: str = CHAT, **body: Any) -> tuple[int, Any]:
    response, data = harness.request("POST", path, {"messages": [USER], **body})
    return response.status, json.loads(data)


def events(harness: Harness, **body: Any) -> list[Any]:
    """Frames of a stream; [DONE] as that string."""
    sock = harness.post_raw(CHAT, {"messages": [USER], "stream": True, **body}, "1.0")
    with sock:
        head, _, rest = read_all(sock).partition(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0]
    assert b"text/event-stream" in head
    frames = rest.decode().split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


def deltas(chunks: list[Any], index: int = 0) -> list[Any]:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


@pytest.mark.parametrize("path", ["/chat/completions", CHAT])
def test_an_answer(harness: Harness, path: str) -> None:
    script(harness, "<think>hm</think>", "Hello")
    status, body = ask(harness, path)
    assert status == 200
    assert body["choices"] == [
        {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
        }
    ]
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["system_fingerprint"] == "b0-test"
    assert body["id"].startswith("chatcmpl-")
    assert body["created"] > 0
    assert body["usage"] == {
        "completion_tokens": 3,
        "prompt_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert "timings" not in body
    assert "__verbose" not in body


def test_a_tool_call(harness: Harness) -> None:
    script(harness, "<think></think>", CALL)
    _, body = ask(harness, tools=[PING])
    [choice] = body["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ""
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"] == {"name": "ping", "arguments": '{"host": "a"}'}


def test_the_limit_ends_an_answer_in_the_middle_of_a_call(harness: Harness) -> None:
    script(harness, "<think></think>", CALL[:-20], stop=StopType.LIMIT)
    _, body = ask(harness, tools=[PING])
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_outside_the_format_is_the_servers_error(harness: Harness, stream: bool) -> None:
    script(harness, "<think></think>", "<call>", "no JSON", "</call>")
    body = {"tools": [PING], "tool_choice": "required", "stream": stream}
    if stream:
        *_, error = events(harness, **body)
        assert "choices" not in error
    else:
        status, error = ask(harness, **body)
        assert status == 500
    assert error["error"]["type"] == "server_error"
    assert error["error"]["code"] == 500
    assert "does not match the expected peg-native format" in error["error"]["message"]


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(harness: Harness) -> None:
    script(harness, "<think>", "hm", "</think>", "Hel", "lo")
    *chunks, done = events(harness)
    assert done == "[DONE]"
    assert deltas(chunks) == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "hm"},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_an_empty_stream_has_role_and_reason(harness: Harness) -> None:
    script(harness)
    assert deltas(events(harness)) == [{"role": "assistant", "content": None}, {}]


def test_tool_calls_stream_as_deltas(harness: Harness) -> None:
    script(harness, "<think></think>", *CALL)
    *chunks, _ = events(harness, tools=[PING])
    calls = [delta["tool_calls"][0] for delta in deltas(chunks) if "tool_calls" in delta]
    assert {call["index"] for call in calls} == {0}
    assert [call["id"] for call in calls if "id" in call] == [calls[0]["id"]]
    assert [call["type"] for call in calls if "type" in call] == ["function"]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["ping"]
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"host": "a"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_several_choices(harness: Harness) -> None:
    script(harness, "<think></think>", "Hello")
    _, body = ask(harness, n=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Hello"}
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 9


def test_several_choices_in_a_stream(harness: Harness) -> None:
    script(harness, "<think></think>", "Hello")
    *chunks, usage, done = events(harness, n=2, stream_options={"include_usage": True})
    assert done == "[DONE]"
    for index in (0, 1):
        assert deltas(chunks, index) == [{"role": "assistant", "content": None}, {"content": "Hello"}, {}]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 5
    assert usage["usage"]["completion_tokens"] == 6
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("options", "is_wanted"),
    [({}, False), (None, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
def test_counts_come_last_and_only_when_asked_for(harness: Harness, options: Any, is_wanted: bool) -> None:
    script(harness, "<think></think>", "x")
    *chunks, _ = events(harness, stream_options=options)
    with_usage = [chunk for chunk in chunks if "usage" in chunk]
    assert with_usage == ([chunks[-1]] if is_wanted else [])
    assert all(chunk["choices"] == [] for chunk in with_usage)
    assert all(chunk["choices"] for chunk in chunks if chunk not in with_usage)


def test_stream_options_that_are_no_object_are_refused(harness: Harness) -> None:
    status, body = ask(harness, stream=True, stream_options=5)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_probabilities(harness: Harness) -> None:
    probs = [TokenProb(72, b"H", 0.5, [(72, b"H", 0.5), (105, b"i", 0.25)])]
    script(harness, "<think></think>", "H", probs=probs)
    _, body = ask(harness, logprobs=True, top_logprobs=2)
    [entry] = body["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("H", [72])
    assert entry["logprob"] == pytest.approx(-0.6931, abs=1e-3)
    assert [top["token"] for top in entry["top_logprobs"]] == ["H", "i"]


def test_no_probability_of_a_stream_is_lost(harness: Harness) -> None:
    def on_task(task: Task) -> None:
        # what may be the begin of a tag gives no delta yet
        for text in ("<think></think>", "a", "<", "b", ""):
            prob = TokenProb(0, text.encode(), 0.5, [(0, text.encode(), 0.5)])
            harness.context.send(PartialResult(id=task.id, content=text.encode(), prob=prob))
        harness.context.send(final(task))

    harness.context.on_task = on_task
    *chunks, _ = events(harness, tools=None, logprobs=True)
    contents = [chunk["choices"][0].get("logprobs", {"content": []})["content"] for chunk in chunks]
    assert [entry["token"] for content in contents for entry in content] == ["<think></think>", "a", "<", "b", ""]


def test_progress_and_times(harness: Harness) -> None:
    def on_task(task: Task) -> None:
        progress = PromptProgress(total=5, cache=0, processed=2, time_ms=1)
        for _ in range(2):
            harness.context.send(PartialResult(id=task.id, progress=progress))
        stats = SlotStats(n_prompt_processed=5, t_start=1)
        harness.context.send(PartialResult(id=task.id, content=b"<think></think>x", stats=stats))
        harness.context.send(final(task, stats=stats))

    harness.context.on_task = on_task
    *chunks, _ = events(harness, return_progress=True, timings_per_token=True)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert told == [{"total": 5, "cache": 0, "processed": 2, "time_ms": 1}] * 2
    assert [chunk["timings"]["prompt_n"] for chunk in chunks if "timings" in chunk] == [5, 5]
    assert "timings" in chunks[-1]


def test_verbose_shows_the_native_result(harness: Harness) -> None:
    script(harness, "<think></think>", "x")
    _, body = ask(harness, verbose=True)
    assert body["__verbose"]["content"] == "<think></think>x"
    *chunks, _ = events(harness, verbose=True)
    assert [chunk["__verbose"]["stop"] for chunk in chunks if "__verbose" in chunk] == [True]


def test_an_error_before_the_first_token_has_its_status(harness: Harness) -> None:
    def on_task(task: Task) -> None:
        kind = ErrorType.EXCEED_CONTEXT_SIZE
        harness.context.send(ErrorResult(id=task.id, type=kind, message="too long", n_prompt_tokens=9, n_ctx=4))

    harness.context.on_task = on_task
    status, body = ask(harness, stream=True)
    assert status == 400
    assert body["error"]["type"] == "exceed_context_size_error"
    assert (body["error"]["n_prompt_tokens"], body["error"]["n_ctx"]) == (9, 4)


def test_an_error_after_the_first_token_is_a_frame_and_the_end(harness: Harness) -> None:
    def on_task(task: Task) -> None:
        harness.context.part(task, "<think></think>x")
        harness.context.send(ErrorResult(id=task.id, message="it broke"))

    harness.context.on_task = on_task
    *_, last = events(harness)
    assert last["error"] == {"code": 500, "message": "it broke", "type": "server_error"}


def test_the_task_knows_what_the_chat_needs(harness: Harness) -> None:
    tasks: list[Task] = []

    def on_task(task: Task) -> None:
        tasks.append(task)
        harness.context.send(final(task, "<think></think>" + CALL))

    harness.context.on_task = on_task
    _, body = ask(harness, tools=[PING], tool_choice="required", stop=["END"])
    [task] = tasks
    assert task.cmpl_id == body["id"]
    assert task.params.sampling.grammar[0] == "tool_calls"
    assert task.params.chat_format == "peg-native"
    assert "END" in task.params.antiprompt
    assert bytes(task.tokens[1:]).decode().endswith("<|user|>hi<|end|><|assistant|>")


def test_control(harness: Harness) -> None:
    def on_task(task: Task) -> None:
        assert task.type is TaskType.CONTROL
        known = (task.control_cmpl_id, task.control_action) == ("chatcmpl-1", "reasoning_end")
        harness.context.send(ControlResult(id=task.id, success=known, message="" if known else "no such"))

    harness.context.on_task = on_task
    control = f"{CHAT}/control"
    assert ask(harness, control, id="chatcmpl-1", action="reasoning_end") == (200, {"success": True})
    answer = {"success": False, "message": "no such"}
    assert ask(harness, control, id="chatcmpl-2", action="reasoning_end") == (200, answer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "missing completion id"),
        ({"id": 5, "action": "reasoning_end"}, "missing completion id"),
        ({"id": "x"}, "unknown control action"),
        ({"id": "x", "action": "stop"}, "unknown control action"),
    ],
)
def test_control_that_makes_no_sense_is_refused(harness: Harness, body: Any, message: str) -> None:
    status, answer = ask(harness, f"{CHAT}/control", **body)
    assert (status, answer["error"]["message"]) == (400, message)


def test_rendering_and_counting(harness: Harness) -> None:
    status, body = ask(harness, "/apply-template")
    assert (status, body) == (200, {"prompt": "<|user|>hi<|end|><|assistant|>"})
    n_tokens = len(FakeVocab().tokenize(body["prompt"], True, True))
    for path in ("/chat/completions/input_tokens", f"{CHAT}/input_tokens"):
        assert ask(harness, path) == (200, {"input_tokens": n_tokens, "object": "response.input_tokens"})
