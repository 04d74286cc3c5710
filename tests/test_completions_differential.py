"""/v1/completions of the genuine llama-server and of ours: the same status and JSON, save what differs on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from test_differential import Pair, assert_same, start_pair

pytestmark = pytest.mark.reference

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def pair(reference_server: tuple[str, ...], tiny_model_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield start_pair(reference_server, stack, "-m", tiny_model_path, "-c", 2048, "-np", 2)


def without_ids(value: Any) -> Any:
    """Ids are random."""
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key != "id" or not isinstance(item, str)}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def same(pair: Pair, **body: Any) -> Any:
    theirs, ours = pair.request("POST", PATH, {"max_tokens": 8, "temperature": 0, **body})
    assert ours.status == theirs.status, f"theirs: {theirs.text}\nours: {ours.text}"
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    assert_same(without_ids(theirs.json()), without_ids(ours.json()))
    return ours.json()


REQUESTS: dict[str, dict[str, Any]] = {
    "string": {"prompt": "Once"},
    "empty": {"prompt": ""},
    "tokens": {"prompt": [1, 300, 301]},
    "mixed": {"prompt": ["Once", 300, "there"]},
    "logprobs": {"prompt": "Once", "logprobs": 3},
    "logprobs 0": {"prompt": "Once", "logprobs": 0},
    "n_probs": {"prompt": "Once", "n_probs": 2},
    "probabilities after sampling": {"prompt": "Once", "logprobs": 3, "post_sampling_probs": True},
    "stop": {"prompt": "Once", "stop": ["e"]},
    "stop string": {"prompt": "Once", "stop": "e", "max_tokens": 30},
    "verbose": {"prompt": "Once", "verbose": True},
    "best_of": {"prompt": "Once", "best_of": 3},
    "suffix": {"prompt": "Once", "suffix": "end"},
    "echo off": {"prompt": "Once", "echo": False},
    "foreign fields": {"prompt": "Once", "model": "x", "user": "me", "stream_options": {"include_usage": True}},
    "grammar": {"prompt": "Once", "grammar": 'root ::= "yes" | "no"'},
    "n_predict goes first": {"prompt": "Once", "max_tokens": 4, "n_predict": 3},
    "max_completion_tokens": {"prompt": "Once", "max_completion_tokens": 3},
    "bias": {"prompt": "Once", "logit_bias": {"300": 5}},
    "return_tokens": {"prompt": "Once", "return_tokens": True, "verbose": True},
    "response_fields": {"prompt": "Once", "response_fields": ["content"], "verbose": True},
    "no prompt": {},
    "n too large": {"prompt": "Once", "n": 3},
    "n zero": {"prompt": "Once", "n": 0},
    "wrong max_tokens": {"prompt": "Once", "max_tokens": "many"},
    "too long": {"prompt": "Once upon a time " * 500},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_one_piece(pair: Pair, name: str) -> None:
    same(pair, **REQUESTS[name])


def test_several_prompts_and_completions_but_for_the_counts(pair: Pair) -> None:
    """The original has the counts of the first choice only."""
    for body in ({"prompt": ["Once", "There was"]}, {"prompt": "Once", "n": 2}):
        answers = [
            response.json()
            for response in pair.request("POST", PATH, {"max_tokens": 8, "temperature": 0, "logprobs": 1, **body})
        ]
        assert_same(*(answer["choices"] for answer in answers))
        first, total = (answer["usage"] for answer in answers)
        assert total["completion_tokens"] == 2 * first["completion_tokens"]
        assert total["total_tokens"] == total["completion_tokens"] + total["prompt_tokens"]


STREAMS: dict[str, dict[str, Any]] = {
    "string": {"prompt": "Once"},
    "logprobs": {"prompt": "Once", "logprobs": 2},
    "timings": {"prompt": "Once", "timings_per_token": True},
    "stop": {"prompt": "Once", "stop": ["e"], "max_tokens": 30},
    "verbose": {"prompt": "Once", "verbose": True},
    "progress": {"prompt": "Once upon a time", "return_progress": True, "cache_prompt": False},
    "counts": {"prompt": "Once", "stream_options": {"include_usage": True}},
}


def events(server: ServerProcess, body: Any) -> tuple[list[Any], str]:
    with server.stream(PATH, {"max_tokens": 8, "temperature": 0, "stream": True, **body}) as stream:
        assert stream.status == 200
        assert stream.response.getheader("Content-Type") == "text/event-stream"
        found = [without_ids(event) for event in stream]
        return found, stream.lines[-1]


@pytest.mark.parametrize("name", STREAMS)
def test_stream_but_for_the_place_of_the_counts(pair: Pair, name: str) -> None:
    """The original puts them into the last choice, asked for or not."""
    body = STREAMS[name]
    (theirs, their_end), (ours, our_end) = (events(server, body) for server in (pair.reference, pair.ours))
    usage = theirs[-1].pop("usage")
    if "stream_options" in body:
        last = ours.pop()
        assert last["choices"] == []
        assert_same(usage, last["usage"])
    assert_same(theirs, ours)
    assert our_end == their_end == "data: [DONE]"


def test_resumable_streams(pair: Pair) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "stream": True}
    types = []
    for server in (pair.reference, pair.ours):
        with server.stream("/completion", body, {"X-Conversation-Id": "a::m"}) as stream:
            whole = stream.read()
        again = server.get("/v1/stream?conv_id=a%3A%3Am&from=0")
        assert again.body == whole
        types.append(again.headers["content-type"])
        found = server.post("/v1/streams/lookup", {"conversation_ids": ["a", "b"]}).json()
        assert [entry["total_bytes"] for entry in found] == [len(whole)]
        assert found[0].keys() == {"conversation_id", "is_done", "total_bytes", "started_at", "completed_at"}
    assert types[0] == types[1]
    for method, path in (
        ("GET", "/v1/stream"),
        ("GET", "/v1/stream?conv_id=a%3A%3Am&from=x"),
        ("DELETE", "/v1/stream"),
    ):
        pair.same(method, path)
    for _ in range(2):
        theirs, ours = pair.request("DELETE", "/v1/stream?conv_id=a%3A%3Am")
        assert (theirs.status, theirs.body) == (ours.status, ours.body) == (204, b"")
    # the original's own text for it is lost on its way out
    theirs, ours = pair.request("GET", "/v1/stream?conv_id=a%3A%3Am")
    assert theirs.status == ours.status == 404
    assert theirs.json()["error"]["type"] == ours.json()["error"]["type"]
