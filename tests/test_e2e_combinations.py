"""Combinations: fields in one request, and work of different kinds at the same time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess
from talk import EXACT, all_idle, complete, joined, streamed, wait_for, words

#: Models and drafters over which the same fields are tried.
KINDS = {
    "plain": ("tiny-llama",),
    "drafts": ("tiny-llama", "--spec-type", "ngram-simple"),
    "window": ("tiny-swa", "--spec-type", "ngram-map-k"),
    "recurrent": ("tiny-mamba", "--spec-type", "ngram-simple"),
}
GRAMMARS = ('root ::= "a"+ "\\n" "  b"* [0-9]+', 'root ::= ("the " | "river ")+ "."', 'root ::= "{" [^}]* "}"')


def any_request(chance: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": " ".join(chance.choices(["Once", "Tom", "the", "water", "He", "river"], k=chance.randint(1, 40))),
        "n_predict": chance.choice([0, 1, 3, 20, 60]),
        "temperature": chance.choice([0, 0.8, 2.0]),
        "seed": chance.randrange(1000),
        "n_probs": chance.choice([0, 2]),
        "stop": chance.choice([[], ["e"], ["the", " a"], ["\n"], ["he said", "om"]]),
        "n_indent": chance.choice([0, 0, 2]),
        "ignore_eos": chance.random() < 0.5,
        "cache_prompt": chance.random() < 0.6,
        "repeat_penalty": chance.choice([1.0, 1.3]),
        "dry_multiplier": chance.choice([0.0, 0.8]),
        "xtc_probability": chance.choice([0.0, 0.5]),
        "n_cmpl": chance.choice([1, 1, 2]),
    }
    if chance.random() < 0.4:
        body.update(grammar=chance.choice(GRAMMARS), ignore_eos=False)
    return body


def compare(server: ServerProcess, body: dict[str, Any]) -> None:
    """A plain answer and the stream of the same request."""
    plain = complete(server, **body)
    events = streamed(server, **body)
    for answer in plain if isinstance(plain, list) else [plain]:
        mine = [event for event in events if event["index"] == answer["index"]]
        assert joined(mine) == answer["content"], body
        for name in ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "truncated", "has_new_line"):
            assert mine[-1][name] == answer[name], (name, body)
        if answer["stop_type"] != "word":
            told = [entry["id"] for event in mine for entry in event.get("completion_probabilities", [])]
            assert told == [entry["id"] for entry in answer.get("completion_probabilities", [])], body


@pytest.mark.parametrize("kind", KINDS)
def test_streams_say_what_plain_answers_say_whatever_is_asked(tiny_models: dict[str, Path], kind: str) -> None:
    model, *flags = KINDS[kind]
    chance = random.Random(11)
    bodies = [any_request(chance) for _ in range(40)]
    with ServerProcess("-m", tiny_models[model], "-c", 4096, "-np", 4, "-t", 1, *flags, *EXACT) as server:
        # one after the other: in batches of other sizes a drawn token may be another
        for body in bodies:
            compare(server, body)


@pytest.mark.parametrize("kind", ["-kvu", "-no-kvu"])
def test_adapters_change_and_slots_are_saved_while_others_talk(
    tiny_models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    both = f"{tiny_models['tiny-lora-a']},{tiny_models['tiny-lora-b']}"
    flags = ("-c", 8192, "-np", 4, kind, "-t", 1, "--slot-save-path", tmp_path, "--lora", both)
    scales = [[], [{"id": 0, "scale": 1.0}], [{"id": 1, "scale": 1.0}], [{"id": 0, "scale": 0.5}]]
    asked = [(f"{words(40 + number, seed=number % 2)} end", scales[number % 4]) for number in range(12)]
    with ServerProcess("-m", tiny_models["tiny-llama"], *flags, *EXACT) as server:
        expected = [complete(server, prompt=text, lora=lora, cache_prompt=False)["content"] for text, lora in asked]

        def ask(number: int) -> None:
            chance = random.Random(number)
            text, lora = asked[number % 12]
            if chance.random() < 0.5:
                said = complete(server, prompt=text, lora=lora)["content"]
            else:
                said = joined(streamed(server, prompt=text, lora=lora))
            assert said == expected[number % 12]
            if chance.random() < 0.4:
                action, slot = chance.choice(["save", "restore", "erase"]), chance.randrange(4)
                body = {"filename": f"{chance.randrange(3)}.bin"}
                # the file may not be there yet, or be of other adapters
                assert server.post(f"/slots/{slot}?action={action}", body).status in (200, 400)
            if chance.random() < 0.2:
                scale = {"id": chance.randrange(2), "scale": chance.choice([0.0, 0.3, 1.0])}
                assert server.post("/lora-adapters", [scale]).status == 200

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(ask, number) for number in range(60)]:
                done.result()
        wait_for(lambda: all_idle(server))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_and_completions_share_a_server(tiny_models: dict[str, Path], pooling: str) -> None:
    flags = ("-c", 4096, "-np", 4, "-t", 1, "--embeddings", "--pooling", pooling, "-ub", 256)
    with ServerProcess("-m", tiny_models["tiny-llama"], *flags, *EXACT) as server:

        def embed() -> list[float]:
            response = server.post("/v1/embeddings", {"input": ["Once upon", "Tom said that " * 20]})
            assert response.status == 200
            vector: list[float] = response.json()["data"][0]["embedding"]
            return vector

        text, vector = complete(server, prompt="Once there was", cache_prompt=False)["content"], embed()

        def ask(number: int) -> None:
            if number % 2:
                body = {"prompt": "Once there was", "cache_prompt": bool(number % 3)}
                assert complete(server, **body)["content"] == text
            else:
                assert embed() == pytest.approx(vector, abs=1e-4)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(ask, number) for number in range(40)]:
                done.result()


@pytest.fixture(scope="module")
def chat(tiny_model_path: Path) -> Iterator[openai.OpenAI]:
    with (
        ServerProcess("-m", tiny_model_path, "-c", 4096, "-np", 4, "-kvu", "-t", 1, *EXACT) as server,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("seed", range(4))
def test_streamed_choices_with_stops_and_probabilities_are_the_plain_ones(chat: openai.OpenAI, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Tell {seed}"}],
        "n": 3,
        "seed": seed,
        "temperature": 1.5,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["the", " he", "a b", "Tom said"],
        "extra_body": {"cache_prompt": False},
    }
    plain = chat.chat.completions.create(**asked)
    texts, said, reasons = ["", "", ""], [b"", b"", b""], ["", "", ""]
    usage = None
    for chunk in chat.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs is not None:
                said[choice.index] += b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content or ())
    assert texts == [choice.message.content for choice in plain.choices]
    assert reasons == [choice.finish_reason for choice in plain.choices]
    assert [data.decode(errors="replace") for data in said] == texts
    assert usage is not None and plain.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (plain.usage.prompt_tokens, plain.usage.completion_tokens)
