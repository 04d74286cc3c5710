"""The genuine llama-server and ours agree on embeddings, rerank, infill, adapters and decisions."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_differential import Pair, assert_same, start_pair

from make_tiny_models import DECISION_TEMPLATES

pytestmark = pytest.mark.reference

#: Without flash attention and rounded cells, batches of other sizes give the same numbers.
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
TEXTS = ["Tom and Nora look for water", "the sound of a long day, 42!", "é who"]


def close(theirs: Any, ours: Any, where: str = "") -> None:
    """Raises AssertionError where two JSON values differ by more than arithmetic can."""
    if isinstance(theirs, float) or isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-4), where
    elif isinstance(theirs, dict) and isinstance(ours, dict):
        assert list(theirs) == list(ours), where
        for key in theirs:
            close(theirs[key], ours[key], f"{where}.{key}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        assert len(theirs) == len(ours), where
        for place, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            close(a, b, f"{where}[{place}]")
    else:
        assert theirs == ours, where


def alike(pair: Pair, path: str, body: Any) -> Any:
    """Same status and, but for arithmetic, the same JSON, members in the same order."""
    theirs, ours = pair.request("POST", path, body)
    assert ours.status == theirs.status, f"theirs: {theirs.text}\nours: {ours.text}"
    if ours.status != 200:
        assert_same(theirs.json(), ours.json())
    else:
        close(theirs.json(), ours.json())
    return ours.json()


# -- embeddings


@pytest.fixture(scope="module", params=["mean", "cls", "last"])
def pooled(
    request: pytest.FixtureRequest, reference_server: tuple[str, ...], tiny_models: dict[str, Path]
) -> Iterator[Pair]:
    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-embed"], "--embeddings", "--pooling", request.param, "-c", 512, "-np", 2]
        yield start_pair(reference_server, stack, *flags, *EXACT)


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "string": {"input": TEXTS[0]},
    "empty string": {"input": ""},
    "strings": {"input": TEXTS},
    "tokens": {"input": [5, 6, 7]},
    "tokens and strings": {"input": [5, "Tom", 6]},
    "lists": {"input": [[5, 6], "Tom", [7, "and"]]},
    "objects": {"input": [{"prompt_string": "Tom"}, {"content": [{"type": "text", "text": "a"}, {"type": "text"}]}]},
    "content": {"content": TEXTS[:2]},
    "many": {"input": [f"{text} {number}" for number in range(8) for text in TEXTS]},
    "model": {"input": "x", "model": "mine"},
    "no norm": {"input": TEXTS[0], "embd_normalize": -1},
    "largest": {"input": TEXTS[0], "embd_normalize": 0},
    "taxicab": {"input": TEXTS[0], "embd_normalize": 1},
    "p-norm": {"input": TEXTS[0], "embd_normalize": 3},
    "float": {"input": TEXTS[0], "encoding_format": "float"},
}


@pytest.mark.parametrize("path", ["/embedding", "/embeddings", "/v1/embeddings"])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(pooled: Pair, path: str, name: str) -> None:
    alike(pooled, path, EMBEDDINGS[name])


def test_base64(pooled: Pair) -> None:
    theirs, ours = (
        response.json()
        for response in pooled.request("POST", "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})
    )
    for a, b in zip(theirs["data"], ours["data"], strict=True):
        vectors = [base64.b64decode(entry.pop("embedding")) for entry in (a, b)]
        n = len(vectors[0]) // 4
        assert struct.unpack(f"<{n}f", vectors[1]) == pytest.approx(struct.unpack(f"<{n}f", vectors[0]), abs=1e-4)
    assert theirs == ours


EMBEDDING_ERRORS: dict[str, Any] = {
    "nothing": {},
    "empty list": {"input": []},
    "a flag": {"input": True},
    "an object": {"input": {}},
    "an unknown format": {"input": "x", "encoding_format": "hex"},
    "no list of parts": {"input": {"content": "x"}},
    "an unknown part": {"input": {"content": [{"type": "unknown"}]}},
    "a token that is none": {"input": [999999]},
}


@pytest.mark.parametrize("name", EMBEDDING_ERRORS)
def test_embedding_errors(pooled: Pair, name: str) -> None:
    pooled.same("POST", "/v1/embeddings", EMBEDDING_ERRORS[name])


def test_vectors_of_tokens(reference_server: tuple[str, ...], tiny_models: dict[str, Path]) -> None:
    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-llama"], "--embeddings", "--pooling", "none", "-c", 512, "-np", 2]
        pair = start_pair(reference_server, stack, *flags, *EXACT)
        alike(pair, "/embeddings", {"input": ["Once there was", "Tom"], "embd_normalize": 1})
        pair.same("POST", "/v1/embeddings", {"input": "Once"})
        pair.same("GET", "/props")


def test_a_causal_model_computes_long_inputs_in_pieces(
    reference_server: tuple[str, ...], tiny_models: dict[str, Path]
) -> None:
    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-llama"], "--embeddings", "--pooling", "last", "-c", 1024, "-np", 2, "-ub", 64]
        pair = start_pair(reference_server, stack, *flags, *EXACT)
        alike(pair, "/v1/embeddings", {"input": ["the and " * 100, "Tom"]})


def test_the_norm_of_the_command_line(reference_server: tuple[str, ...], tiny_models: dict[str, Path]) -> None:
    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-embed"], "--embeddings", "--embd-normalize", 1, "-c", 512, "-np", 2]
        pair = start_pair(reference_server, stack, *flags, *EXACT)
        alike(pair, "/v1/embeddings", {"input": TEXTS})
        alike(pair, "/v1/embeddings", {"input": TEXTS, "embd_normalize": 2})
        for path in ("/v1/rerank", "/v1/systemone", "/infill"):
            pair.same("POST", path, {"query": "x", "documents": ["y"], "input_prefix": "a", "input_suffix": "b"})


# -- rerank


@pytest.fixture(scope="module")
def ranks(reference_server: tuple[str, ...], tiny_models: dict[str, Path]) -> Iterator[Pair]:
    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-rerank"], "--reranking", "-c", 512, "-np", 2]
        yield start_pair(reference_server, stack, *flags, *EXACT)


RERANKS: dict[str, dict[str, Any]] = {
    "documents": {"query": "who was Tom", "documents": TEXTS},
    "texts": {"query": "who was Tom", "texts": TEXTS},
    "return_text": {"query": "who", "texts": TEXTS, "return_text": True},
    "top_n": {"query": "who", "documents": TEXTS, "top_n": 2},
    "top_n of texts": {"query": "who", "texts": TEXTS, "top_n": 1},
    "top_n too large": {"query": "who", "documents": TEXTS, "top_n": 99},
    "model": {"query": "who", "documents": TEXTS, "model": "mine"},
    "special tokens as text": {"query": "[CLS] who", "documents": ["[SEP] Tom [MASK]", "Tom"]},
    "empty": {"query": "", "documents": ["", "Tom"]},
    "no query": {"documents": TEXTS},
    "query of another type": {"query": 5, "documents": TEXTS},
    "no documents": {"query": "who"},
    "empty documents": {"query": "who", "documents": []},
    "documents of another type": {"query": "who", "documents": [1, 2]},
}


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
@pytest.mark.parametrize("name", RERANKS)
def test_rerank(ranks: Pair, path: str, name: str) -> None:
    alike(ranks, path, RERANKS[name])


# -- infill


@pytest.fixture(scope="module", params=["prefix first", "suffix first"])
def fills(
    request: pytest.FixtureRequest, reference_server: tuple[str, ...], tiny_models: dict[str, Path]
) -> Iterator[Pair]:
    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-bpe"], "-c", 2048, "-np", 2, "-b", 256]
        if request.param == "suffix first":
            flags.append("--spm-infill")
        yield start_pair(reference_server, stack, *flags)


GAP: dict[str, Any] = {"input_prefix": "def f(x):\n    ", "input_suffix": "\n# end", "n_predict": 8, "temperature": 0}
EXTRA = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "the sound of water"}]

FILLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt": {"prompt": "return x"},
    "prompt with control tokens": {"prompt": "<|endoftext|>return"},
    "control tokens elsewhere": {"input_prefix": "<|test_fim_mid|>a", "input_suffix": "<|endoftext|>"},
    "extra": {"prompt": "return x", "input_extra": EXTRA},
    "empty extra": {"input_extra": []},
    "much extra": {"input_extra": [{"text": f"{number} the sound of water " * 60} for number in range(12)]},
    "long prefix": {"input_prefix": "the sound of water " * 200},
    "long suffix": {"input_suffix": "the sound of water " * 200},
    "long both": {"input_prefix": "one two " * 300, "input_suffix": "three four " * 300, "prompt": "and so"},
    "tokens": {"input_prefix": [70, "ab", 71], "input_suffix": [72]},
    "probabilities": {"prompt": "return", "n_probs": 2},
    "too long": {"prompt": "the sound of water " * 600},
    "prefix of another type": {"input_prefix": 5},
    "extra of another type": {"input_extra": {}},
    "extra without text": {"input_extra": [{"filename": "a"}]},
    "extra with a number": {"input_extra": [{"filename": 5, "text": "x"}]},
    "extra text of another type": {"input_extra": [{"text": 5}]},
}


@pytest.mark.parametrize("name", FILLS)
def test_infill(fills: Pair, name: str) -> None:
    fills.same("POST", "/infill", {**GAP, **FILLS[name]})


# -- adapters


@pytest.fixture(scope="module")
def adapted(reference_server: tuple[str, ...], tiny_models: dict[str, Path]) -> Iterator[Pair]:
    names = ",".join(str(tiny_models[name]) for name in ("tiny-lora-a", "tiny-lora-b", "tiny-alora"))
    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-llama"], "-c", 512, "-np", 1, "--lora", names]
        yield start_pair(reference_server, stack, *flags, *EXACT)


BEFORE = "The river and the stone and what each other said. "
CASES: dict[str, tuple[list[dict[str, float]], str]] = {
    "off": ([{"id": 0, "scale": 0.0}], "Once"),
    "one": ([{"id": 1, "scale": 0.75}], "Once"),
    "two": ([{"id": 0, "scale": 0.5}, {"id": 1, "scale": -0.5}], "Once"),
    "unknown": ([{"id": 7, "scale": 1.0}], "Once"),
    "alora": ([{"id": 2, "scale": 1.0}], BEFORE + "Once Tom had seen it he"),
    "alora without invocation": ([{"id": 2, "scale": 1.0}], BEFORE + "Once Nora had seen it she"),
    "alora at once": ([{"id": 2, "scale": 1.0}], "Once Tom had seen it he"),
    "alora at the end": ([{"id": 2, "scale": 1.0}], BEFORE + "Once Tom"),
    "alora invoked twice": ([{"id": 2, "scale": 1.0}], f"{BEFORE} Once Tom {BEFORE} Once Tom had"),
    "alora beside another": ([{"id": 0, "scale": 0.5}, {"id": 2, "scale": 1.0}], BEFORE + "Once Tom had"),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_of_a_request(adapted: Pair, name: str) -> None:
    lora, prompt = CASES[name]
    # the reference reuses cells of other adapters
    adapted.same_completion(prompt=prompt, lora=lora, cache_prompt=False)


def test_the_list_of_adapters_and_its_changes(adapted: Pair) -> None:
    adapted.same("GET", "/lora-adapters")
    bodies: list[Any] = [[{"id": 1, "scale": 0.5}], [{"id": 0}], [], {}, "x", [{"id": 0, "scale": 1.0}]]
    for body in bodies:
        adapted.same("POST", "/lora-adapters", body)
        adapted.same("GET", "/lora-adapters")
        adapted.same_completion(prompt="Once", cache_prompt=False)


def test_no_adapters(reference_server: tuple[str, ...], tiny_models: dict[str, Path]) -> None:
    with ExitStack() as stack:
        pair = start_pair(reference_server, stack, "-m", tiny_models["tiny-llama"], "-c", 256, "-np", 1)
        pair.same("GET", "/lora-adapters")
        pair.same("POST", "/lora-adapters", [{"id": 0, "scale": 1.0}])


# -- decisions

QUESTIONS: dict[str, Any] = {
    "route": {
        "type": "choice",
        "instructions": "Who is it for?",
        "criteria": {"water": "wells and <|box_end|> rivers", "stone": None, "a sound": {"k": ["x", {"y": 1}]}},
    },
    "only": {"type": "choice", "instructions": ["a", "b"], "criteria": {"one": None}},
    "letters": {"type": "choice", "instructions": "x", "criteria": {"Z": "zet", "q": "ku"}},
    "many": {"type": "choice", "instructions": "pick", "criteria": {f"k{number}": None for number in range(12)}},
    "urgency": {"type": "score", "instructions": "How soon?", "criteria": ["can wait", "this week", None, "now"]},
    "angry": {"type": "noul", "instructions": {"ask": "Is he angry?"}},
    "described": {"type": "noul", "instructions": "Is it?", "criteria": {"true": "it is", "no": "it is not"}},
}
STATES: dict[str, Any] = {
    "text": "Tom was asked twice [MASK] and <|mask|> nobody came",
    "object": {"b": [1, 2.5, True, None], "a": {"z": "[SEP]", "y": "<<clef:sep>> <<d1omni:sep>>"}},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Tom"}]}, {"role": "x", "content": "Nora"}],
    "number": 5,
    "long": "the sound of water " * 30,
}


@pytest.fixture(scope="module", params=DECISION_TEMPLATES)
def decides(
    request: pytest.FixtureRequest, reference_server: tuple[str, ...], tiny_models: dict[str, Path]
) -> Iterator[Pair]:
    with ExitStack() as stack:
        flags = ["-m", tiny_models[f"tiny-{request.param}"], "-c", 4096, "-np", 4, "--metrics"]
        yield start_pair(reference_server, stack, *flags, *EXACT)


@pytest.mark.parametrize("name", STATES)
def test_decisions(decides: Pair, name: str) -> None:
    alike(decides, "/v1/systemone", {"state": STATES[name], "questions": QUESTIONS})
    decides.same("GET", "/v1/models")


DECISION_ERRORS: dict[str, Any] = {
    "no state": {"questions": QUESTIONS},
    "null state": {"state": None, "questions": {"q": QUESTIONS["angry"]}},
    "no questions": {"state": "s"},
    "empty questions": {"state": "s", "questions": {}},
    "questions of another type": {"state": "s", "questions": [1]},
    "a question of another type": {"state": "s", "questions": {"q": 5}},
    "unknown type": {"state": "s", "questions": {"q": {"type": "unknown", "instructions": "x"}}},
    "no instructions": {"state": "s", "questions": {"q": {"type": "noul"}}},
    "no criteria": {"state": "s", "questions": {"q": {"type": "choice", "instructions": "x"}}},
    "one level": {"state": "s", "questions": {"q": {"type": "score", "instructions": "x", "criteria": ["a"]}}},
    "noul criteria": {"state": "s", "questions": {"q": {"type": "noul", "instructions": "x", "criteria": []}}},
    "many options": {
        "state": "s",
        "questions": {"q": {"type": "choice", "instructions": "x", "criteria": {f"o{i}": None for i in range(300)}}},
    },
    "images": {"state": "s", "questions": QUESTIONS, "images": ["data:image/png;base64,AAAA"]},
    "images by address": {"state": "s", "questions": QUESTIONS, "images": ["https://example.com/a.png"]},
    "files of another type": {"state": "s", "questions": QUESTIONS, "files": "x"},
    "videos": {"state": "s", "questions": QUESTIONS, "videos": ["x"]},
}


@pytest.mark.parametrize("name", DECISION_ERRORS)
def test_decision_errors(decides: Pair, name: str) -> None:
    alike(decides, "/v1/systemone", DECISION_ERRORS[name])


def test_shared_beginnings_are_counted_alike(reference_server: tuple[str, ...], tiny_models: dict[str, Path]) -> None:
    def counts(text: str) -> list[int]:
        names = ("llamacpp:prompt_tokens_total ", "llamacpp:prompt_tokens_cached_total ")
        return [int(float(line.split()[1])) for line in text.splitlines() if line.startswith(names)]

    with ExitStack() as stack:
        flags = ["-m", tiny_models["tiny-openjev"], "-c", 4096, "-np", 3, "--metrics"]
        pair = start_pair(reference_server, stack, *flags, *EXACT)
        for _ in range(2):
            asked = {name: QUESTIONS[name] for name in ("route", "urgency", "angry")}
            alike(pair, "/v1/systemone", {"state": STATES["long"], "questions": asked})
            theirs, ours = (counts(response.text) for response in pair.request("GET", "/metrics"))
            assert ours == theirs
            assert ours[1] > 0
