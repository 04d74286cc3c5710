"""The same requests to the genuine llama-server and to ours give the same status and the same JSON.

Both servers are started with the same flags on the same tiny model and see the same requests in the same order, so that
even what depends on earlier requests (cached tokens, slots) has to agree. Times, ids and the build differ by nature;
what differs on purpose (docs/differences.md) is left out of the requests.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from server_process import Response, ServerProcess

pytestmark = pytest.mark.reference

#: Members whose values are times, dates, random or the build's.
VOLATILE = {
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
    "time_ms",
    "created",
    "build_info",
    "system_fingerprint",
    "id_task",
    "media_marker",
}
#: Members that come from floating point arithmetic of the model.
INEXACT = {"logprob", "prob"}

#: What the reference's JSON library puts before its messages.
JSON_LIBRARY = re.compile(r"\[json\.exception\.\w+\.\d+\] ")


@dataclass(slots=True)
class Pair:
    """The same server twice: the genuine one and ours."""

    reference: ServerProcess
    ours: ServerProcess

    def request(self, method: str, path: str, body: Any = None) -> tuple[Response, Response]:
        return self.reference.request(method, path, body), self.ours.request(method, path, body)

    def same(self, method: str, path: str, body: Any = None) -> Any:
        """Send to both, compare, and return what ours answered."""
        theirs, ours = self.request(method, path, body)
        text = f"theirs: {theirs.text}\nours: {ours.text}"
        assert ours.status == theirs.status, text
        assert ours.headers.get("content-type") == theirs.headers.get("content-type"), text
        assert_same(theirs.json(), ours.json())
        return ours.json()

    def same_completion(self, **body: Any) -> Any:
        body.setdefault("n_predict", 12)
        body.setdefault("temperature", 0)
        return self.same("POST", "/completion", body)

    def same_stream(self, **body: Any) -> list[Any]:
        body = {"n_predict": 12, "temperature": 0, **body, "stream": True}
        streams = [self.events(server, body) for server in (self.reference, self.ours)]
        assert_same(*streams)
        return streams[1]

    @staticmethod
    def events(server: ServerProcess, body: Any) -> list[Any]:
        with server.stream("/completion", body) as stream:
            assert stream.status == 200
            # a list of prompts makes the reference begin with "data: null"
            return [event for event in stream if event is not None]


def differences(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Every place where two JSON values differ beyond what they may."""
    name = where.rpartition(".")[2]
    if isinstance(theirs, dict) and isinstance(ours, dict):
        out = [f"{where}.{key}: only theirs" for key in theirs.keys() - ours.keys()]
        out += [f"{where}.{key}: only ours" for key in ours.keys() - theirs.keys()]
        for key in theirs.keys() & ours.keys() - VOLATILE:
            out += differences(theirs[key], ours[key], f"{where}.{key}")
        return sorted(out)
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            return [f"{where}: {len(theirs)} members theirs, {len(ours)} ours"]
        return [
            text
            for i, (a, b) in enumerate(zip(theirs, ours, strict=True))
            for text in differences(a, b, f"{where}[{i}]")
        ]
    if name in INEXACT and isinstance(theirs, float) and isinstance(ours, float):
        return (
            [] if math.isclose(theirs, ours, rel_tol=1e-3, abs_tol=1e-4) else [f"{where}: {theirs} theirs, {ours} ours"]
        )
    if name == "message" and isinstance(theirs, str):
        theirs = JSON_LIBRARY.sub("", theirs)
    same = theirs == ours and isinstance(theirs, bool) == isinstance(ours, bool)
    return [] if same else [f"{where}: {theirs!r} theirs, {ours!r} ours"]


def assert_same(theirs: Any, ours: Any) -> None:
    found = differences(theirs, ours)
    assert not found, "\n".join(found)


def start_pair(reference: tuple[str, ...], stack: ExitStack, *flags: Any) -> Pair:
    shared = ["-t", 1, "--no-warmup", *flags]
    theirs = stack.enter_context(ServerProcess(*shared, command=reference))
    ours = stack.enter_context(ServerProcess(*shared, "--no-share-prefix", "--stream-gap", 0))
    return Pair(theirs, ours)


