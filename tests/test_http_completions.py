"""POST /v1/completions over a scripted engine: what the client sees of each kind of result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_fakes import BOS, FakeTools, FakeVocab, server_params
from http_harness import Harness, read_until, serve

from llamasrv.api.context import ApiContext
from llamasrv.engine.result import (
    ErrorResult,
    ErrorType,
    FinalResult,
    PartialResult,
    PromptProgress,
    PromptTokenProb,
    StopType,
    TokenProb,
)
from llamasrv.engine.stats import SlotStats
from llamasrv.engine.task import Task, TaskType
from llamasrv.http.config import HttpConfig
from llamasrv.http.route import Route
from llamasrv.http.routes import openai
from llamasrv.http.state import ServerState

PATH = "/v1/completions"
STATS = SlotStats(t_start=1, t_prompt_last=1001, t_gen_last=2001, n_prompt_processed=4, n_gen=2)


def openai_routes(state: ServerState) -> list[Route]:
    context: Any = state.context
    context.vocab = FakeVocab()
    context.vocab.bos, context.vocab.add_bos = BOS, True
    context.params = server_params()
    return openai.routes(state, ApiContext(context, FakeTools()))


@pytest.fixture
def served() -> Iterator[Harness]:
    with serve(HttpConfig(port=0), openai_routes) as harness:
        yield harness


def final(task: Task, text: str, **fields: Any) -> FinalResult:
    fields = {"stop": StopType.LIMIT, "n_decoded": 2, "n_prompt_tokens": task.n_tokens, **fields}
    return FinalResult(
        id=task.id, index=task.index, content=text.encode(), params=task.params, prompt=task.tokens, **fields
    )


def part(task: Task, text: str = "", **fields: Any) -> PartialResult:
    return PartialResult(id=task.id, index=task.index, content=text.encode(), **fields)


def answer(served: Harness, body: Any, **fields: Any) -> dict[str, Any]:
    """The response to a request of which every completion is its place in the request."""

    def on_task(task: Task) -> None:
        assert task.type is TaskType.COMPLETION
        for one in (task, *task.child_tasks):
            served.context.send(final(one, f"text{one.index}", **fields))

    served.context.on_task = on_task
    response, data = served.request("POST", PATH, body)
    assert response.status == 200, data
    value: dict[str, Any] = json.loads(data)
    return value


class Events:
    """An open stream."""

    def __init__(self, served: Harness, body: Any) -> None:
        self.context = served.context
        self._sock = served.post_raw(PATH, {"stream": True, **body})
        self.task = served.context.next_task()
        self.context.begin(self.task)
        read_until(self._sock, b"\r\n\r\n")

    def send(self, *results: Any) -> None:
        for result in results:
            self.context.send(result)

    def rest(self) -> list[Any]:
        data = read_until(self._sock, b"0\r\n\r\n")
        lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def test_a_completion_in_one_piece(served: Harness) -> None:
    stats = SlotStats()
    value = answer(served, {"prompt": "ab", "max_tokens": 2}, n_prompt_tokens_cache=1, stats=stats)
    assert value.pop("created") > 1_700_000_000
    assert value.pop("id").startswith("chatcmpl-")
    assert value == {
        "object": "text_completion",
        "model": "tiny",
        "system_fingerprint": "b0-test",
        "choices": [{"text": "text0", "index": 0, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("stop", "reason"), [(StopType.EOS, "stop"), (StopType.WORD, "stop"), (StopType.LIMIT, "length")]
)
def test_the_reason_of_the_end(served: Harness, stop: StopType, reason: str) -> None:
    assert answer(served, {"prompt": "a"}, stop=stop)["choices"][0]["finish_reason"] == reason


def test_several_prompts_and_completions_are_choices(served: Harness) -> None:
    value = answer(served, {"prompt": ["a", "bcd"], "n": 2}, n_prompt_tokens_cache=1)
    assert [(choice["index"], choice["text"]) for choice in value["choices"]] == [(i, f"text{i}") for i in range(4)]
    # <s>a and <s>bcd, each once
    assert value["usage"]["prompt_tokens"] == 6
    assert value["usage"]["completion_tokens"] == 8
    assert value["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("ignored", [{"best_of": 3}, {"suffix": "end"}, {"user": "me"}, {"model": "other"}])
def test_fields_without_effect_are_taken(served: Harness, ignored: dict[str, Any]) -> None:
    assert answer(served, {"prompt": "a", **ignored})["choices"][0]["text"] == "text0"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "key 'prompt' not found"),
        ({"prompt": "a", "n": 0}, "Field 'n'"),
        ({"prompt": "a", "n": 5}, "Field 'n'"),
        ({"prompt": "a", "max_tokens": "x"}, "Field 'max_tokens'"),
        ({"prompt": "a", "echo": "yes"}, "Field 'echo'"),
        ({"prompt": "a", "stream_options": 5}, "Field 'stream_options'"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "Field 'include_usage'"),
        ({"prompt": "a", "echo": True, "logprobs": 21}, "Field 'logprobs'"),
        ({"prompt": {}}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(served: Harness, body: dict[str, Any], message: str, stream: bool) -> None:
    response, data = served.request("POST", PATH, {**body, "stream": stream})
    assert response.status == 400
    error = json.loads(data)["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]


def test_probabilities_of_the_generated_tokens(served: Harness) -> None:
    probs = [TokenProb(104, b"h", 1.0, [(104, b"h", 1.0)])]
    value = answer(served, {"prompt": "a", "logprobs": 1}, probs=probs)
    assert value["choices"][0]["logprobs"] == {
        "content": [
            {
                "id": 104,
                "token": "h",
                "bytes": [104],
                "logprob": 0.0,
                "top_logprobs": [{"id": 104, "token": "h", "bytes": [104], "logprob": 0.0}],
            }
        ]
    }


def test_verbose_adds_the_native_object(served: Harness) -> None:
    value = answer(served, {"prompt": "ab", "verbose": True})
    assert value["__verbose"]["content"] == "text0"
    assert value["__verbose"]["generation_settings"]["n_predict"] == -1
    assert "__verbose" not in answer(served, {"prompt": "ab"})


def test_echo_puts_the_prompt_in_front(served: Harness) -> None:
    value = answer(served, {"prompt": "hello ", "echo": True})
    assert value["choices"][0]["text"] == "hello text0"
    assert value["choices"][0]["logprobs"] is None


def test_echo_of_several_prompts(served: Harness) -> None:
    value = answer(served, {"prompt": ["a", "b"], "n": 2, "echo": True})
    assert [choice["text"] for choice in value["choices"]] == ["atext0", "atext1", "btext2", "btext3"]


def test_echo_with_probabilities_covers_prompt_and_text(served: Harness) -> None:
    value = answer(
        served,
        {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 1},
        prompt_probs=[PromptTokenProb(97, -1.0, [(98, -0.5)]), PromptTokenProb(98, -2.0, [(98, -2.0)])],
        probs=[TokenProb(104, b"text0", 1.0, [(104, b"text0", 1.0)])],
    )
    [choice] = value["choices"]
    assert choice["text"] == "abtext0"
    logprobs = choice["logprobs"]
    assert logprobs.pop("content")[0]["token"] == "text0"
    assert logprobs == {
        "tokens": ["", "a", "b", "text0"],
        "token_logprobs": [None, -1.0, -2.0, 0.0],
        "top_logprobs": [None, {"b": -0.5}, {"b": -2.0}, {"text0": 0.0}],
        "text_offset": [0, 0, 1, 2],
    }


def test_a_stream(served: Harness) -> None:
    events = Events(served, {"prompt": "ab"})
    events.send(part(events.task, "one"), part(events.task, "two"), final(events.task, "", stop=StopType.EOS))
    first, second, last, done = events.rest()
    assert done == "[DONE]"
    assert len({event["id"] for event in (first, second, last)}) == 1
    for event, text, reason in ((first, "one", None), (second, "two", None), (last, "", "stop")):
        assert event["object"] == "text_completion"
        assert event["choices"] == [{"text": text, "index": 0, "logprobs": None, "finish_reason": reason}]
        assert "usage" not in event


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_counts_come_only_when_asked_for(served: Harness, options: Any) -> None:
    events = Events(served, {"prompt": "ab", "stream_options": options})
    events.send(final(events.task, ""))
    chunk, done = events.rest()
    assert done == "[DONE]"
    assert chunk["choices"]
    assert "usage" not in chunk


def test_counts_come_in_one_last_chunk_without_choices(served: Harness) -> None:
    events = Events(served, {"prompt": ["ab", "c"], "n": 2, "stream_options": {"include_usage": True}})
    second = served.context.next_task()
    parts = [events.task, *events.task.child_tasks, second, *second.child_tasks]
    events.send(*(final(one, "") for one in reversed(parts)))
    *chunks, usage, done = events.rest()
    assert done == "[DONE]"
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [3, 2, 1, 0]
    assert all("usage" not in chunk for chunk in chunks)
    assert usage["choices"] == []
    assert (usage["object"], usage["id"]) == ("text_completion", chunks[0]["id"])
    assert usage["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_of_probabilities_times_and_progress(served: Harness) -> None:
    events = Events(served, {"prompt": "ab", "verbose": True})
    events.send(
        part(events.task, progress=PromptProgress(total=3, cache=0, processed=2, time_ms=5)),
        part(events.task, "h", prob=TokenProb(104, b"h", 1.0, [(104, b"h", 1.0)])),
        final(events.task, "", probs=[TokenProb(104, b"h", 1.0, [(104, b"h", 1.0)])]),
    )
    progress, token, last, _ = events.rest()
    assert progress["prompt_progress"] == {"total": 3, "cache": 0, "processed": 2, "time_ms": 5}
    assert [entry["id"] for entry in token["choices"][0]["logprobs"]["content"]] == [104]
    assert token["__verbose"]["content"] == "h"
    # they went out with their tokens
    assert last["choices"][0]["logprobs"] is None
    assert last["__verbose"]["stop"] is True


def test_a_stream_with_echo_begins_with_the_prompt(served: Harness) -> None:
    events = Events(served, {"prompt": ["a", "b"], "echo": True})
    second = served.context.next_task()
    events.send(part(second, "x"), part(events.task, "y"), part(events.task, "z"))
    events.send(final(second, ""), final(events.task, ""))
    texts: dict[int, list[str]] = {0: [], 1: []}
    for event in events.rest()[:-1]:
        [choice] = event["choices"]
        texts[choice["index"]].append(choice["text"])
    assert texts == {0: ["a", "y", "z", ""], 1: ["b", "x", ""]}


def test_a_stream_without_tokens_has_its_prompt(served: Harness) -> None:
    events = Events(served, {"prompt": "ab", "echo": True, "max_tokens": 0})
    events.send(final(events.task, ""))
    assert [event["choices"][0]["text"] for event in events.rest()[:-1]] == ["ab", ""]


def test_a_stream_with_echo_and_probabilities(served: Harness) -> None:
    events = Events(served, {"prompt": "ab", "echo": True, "logprobs": 1, "return_progress": True})
    assert events.task.prompt_logprobs == 1
    events.send(
        part(events.task, progress=PromptProgress(total=3, cache=0, processed=3, time_ms=5)),
        part(events.task, prompt_probs=[PromptTokenProb(97, -1.0, [(98, -0.5)]), PromptTokenProb(98, -2.0)]),
        part(events.task, "h", prob=TokenProb(104, b"h", 1.0, [(104, b"h", 1.0)])),
        final(events.task, ""),
    )
    progress, prompt, token, last, _ = events.rest()
    assert progress["choices"][0]["text"] == ""
    assert prompt["choices"][0]["text"] == "ab"
    assert prompt["choices"][0]["logprobs"] == {
        "content": [],
        "tokens": ["", "a", "b"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -0.5}, {}],
        "text_offset": [0, 0, 1],
    }
    assert token["choices"][0]["logprobs"]["text_offset"] == [2]
    assert token["choices"][0]["logprobs"]["token_logprobs"] == [0.0]
    assert last["choices"][0]["finish_reason"] == "length"


def test_an_error_in_the_middle_ends_the_stream(served: Harness) -> None:
    events = Events(served, {"prompt": "ab", "stream_options": {"include_usage": True}})
    events.send(part(events.task, "one"), ErrorResult(id=events.task.id, type=ErrorType.SERVER, message="broken"))
    chunk, error = events.rest()
    assert chunk["choices"][0]["text"] == "one"
    assert error == {"error": {"code": 500, "message": "broken", "type": "server_error"}}
