"""/v1/completions over real HTTP: the SDK of its maker, scores of prompts, streams that outlive their connection."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess

TEXT = "Once there was a river and a stone, and they could see what each other said."
PATH = "/v1/completions"
#: Without flash attention and rounded cells, batches of other sizes give the same numbers.
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "-m", tiny_model_path, "-c", 65536, "-np", 4, "-t", 1, "--alias", "tiny", "--temp", 0, *EXACT
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def complete(server: ServerProcess, **body: Any) -> Any:
    response = server.post(PATH, {"prompt": TEXT, "max_tokens": 8, **body})
    assert response.status == 200, response.text
    return response.json()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_the_sdk_completes(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt=TEXT, max_tokens=8)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("b")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == 8 + answer.usage.prompt_tokens


def test_the_sdk_streams(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="any", prompt=TEXT, max_tokens=8)
    chunks = list(client.completions.create(model="any", prompt=TEXT, max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_sdk_gets_counts_at_the_end(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="any", prompt=TEXT, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


def test_the_sdk_gets_its_prompt_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="any", prompt=TEXT, max_tokens=1, logprobs=2, echo=True)
    [choice] = answer.choices
    assert choice.text.startswith(TEXT)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 1
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    ends = [*logprobs.text_offset[1:], len(choice.text)]
    assert [choice.text[a:b] for a, b in zip(logprobs.text_offset, ends, strict=True)] == logprobs.tokens


def test_the_sdk_sees_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Field 'n'"):
        client.completions.create(model="any", prompt=TEXT, n=99)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_scores_are_the_probabilities_of_the_next_token(server: ServerProcess, cut: int) -> None:
    body = {"content": TEXT * 3, "add_special": True}
    tokens = server.post("/tokenize", body).json()["tokens"]
    logprobs = complete(server, prompt=tokens, max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(tokens) + 1
    native = {"prompt": tokens[:cut], "n_predict": 1, "n_probs": 100_000}
    [entry] = server.post("/completion", native).json()["completion_probabilities"]
    expected = {top["id"]: top["logprob"] for top in entry["top_logprobs"]}
    assert logprobs["token_logprobs"][cut] == pytest.approx(expected[tokens[cut]], abs=1e-3)
    best = entry["top_logprobs"][0]
    assert logprobs["top_logprobs"][cut] == {best["token"]: pytest.approx(best["logprob"], abs=1e-3)}


def test_the_last_score_is_that_of_the_generated_token(server: ServerProcess) -> None:
    plain = complete(server, max_tokens=1, logprobs=1)["choices"][0]
    scored = complete(server, max_tokens=1, logprobs=1, echo=True)["choices"][0]
    assert scored["text"] == TEXT + plain["text"]
    [mine], [theirs] = scored["logprobs"]["content"], plain["logprobs"]["content"]
    assert mine["id"] == theirs["id"]
    # the prompt comes out of the cache for one of them
    assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
    assert scored["logprobs"]["token_logprobs"][-1] == mine["logprob"]


def test_a_question_is_answered_by_likelihood(server: ServerProcess) -> None:
    """As an evaluation harness asks: which ending is the more likely one, and would it have been generated."""
    greedy = complete(server, max_tokens=6)["choices"][0]["text"]
    context = complete(server, max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]["tokens"]
    sums: list[float] = []
    for ending in (greedy, " zzz qqq"):
        logprobs = complete(server, prompt=TEXT + ending, max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
        values = logprobs["token_logprobs"][len(context) : -1]
        assert values
        assert all(math.isfinite(value) for value in values)
        sums.append(sum(values) / len(values))
    assert sums[0] > sums[1]


def test_a_stream_with_scores_says_the_same(server: ServerProcess) -> None:
    body = {"prompt": TEXT, "max_tokens": 4, "echo": True, "logprobs": 2, "n": 2, "seed": 1, "temperature": 0.0}
    whole = complete(server, **body)
    with server.stream(PATH, {**body, "stream": True}) as stream:
        choices = [event["choices"][0] for event in stream]
    for expected in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [value for choice in mine if choice["logprobs"] for value in choice["logprobs"][name]]
            assert parts == expected["logprobs"][name]


def test_scored_and_plain_requests_side_by_side(server: ServerProcess) -> None:
    alone = complete(server, prompt=[TEXT * 4, TEXT], max_tokens=3, echo=True, logprobs=1)
    with server.stream(PATH, {"prompt": TEXT, "max_tokens": 300, "stream": True, "ignore_eos": True}) as stream:
        events = iter(stream)
        next(events)
        beside = complete(server, prompt=[TEXT * 4, TEXT], max_tokens=3, echo=True, logprobs=1)
        assert sum(1 for _ in events) > 250
    for mine, theirs in zip(beside["choices"], alone["choices"], strict=True):
        assert mine["text"] == theirs["text"]
        values, expected = (choice["logprobs"]["token_logprobs"][1:] for choice in (mine, theirs))
        assert values == pytest.approx(expected, abs=1e-3)


def test_a_dropped_stream_is_resumed(server: ServerProcess) -> None:
    body = {"prompt": TEXT, "max_tokens": 600, "ignore_eos": True, "stream": True}
    headers = {"X-Conversation-Id": "talk/1"}
    stream = server.stream(PATH, body, headers)
    first = next(iter(stream))
    stream.hang_up()

    def entry() -> Any:
        return server.post("/v1/streams/lookup", {"conversation_ids": ["talk/1"]}).json()[0]

    replay = server.get("/v1/stream?conv_id=talk%2F1&from=0")
    assert replay.status == 200
    assert replay.headers["content-type"] == "text/event-stream"
    assert replay.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in replay.text.split("\n\n")[:-2]]
    assert events[0] == first
    assert events[-1]["timings"]["predicted_n"] == 600
    whole = complete(server, **{**body, "stream": False})
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert entry()["is_done"] is True
    assert entry()["total_bytes"] == len(replay.body)
    tail = server.get(f"/v1/stream?conv_id=talk%2F1&from={len(replay.body) - 40}").text
    assert tail.startswith("data: ")
    assert replay.text.endswith(tail)


def test_a_delete_frees_the_slot(server: ServerProcess) -> None:
    body = {"prompt": TEXT, "max_tokens": -1, "ignore_eos": True, "stream": True}
    stream = server.stream(PATH, body, {"X-Conversation-Id": "endless"})
    next(iter(stream))
    stream.hang_up()
    wait_for(lambda: any(slot["is_processing"] for slot in server.get("/slots").json()))
    assert server.request("DELETE", "/v1/stream?conv_id=endless").status == 204
    wait_for(lambda: not any(slot["is_processing"] for slot in server.get("/slots").json()))
    assert server.get("/v1/stream?conv_id=endless").status == 404


def test_the_native_stream_can_be_resumed_too(server: ServerProcess) -> None:
    with server.stream(
        "/completion", {"prompt": TEXT, "n_predict": 4, "stream": True}, {"X-Conversation-Id": "n"}
    ) as s:
        body = s.read()
    assert server.get("/v1/stream?conv_id=n").body == body


def test_the_server_ends_with_a_stream_nobody_reads(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, "-c", 16384, "-np", 1, "-t", 1) as one:
        body = {"prompt": TEXT, "max_tokens": 16000, "ignore_eos": True, "stream": True}
        stream = one.stream(PATH, body, {"X-Conversation-Id": "c"})
        next(iter(stream))
        stream.hang_up()
        assert one.stop() == 0