@pytest.fixture(scope="module")
def pair(reference_server: tuple[str, ...], tiny_model_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield start_pair(reference_server, stack, "-m", tiny_model_path, "-c", 2048, "-np", 2, "--metrics")


GRAMMAR = 'root ::= "yes" | "no" " way"?'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "string": {"prompt": "Once"},
    "empty string": {"prompt": ""},
    "unicode": {"prompt": "é 日本 😀 \u0000 x"},
    "newlines and tabs": {"prompt": "a\n\n\tb\r\n"},
    "special token as text": {"prompt": "<s>Once</s> and <|im_start|>"},
    "token array": {"prompt": [1, 370, 265, 423]},
    "mixed array": {"prompt": ["Once", 265, "the", 423]},
    "one-element list": {"prompt": ["Once"]},
    "list of prompts": {"prompt": ["Once", "Tom and Nora", "The"]},
    "list of token arrays": {"prompt": [[1, 370], [1, 265, 423]]},
    "list of mixed": {"prompt": [[1, "Once"], "Tom", ["the", 423]]},
    "n_predict 1": {"prompt": "Once", "n_predict": 1},
    "n_predict 2": {"prompt": "Once", "n_predict": 2},
    "n_predict minus one": {"prompt": "a b c d", "n_predict": -1, "stop": ["e"]},
    "max_tokens": {"prompt": "Once", "max_tokens": 3, "n_predict": None},
    "n_keep and n_discard": {"prompt": "Once", "n_keep": 4, "n_discard": 2},
    "n_keep minus one": {"prompt": "Once", "n_keep": -1},
    "stop word": {"prompt": "Once", "n_predict": 30, "stop": ["the"]},
    "stop word at once": {"prompt": "Once", "stop": ["0"]},
    "stop words": {"prompt": "Once", "n_predict": 40, "stop": ["zzz", " find m", "i he"]},
    "stop word spanning tokens": {"prompt": "Once", "n_predict": 40, "stop": ["would ihi he"]},
    "stop words that never come": {"prompt": "Once", "stop": ["never", "\n\n\n"]},
    "empty stop list": {"prompt": "Once", "stop": []},
    "stop as string": {"prompt": "Once", "stop": "the"},
    "stop word and probabilities": {"prompt": "Once", "n_predict": 40, "stop": ["he the"], "n_probs": 2},
    "n_probs": {"prompt": "Once", "n_probs": 3},
    "n_probs after sampling": {"prompt": "Once", "n_probs": 3, "post_sampling_probs": True},
    "n_probs after sampling, warm": {
        "prompt": "Once",
        "n_probs": 5,
        "post_sampling_probs": True,
        "temperature": 0.7,
        "top_k": 4,
        "seed": 3,
    },
    "n_probs of broken characters": {"prompt": "Once", "n_probs": 4, "grammar": 'root ::= "€é猫"', "n_predict": 8},
    "n_probs zero": {"prompt": "Once", "n_probs": 0, "post_sampling_probs": True},
    "logprobs": {"prompt": "Once", "logprobs": 2},
    "seeded": {"prompt": "Once", "temperature": 1.0, "seed": 42},
    "seeded, all samplers": {
        "prompt": "Once",
        "temperature": 0.9,
        "seed": 7,
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
        "dry_multiplier": 0.8,
        "typical_p": 0.9,
        "top_n_sigma": 2.0,
    },
    "samplers by name": {
        "prompt": "Once",
        "samplers": ["top_k", "temperature"],
        "top_k": 5,
        "seed": 1,
        "temperature": 0.8,
    },
    "samplers by letter": {"prompt": "Once", "samplers": "kt", "top_k": 5, "seed": 1, "temperature": 0.8},
    "samplers by other names": {"prompt": "Once", "samplers": ["top-k", "typical", "nonsense", "temp"], "seed": 1},
    "no samplers": {"prompt": "Once", "samplers": [], "seed": 5, "temperature": 0.5},
    "mirostat": {
        "prompt": "Once",
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "seed": 9,
        "temperature": 0.8,
    },
    "mirostat 1": {"prompt": "Once", "mirostat": 1, "seed": 9, "temperature": 0.8},
    "dynamic temperature": {
        "prompt": "Once",
        "dynatemp_range": 0.5,
        "dynatemp_exponent": 1.2,
        "seed": 2,
        "temperature": 0.8,
    },
    "penalties": {
        "prompt": "ke ke ke ke",
        "n_predict": 30,
        "repeat_penalty": 1.5,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repeat_last_n": 16,
    },
    "repeat_last_n minus one": {"prompt": "ke ke ke ke", "n_predict": 20, "repeat_penalty": 1.3, "repeat_last_n": -1},
    "dry": {
        "prompt": "the and the and",
        "n_predict": 30,
        "dry_multiplier": 2.0,
        "dry_allowed_length": 1,
        "dry_penalty_last_n": -1,
    },
    "dry sequence breakers": {"prompt": "the and", "dry_multiplier": 1.0, "dry_sequence_breakers": ["\n", "x"]},
    "adaptive": {"prompt": "Once", "adaptive_target": 0.5, "adaptive_decay": 0.8, "seed": 4, "temperature": 0.8},
    "min_keep": {"prompt": "Once", "min_keep": 2, "top_p": 0.1, "seed": 4, "temperature": 0.8},
    "top_k negative": {"prompt": "Once", "top_k": -3},
    "ignore_eos": {"prompt": "Once", "n_predict": 60, "ignore_eos": True},
    "logit_bias pairs": {"prompt": "Once", "logit_bias": [[513, -100.0], [265, 5]]},
    "logit_bias ban": {"prompt": "Once", "logit_bias": [[513, False], [305, False]]},
    "logit_bias text": {"prompt": "Once", "logit_bias": [["the", 20.0]]},
    "logit_bias object": {"prompt": "Once", "logit_bias": {"513": -100, "the": 3.5}},
    "logit_bias object ban": {"prompt": "Once", "logit_bias": {"513": False}},
    "logit_bias out of range": {"prompt": "Once", "logit_bias": [[100000, 5.0], [-1, 3]]},
    "grammar": {"prompt": "Once", "grammar": GRAMMAR},
    "grammar beside schema": {"prompt": "Once", "grammar": GRAMMAR, "json_schema": SCHEMA},
    "grammar that ends": {"prompt": "Once", "grammar": 'root ::= "one two three"', "n_predict": 60},
    "json schema": {"prompt": "Once", "json_schema": SCHEMA, "n_predict": 80},
    "json schema empty": {"prompt": "Once", "json_schema": {}, "n_predict": 20},
    "n_indent": {"prompt": "Once", "n_predict": 60, "n_indent": 4, "grammar": 'root ::= "a\\n    b\\n  c\\n    d"'},
    "t_max_predict_ms": {"prompt": "Once", "t_max_predict_ms": 100000},
    "return_tokens": {"prompt": "Once", "return_tokens": True},
    "response_fields": {"prompt": "Once", "response_fields": ["content", "generation_settings/n_predict", "nothing"]},
    "response_fields with timings": {
        "prompt": "Once",
        "response_fields": ["timings/cache_n", "stop_type", "tokens_cached"],
    },
    "empty response_fields": {"prompt": "Once", "response_fields": []},
    "timings_per_token": {"prompt": "Once", "timings_per_token": True},
    "cache_prompt off": {"prompt": "Once", "cache_prompt": False},
    "id_slot": {"prompt": "Once", "id_slot": 1},
    "id_slot zero": {"prompt": "Once", "id_slot": 0},
    "n_cmpl": {"prompt": "Once", "n_cmpl": 2, "seed": 11, "temperature": 0.9},
    "n": {"prompt": "Tom", "n": 2},
    "unknown fields": {"prompt": "Once", "whatever": [1, 2], "echo": True},
    "null fields": {"prompt": "Once", "top_k": None, "stop": None, "seed": None, "grammar": None},
    "numbers as floats": {"prompt": "Once", "n_predict": 4.0, "top_k": 10.0, "seed": 3.0},
    "lora of nothing": {"prompt": "Once", "lora": []},
    "speculative settings": {"prompt": "Once", "speculative.n_max": 4, "speculative.n_min": 1},
    "backend_sampling": {"prompt": "Once", "backend_sampling": False},
    "cache of the same prompt": {"prompt": "Once upon a time there was a boy and a dog"},
    "cache of the same prompt again": {"prompt": "Once upon a time there was a boy and a dog"},
    "cache of a longer prompt": {"prompt": "Once upon a time there was a boy and a dog and a cat"},
    "cache of a shorter prompt": {"prompt": "Once upon a time there"},
    "n_cache_reuse": {"prompt": "upon a time there was a boy and a dog and a cat", "n_cache_reuse": 4},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion(pair: Pair, name: str) -> None:
    pair.same_completion(**COMPLETIONS[name])


STREAMS = [
    "string",
    "unicode",
    "list of prompts",
    "n_predict 1",
    "stop word",
    "stop words",
    "stop word spanning tokens",
    "n_probs",
    "n_probs of broken characters",
    "n_probs after sampling",
    "grammar that ends",
    "json schema",
    "return_tokens",
    "response_fields",
    "timings_per_token",
    "id_slot",
    "n_cmpl",
    "cache of a longer prompt",
]


@pytest.mark.parametrize("name", STREAMS)
def test_stream(pair: Pair, name: str) -> None:
    body = COMPLETIONS[name]
    streams = [
        pair.events(server, {"n_predict": 12, "temperature": 0, **body, "stream": True})
        for server in (pair.reference, pair.ours)
    ]
    # several completions may come interleaved in any way
    theirs, ours = (sorted(events, key=lambda event: event.get("index", 0)) for events in streams)
    assert_same(theirs, ours)
    assert len(ours) > 1


def test_stream_with_progress(pair: Pair) -> None:
    events = pair.same_stream(prompt="the and " * 60, return_progress=True)
    assert "prompt_progress" in events[0]
    # the second time most of it is cached
    pair.same_stream(prompt="the and " * 60, return_progress=True, timings_per_token=True)


def test_streams_on_the_wire_have_the_same_frames(pair: Pair) -> None:
    body = {"prompt": "Once", "n_predict": 3, "temperature": 0, "stream": True}
    lines = []
    for server in (pair.reference, pair.ours):
        with server.stream("/completion", body) as stream:
            list(stream)
            lines.append([line.partition(":")[0] if "{" in line else line for line in stream.lines])
            lines[-1].append(stream.response.headers["Content-Type"])
    assert lines[0] == lines[1]


ERRORS: dict[str, tuple[str, str, Any]] = {
    "no prompt": ("POST", "/completion", {"n_predict": 2}),
    "prompt is null": ("POST", "/completion", {"prompt": None}),
    "prompt is a number": ("POST", "/completion", {"prompt": 5}),
    "prompt is an object": ("POST", "/completion", {"prompt": {}}),
    "prompt is an empty list": ("POST", "/completion", {"prompt": []}),
    "token out of range": ("POST", "/completion", {"prompt": [999999999], "n_predict": 2}),
    "negative token": ("POST", "/completion", {"prompt": [-1], "n_predict": 2}),
    "prompt too long": ("POST", "/completion", {"prompt": "the " * 3000}),
    "prompt too long, streamed": ("POST", "/completion", {"prompt": "the " * 3000, "stream": True}),
    "unknown schema type": ("POST", "/completion", {"prompt": "x", "json_schema": {"type": "nonsense"}}),
    "too many completions": ("POST", "/completion", {"prompt": "x", "n_cmpl": 3}),
    "n_predict is text": ("POST", "/completion", {"prompt": "x", "n_predict": "many"}),
    "stream is text": ("POST", "/completion", {"prompt": "x", "n_predict": 1, "stream": "yes"}),
    "repeat_last_n too small": ("POST", "/completion", {"prompt": "x", "repeat_last_n": -2}),
    "dry_penalty_last_n too small": ("POST", "/completion", {"prompt": "x", "dry_penalty_last_n": -2}),
    "dry breakers empty": ("POST", "/completion", {"prompt": "x", "dry_multiplier": 1, "dry_sequence_breakers": []}),
    "lora is text": ("POST", "/completion", {"prompt": "x", "lora": "x"}),
    "tokenize without content": ("POST", "/tokenize", {}),
    "detokenize without tokens": ("POST", "/detokenize", {}),
    "unknown route": ("GET", "/nothing", None),
    "unknown route, posted": ("POST", "/v1/nothing", {}),
    "props are read-only": ("POST", "/props", {}),
    "slot action without path": ("POST", "/slots/0?action=save", {"filename": "x"}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(pair: Pair, name: str) -> None:
    pair.same(*ERRORS[name])


@pytest.mark.parametrize("body", [b"{:", b"[]", b"null", b"", b"\xff\xfe{", b'{"prompt": "a"', b'"text"'])
def test_error_of_a_body_that_is_no_object(pair: Pair, body: bytes) -> None:
    """The texts come from each one's JSON library, the rest agrees."""
    theirs, ours = pair.request("POST", "/completion", body)
    assert ours.status == theirs.status
    expected, got = theirs.json()["error"], ours.json()["error"]
    assert (got["code"], got["type"], bool(got["message"])) == (expected["code"], expected["type"], True)


READS: dict[str, tuple[str, str, Any]] = {
    "health": ("GET", "/health", None),
    "v1 health": ("GET", "/v1/health", None),
    "props": ("GET", "/props", None),
    "props of a model": ("GET", "/props?model=some%2Fname&autoload=false", None),
    "tools that are off": ("GET", "/tools", None),
    "call of a tool that is off": ("POST", "/tools", {"tool": "file_glob_search", "params": {"path": "~"}}),
    "proxy that is off": ("GET", "/cors-proxy?url=http%3A%2F%2F127.0.0.1", None),
    "proxy that is off, posted": ("POST", "/cors-proxy?url=http%3A%2F%2F127.0.0.1", {}),
    "models": ("GET", "/models", None),
    "v1 models": ("GET", "/v1/models", None),
    "slots": ("GET", "/slots", None),
    "tokenize": ("POST", "/tokenize", {"content": "Once upon a time, é 日本 😀\n"}),
    "tokenize empty": ("POST", "/tokenize", {"content": ""}),
    "tokenize with special": ("POST", "/tokenize", {"content": "Once", "add_special": True}),
    "tokenize control token": ("POST", "/tokenize", {"content": "<s>Once</s>"}),
    "tokenize control token as text": ("POST", "/tokenize", {"content": "<s>Once</s>", "parse_special": False}),
    "tokenize with pieces": ("POST", "/tokenize", {"content": "Once é 猫", "with_pieces": True, "add_special": True}),
    "tokenize list": ("POST", "/tokenize", {"content": ["Once", 265, "the"]}),
    "detokenize": ("POST", "/detokenize", {"tokens": [1, 370, 265, 423]}),
    "detokenize nothing": ("POST", "/detokenize", {"tokens": []}),
    "detokenize broken character": ("POST", "/detokenize", {"tokens": [234, 143]}),
}


@pytest.mark.parametrize("name", READS)
def test_read(pair: Pair, name: str) -> None:
    pair.same(*READS[name])


def test_slots_after_a_request(pair: Pair) -> None:
    pair.same_completion(prompt="Once", seed=5, stop=["x"], n_probs=1, id_slot=0)
    pair.same("GET", "/slots")
    theirs, ours = pair.request("GET", "/slots?fail_on_no_slot=1")
    assert theirs.status == ours.status == 200


def test_metrics_have_the_same_names_types_and_help(pair: Pair) -> None:
    theirs, ours = pair.request("GET", "/metrics")
    assert ours.status == theirs.status == 200

    # what the other does not have has names of its own
    def names(text: str) -> set[str]:
        return {line.rpartition(" ")[0] for line in text.splitlines() if line.startswith("llamacpp:")}

    def kinds(text: str) -> set[str]:
        return {line for line in text.splitlines() if line.startswith("# TYPE llamacpp:")}

    assert names(theirs.text) == names(ours.text)
    assert kinds(theirs.text) == kinds(ours.text)


def test_a_conversation_reuses_the_same_number_of_tokens(pair: Pair) -> None:
    prompt = "The river and the stone. "
    cached = []
    for _ in range(6):
        answer = pair.same_completion(prompt=prompt, n_predict=10)
        cached.append(answer["timings"]["cache_n"])
        prompt += answer["content"] + " And then? "
    assert cached[0] < cached[1] < cached[-1]


def test_pinned_slots_keep_their_own_prompts(pair: Pair) -> None:
    for prompt, id_slot in (("Tom and Nora", 0), ("He said that", 1), ("Tom and Nora see", 0), ("He said that she", 1)):
        pair.same_completion(prompt=prompt, id_slot=id_slot)


def test_context_is_used_up(reference_server: tuple[str, ...], tiny_model_path: Path) -> None:
    with ExitStack() as stack:
        pair = start_pair(reference_server, stack, "-m", tiny_model_path, "-c", 256, "-np", 1)
        answer = pair.same_completion(prompt="the and " * 40, n_predict=400, ignore_eos=True)
        assert answer["truncated"]
        pair.same_completion(prompt="Once", n_predict=-1, ignore_eos=True)
        pair.same("POST", "/completion", {"prompt": "the and " * 130})


def test_context_shift(reference_server: tuple[str, ...], tiny_model_path: Path) -> None:
    with ExitStack() as stack:
        pair = start_pair(reference_server, stack, "-m", tiny_model_path, "-c", 256, "-np", 1, "--context-shift")
        for extra in ({}, {"n_keep": 10}, {"n_keep": -1}, {"n_discard": 20}, {"n_keep": 1000}):
            answer = pair.same_completion(prompt="Once the river", n_predict=400, ignore_eos=True, **extra)
            assert answer["tokens_predicted"] == 400


def test_props_and_slots_of_other_settings(reference_server: tuple[str, ...], tiny_model_path: Path) -> None:
    flags = ["-m", tiny_model_path, "-c", 1024, "-np", 4, "--alias", "tiny,small", "--temp", 0.5, "--top-k", 7, "-n", 5]
    with ExitStack() as stack:
        pair = start_pair(reference_server, stack, *flags, "--no-slots", "--seed", 12, "--kv-unified")
        for path in ("/props", "/slots", "/v1/models", "/metrics"):
            pair.same("GET", path)
        pair.same("POST", "/completion", {"prompt": "Once"})
        pair.same("POST", "/completion", {"prompt": "Once", "n_predict": 8, "temperature": 0})


@pytest.mark.parametrize("name", ["tiny-bpe", "tiny-moe", "tiny-swa", "tiny-mamba"])
def test_other_models(reference_server: tuple[str, ...], tiny_models: dict[str, Path], name: str) -> None:
    prompt = "Once there was a river and a stone, and they could see what each other said. "
    with ExitStack() as stack:
        pair = start_pair(reference_server, stack, "-m", tiny_models[name], "-c", 1024, "-np", 2)
        pair.same("GET", "/props")
        first = pair.same_completion(prompt=prompt, n_predict=24)
        again = pair.same_completion(prompt=prompt, n_predict=24)
        assert again["content"] == first["content"]
        pair.same_completion(prompt=prompt + first["content"] + " And then", n_predict=24)
        pair.same_completion(prompt=prompt * 4, n_predict=8)
        pair.same_completion(prompt=prompt * 3 + "Tom", n_predict=8)


def test_adapters(reference_server: tuple[str, ...], tiny_models: dict[str, Path]) -> None:
    adapters = ",".join(str(tiny_models[name]) for name in ("tiny-lora-a", "tiny-lora-b"))
    with ExitStack() as stack:
        pair = start_pair(
            reference_server, stack, "-m", tiny_models["tiny-llama"], "-c", 512, "-np", 1, "--lora", adapters
        )
        # the reference reuses cells of other adapters
        base = {"prompt": "Once", "cache_prompt": False}
        all_on = pair.same_completion(**base)["content"]
        texts = {all_on}
        for scales in ({0: 1.0}, {1: 1.0}, {0: 0.5, 1: 0.2}):
            chosen = [{"id": index, "scale": scale} for index, scale in scales.items()]
            texts.add(pair.same_completion(**base, lora=chosen)["content"])
        assert len(texts) == 4
        assert pair.same_completion(**base)["content"] == all_on


def test_the_comparison_sees_differences() -> None:
    assert differences({"a": 1, "b": [1, {"c": True}]}, json.loads('{"b": [1, {"c": true}], "a": 1}')) == []
    assert differences({"prompt_ms": 1.0}, {"prompt_ms": 2.0}) == []
    assert differences({"prompt_ms": 1.0}, {}) == [".prompt_ms: only theirs"]
    assert differences([1, 2], [1]) == [": 2 members theirs, 1 ours"]
    assert differences({"a": 1}, {"a": True}) == [".a: 1 theirs, True ours"]
    assert differences({"logprob": -1.0}, {"logprob": -1.00001}) == []
    assert differences({"logprob": -1.0}, {"logprob": -1.1}) != []
