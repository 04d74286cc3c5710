"""Requests that mean harm, to every route of a real server: a refusal in good time, and nobody else notices."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_harness import ScriptedContext
from server_process import Response, ServerProcess
from talk import PATIENCE, all_idle, wait_for

from llamasrv.api.openapi_requests import Facts, request_schemas
from llamasrv.api.openapi_routes import OPERATIONS
from llamasrv.http.config import HttpConfig
from llamasrv.http.routes import api_routes
from llamasrv.http.state import ServerState

#: Far more than any of these requests takes, so that a busy machine changes nothing; what hangs is found all the same.
LONG = 60.0
#: What a request without sense may be answered with: wrong, no such thing, not with this server.
REFUSALS = (400, 403, 404, 413, 501)
#: Resident memory may grow by this much over a whole group of requests, KiB.
GROWTH_KB = 400_000

ROUTES = [
    (route.method, route.path.replace("<id_slot>", "0"))
    for route in api_routes(ServerState(ScriptedContext(), HttpConfig(ui=False)))
    if route.path != "/sw.js"
]
POSTS = sorted(path for method, path in ROUTES if method == "POST")


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["-c", 4096, "-np", 4, "-t", 1, "--metrics", "--props", "--jinja", "-v"]
    # --embeddings: every route that this model can serve is on
    flags += ["--embeddings", "--pooling", "mean", "--slot-save-path", tmp_path_factory.mktemp("slots")]
    with ServerProcess("-m", tiny_models["tiny-bpe"], *flags) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_models["tiny-rerank"], "-c", 512, "-np", 2, "-t", 1, "--reranking") as server:
        yield server


def error_of(response: Response) -> dict[str, Any]:
    assert response.headers["content-type"].startswith("application/json"), response.headers
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    return error


# -- bodies that are no request

DEEP = b"[" * 3000 + b"]" * 3000
NO_JSON: dict[str, bytes] = {
    "nothing": b"",
    "half a brace": b"{:",
    "list": b"[]",
    "null": b"null",
    "string": b'"x"',
    "number": b"5",
    "cut off": b'{"prompt": "abc',
    "two values": b"{} {}",
    "NaN": b'{"prompt": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "single quotes": b"{'prompt': 'x'}",
    "comment": b'{"prompt": "x" /* y */}',
    "leading zero": b'{"seed": 01}',
    "UTF-16 with mark": '{"prompt": "x"}'.encode("utf-16"),
    "UTF-16": '{"prompt": "x"}'.encode("utf-16-be"),
    "UTF-32": '{"prompt": "x"}'.encode("utf-32"),
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xc0\x80"}',
    "cut UTF-8": b'{"prompt": "\xe2\x82"}',
    "lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "surrogate as bytes": b'{"prompt": "\xed\xa0\x80"}',
    "NUL": b'{"prompt": "a\0b"}',
    "zeros": b"\0" * 1000,
    "gzip": gzip.compress(b'{"prompt": "x"}'),
    "deep list": b'{"prompt": ' + DEEP + b', "messages": ' + DEEP + b', "tools": ' + DEEP + b"}",
    "deeper": b"[" * 200_000,
    "deep object": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "brackets in turn": b'{"a":[' * 40_000,
    "XML": b"<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a 'b'>]><x>&a;</x>",
    "form": b"prompt=x&n_predict=1",
}
#: Bodies that are JSON, but not what anybody asks for. Some routes need nothing, so that these are served.
ODD_JSON: dict[str, bytes] = {
    "empty object": b"{}",
    "huge integer": b'{"prompt": [' + b"9" * 5000 + b'], "content": "x"}',
    "many digits": b'{"n_predict": 1, "seed": 0.' + b"1" * 100_000 + b"}",
    "twice": b'{"prompt": [], "prompt": [], "input": [], "input": [], "messages": 1, "messages": 2}',
    "long name": b'{"' + b"x" * 1_000_000 + b'": 1}',
    "many names": json.dumps({f"k{i}": i for i in range(50_000)}).encode(),
    "mark before": b"\xef\xbb\xbf{}",
    "white space": b" " * 1_000_000 + b"{}",
}


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_is_no_request_is_refused(server: ServerProcess, path: str) -> None:
    for name, body in NO_JSON.items():
        began = time.monotonic()
        response = server.post(path, body, timeout=LONG)
        if path == "/lora-adapters" and name == "list":
            assert response.status == 200
        elif path == "/props" or (path.startswith("/slots/") and not body):
            assert response.status in (200, 400), name  # nothing is read
        else:
            assert response.status in REFUSALS, (name, response.text)
            error_of(response)
        assert time.monotonic() - began < LONG / 2, name
    assert server.get("/health").status == 200


@pytest.mark.parametrize("path", POSTS)
def test_odd_json_is_served_or_refused(server: ServerProcess, path: str) -> None:
    for name, body in ODD_JSON.items():
        response = server.post(path, body, timeout=LONG)
        assert response.status == 200 or response.status in REFUSALS, (name, response.text)
        json.loads(response.body)


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "multipart/form-data; boundary=x", "", "a" * 5000])
def test_the_content_type_does_not_count(server: ServerProcess, kind: str) -> None:
    response = server.post("/tokenize", b'{"content": "a"}', {"Content-Type": kind})
    assert response.status == 200
    assert error_of(server.post("/completion", b"{:", {"Content-Type": kind}))["code"] == 400


@pytest.mark.parametrize("query", ["?" + "a=b&" * 2000, "?action=%00%ff", "?conv_id=%ED%A0%80&from=-1", "?;=&&&", "?%"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_odd_queries_do_no_harm(server: ServerProcess, method: str, path: str, query: str) -> None:
    response = server.request(method, path + query, b"[5" if method == "POST" else None)
    assert response.status < 500 or response.status == 501, response.text
    if response.status >= 400:
        error_of(response)


@pytest.mark.parametrize(
    "path",
    ["/slots/99999999999999999999", "/slots/-1", "/slots/%00", "/slots/0/../1", "/slots/%2e%2e%2f", "/" + "a" * 60_000],
)
def test_odd_paths_are_refused(server: ServerProcess, path: str) -> None:
    error_of(response := server.post(path + "?action=erase", {}))
    assert response.status in REFUSALS


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a" * 5000, "a\\b", "a\0b", "CON", ".", "..", "", " a", "a/b", 5]
)
@pytest.mark.parametrize("action", ["save", "restore"])
def test_slot_files_have_plain_names(server: ServerProcess, action: str, name: Any) -> None:
    response = server.post(f"/slots/0?action={action}", {"filename": name})
    assert response.status == 400
    error_of(response)


# -- values of the wrong kind in every member

WRONG: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, -(2**63), 2**70, 1e308, -0.5, "", "x", "\0", "x" * 10_000,
    [], {}, [None], [[]], [{}], [-1], [2**31], ["x", 1, None], {"a": {"b": [1]}}, {"type": "function"}, [[[[[[1]]]]]],
]  # fmt: skip
SCHEMAS = request_schemas(Facts())
SHORT = {"n_predict": 1, "max_tokens": 1, "max_output_tokens": 1}


def wrong_members() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, member and a body that is well otherwise; members that many routes share are tried on one of them."""
    done: set[tuple[str, str]] = set()
    for operation in OPERATIONS:
        if not isinstance(operation.example, dict):
            continue
        for member in SCHEMAS[operation.body].get("properties", {}):
            shared = member in SCHEMAS["CompletionRequest"]["properties"] and operation.body != "ChatRequest"
            key = ("" if shared else operation.path.removeprefix("/v1"), member)
            if key not in done:
                done.add(key)
                path = operation.path.replace("<id_slot>", "0?action=save")
                yield path, member, {**operation.example, **SHORT}


@pytest.mark.parametrize("path", sorted({path for path, _, _ in wrong_members()}))
def test_values_of_a_wrong_kind_are_refused_or_passed_over(server: ServerProcess, path: str) -> None:
    for at, member, body in wrong_members():
        if at != path:
            continue
        for value in WRONG:
            data = {**body, member: value}
            if member in SHORT and isinstance(value, int) and not 0 <= value <= 1:
                data["stop"] = ["e", "t", "a", " "]
            if data.get("n_predict") == -1 or data.get("max_tokens") == -1:
                continue
            response = server.post(path, data, timeout=LONG)
            assert response.status == 200 or response.status in REFUSALS, (member, value, response.text)
            if response.status >= 400:
                error_of(response)
    assert server.get("/health").status == 200


# -- bombs

USER = [{"role": "user", "content": "hi"}]
MIB = 1 << 20


def twice(depth: int, word: str) -> dict[str, Any]:
    """A schema of two to the power of ``depth`` parts, written with references."""
    parts: dict[str, Any] = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**parts, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def nested(depth: int, word: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if word == "items" else {word: [schema]}
    return schema


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


SCHEMA_BOMBS: dict[str, Any] = {
    "maxLength": {"type": "string", "maxLength": 10**9},
    "minLength": {"type": "string", "minLength": 10**9},
    "minItems": {"type": "array", "items": {}, "minItems": 10**9},
    "items of items": {"type": "array", "items": {"type": "array", "items": {}, "minItems": 2000}, "minItems": 2000},
    "enum": {"enum": [f"v{i}" for i in range(100_000)]},
    "enum in allOf": {"allOf": [{"enum": list(range(3000))}] * 300},
    "const": {"const": "x" * MIB},
    "circle": {"$ref": "#"},
    "circle of two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "circle in allOf": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "circle in anyOf": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "allOf of allOf": twice(40, "allOf"),
    "anyOf of anyOf": twice(100, "anyOf"),
    "deep": nested(190, "items"),
    "deep allOf": nested(95, "allOf"),
    "types": {"type": ["string", "number", "object"] * 1000},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
    "range": {"type": "integer", "minimum": -(10**18), "maximum": 10**18},
    "repetition": pattern("^a{1,100000}$"),
    "repetition of repetition": pattern("^((a{0,2000}){0,2000}){0,2000}$"),
    "quantifiers": pattern("^(((a{1,100}){1,100}){1,100})$"),
    "alternatives": pattern("^(a|a|a|a|aa|aaa)*(a|a)*(b|b)*$"),
    "stars": pattern("^(((a*)*)*)*$"),
    "question marks": pattern("^" + "a?" * 2000 + "$"),
    "dots": pattern("^.{0,2000}.{0,2000}$"),
    "brackets": pattern("^" + "(" * 2000 + "a" + ")" * 2000 + "$"),
    "open brackets": pattern("^((((((("),
    "look ahead": pattern("^(?=a)a$"),
    "look back": pattern("^(a)\\1$"),
    "elsewhere": {"$ref": "https://127.0.0.1:1/x.json"},
}
GRAMMAR_BOMBS: dict[str, str] = {
    "brackets": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000,
    "chain": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"',
    "doubling": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"',
    "doubling later": 'root ::= "a" root "a" | "a" root "b" | "b" root "a" | [a-z ] root | ""',
    "two ends": 'root ::= [a-zA-Z ,.] root "x" | [a-zA-Z ,.] root "y" | ""',
    "three ends": 'root ::= c root "x" | c root "y" | c root "z" | ""\nc ::= [^"]',
    "maybe": "root ::= " + "[a-z]? " * 900,
    "maybe nested": 'root ::= ("a"? "b"? "c"? "d"?){500}',
    "stars": 'root ::= ((("a"*)*)*)* "b"',
    "everything twice": "root ::= (.* .*)* (.* .*)* (.* .*)*",
    "repetition": 'root ::= "a"{1,100000}',
    "repetitions": 'root ::= (("a"{0,2000}){0,2000}){0,2000}',
    "rules": "".join(f'r{i} ::= "a"\n' for i in range(30_000)) + "root ::= r1",
    "words": "root ::= " + " | ".join(f'"{i}"' for i in range(50_000)),
    "class": "root ::= [" + "a" * 500_000 + "]*",
    "literal": 'root ::= "' + "a" * 900_000 + '"',
    "token": "root ::= <[999999999]>",
    "huge token": "root ::= !<[999999999999999999999]>",
    "left recursion": "root ::= root",
}
TRIGGER_BOMBS = [
    "(a+)+$",
    "((a*)*)*b$",
    "(a|a|aa)*b",
    "([a-z ]+)*[0-9]$",
    "(" * 30_000 + ")" * 30_000,
    "a{1,100000}",
]
TEXT_BOMBS: dict[str, str] = {
    "spaces": " " * MIB,
    "emoji": "\U0001f600" * (MIB // 4),
    "accents": "e" + "\u0301" * (MIB // 2),
    "joiners": "\u200d" * (MIB // 3),
    "NULs": "\0" * MIB,
    "special": "<|im_start|>" * (MIB // 12),
}


class Beside:
    """A stream that runs while something else is tried: all its tokens have to come, and /health has to answer."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._events: list[Any] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        body = {"prompt": "Once", "n_predict": 200, "ignore_eos": True, "stream": True, "temperature": 0}
        with self._server.stream("/completion", body, timeout=4 * LONG) as stream:
            self._events = list(stream)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        assert self._server.get("/health", timeout=LONG).status == 200
        self._thread.join(4 * LONG)
        assert not self._thread.is_alive()
        assert self._events[-1]["tokens_predicted"] == 200


def try_bombs(server: ServerProcess, bombs: Iterator[tuple[str, str, dict[str, Any]]]) -> None:
    before = server.memory_kb()
    with Beside(server):
        for name, path, body in bombs:
            response = server.post(path, body, timeout=LONG)
            assert response.status in (200, 400), (name, response.text)
            if response.status == 400:
                error_of(response)
            assert server.get("/health", timeout=LONG).status == 200, name
    wait_for(lambda: all_idle(server))
    assert server.memory_kb() - before < GROWTH_KB


def test_schemas_that_explode(server: ServerProcess) -> None:
    def bombs() -> Iterator[tuple[str, str, dict[str, Any]]]:
        for name, schema in SCHEMA_BOMBS.items():
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            yield name, "/completion", {"prompt": "a", "n_predict": 8, "json_schema": schema}
            yield name, "/v1/chat/completions", {"messages": USER, "max_tokens": 4, "response_format": form}
            yield name, "/apply-template", {"messages": USER, "tools": [tool], "tool_choice": "required"}

    try_bombs(server, bombs())


def test_grammars_that_explode(server: ServerProcess) -> None:
    def bombs() -> Iterator[tuple[str, str, dict[str, Any]]]:
        for name, grammar in GRAMMAR_BOMBS.items():
            yield name, "/completion", {"prompt": "a", "n_predict": 24, "grammar": grammar, "ignore_eos": True}

    try_bombs(server, bombs())


@pytest.mark.parametrize("kind", [2, 3])
def test_triggers_that_explode(server: ServerProcess, kind: int) -> None:
    def bombs() -> Iterator[tuple[str, str, dict[str, Any]]]:
        for text in TRIGGER_BOMBS:
            triggers = [{"type": kind, "value": text}]
            body = {"prompt": "a", "n_predict": 64, "grammar": "root ::= [^x]*", "grammar_triggers": triggers}
            # the text is of one letter, which is the worst that can come
            yield text[:20], "/completion", {**body, "grammar_lazy": True, "logit_bias": [["a", 50]]}
        many = [{"type": 1, "value": "hello world"}] * 100_000
        yield "many", "/completion", {"prompt": "a", "grammar": 'root ::= "x"', "grammar_triggers": many}

    try_bombs(server, bombs())


def test_texts_that_explode(server: ServerProcess) -> None:
    def bombs() -> Iterator[tuple[str, str, dict[str, Any]]]:
        for name, text in TEXT_BOMBS.items():
            yield name, "/tokenize", {"content": text, "with_pieces": name == "emoji"}
            shorter = text[: len(text) // 8]
            yield name, "/v1/chat/completions", {"messages": [{"role": "user", "content": shorter}], "max_tokens": 1}
            yield name, "/v1/embeddings", {"input": shorter}
            yield name, "/completion", {"prompt": "a", "n_predict": 1, "logit_bias": [[shorter, 1]]}
            yield name, "/completion", {"prompt": "a", "n_predict": 1, "dry_sequence_breakers": [text]}
            yield name, "/completion", {"prompt": "a", "n_predict": 1, "reasoning_budget_start_tag": text}

    try_bombs(server, bombs())


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_lists_without_end(server: ServerProcess) -> None:
    call = {"type": "function", "id": "x", "function": {"name": "f", "arguments": "{}"}}
    once = {"prompt": "a", "n_predict": 1}
    lists: list[tuple[str, dict[str, Any]]] = [
        ("/completion", {**once, "prompt": ["a"] * 100_000}),
        ("/completion", {**once, "prompt": [[1]] * 100_000}),
        ("/completion", {**once, "prompt": [1] * 1_000_000}),
        ("/completion", {**once, "stop": ["x"] * 100_000}),
        ("/completion", {**once, "samplers": "k" * 1_000_000}),
        ("/completion", {**once, "samplers": ["dry"] * 100_000}),
        ("/completion", {**once, "dry_multiplier": 1.0, "dry_sequence_breakers": [f"b{i}" for i in range(100_000)]}),
        ("/completion", {**once, "preserved_tokens": [f"b{i}" for i in range(100_000)]}),
        ("/completion", {**once, "logit_bias": [[1, 1.0]] * 500_000}),
        ("/completion", {**once, "logit_bias": {f"word{i}": 1.0 for i in range(50_000)}}),
        ("/completion", {**once, "response_fields": ["a/" * 100_000]}),
        ("/completion", {**once, "response_fields": ["timings/prompt_n"] * 200_000}),
        ("/completion", {**once, "lora": [{"id": i, "scale": 1} for i in range(100_000)]}),
        ("/completion", {**once, "n_probs": 10**9, "n_predict": 16}),
        ("/v1/chat/completions", {"messages": USER * 100_000, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": USER, "tools": [tool(f"f{i}") for i in range(20_000)]}),
        ("/v1/chat/completions", {"messages": [*USER, {"role": "assistant", "tool_calls": [call] * 100_000}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]},
        ),
        ("/v1/chat/completions", {"messages": USER, "chat_template_kwargs": {f"k{i}": 1 for i in range(100_000)}}),
        ("/apply-template", {"messages": USER, "chat_template_kwargs": {"messages": 5, "range": "{{ 1 / 0 }}"}}),
        ("/apply-template", {"messages": [{"role": "{{ messages }}", "content": "{% raw %}{{ 1 / 0 }}"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]}),
        ("/v1/messages", {"messages": USER, "system": "x-anthropic-billing-header:" + "cch=" * 200_000}),
        ("/v1/responses", {"input": [{"role": "assistant", "content": "x"}] * 100_000}),
        ("/v1/responses", {"input": [{"type": "reasoning", "summary": [{"text": "x"}]}] * 100_000}),
        ("/v1/embeddings", {"input": ["a"] * 100_000}),
        ("/v1/embeddings", {"input": [[1]] * 100_000}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x"}] * 100_000}),
        ("/v1/streams/lookup", {"conversation_ids": ["x"] * 500_000}),
        ("/v1/chat/completions/control", {"id": "x" * MIB, "action": "reasoning_end"}),
        ("/detokenize", {"tokens": [1] * 1_000_000}),
        ("/detokenize", {"tokens": [10**9]}),
    ]
    try_bombs(server, (("list", path, body) for path, body in lists))


def test_documents_without_end(ranker: ServerProcess) -> None:
    for body in (
        {"query": "a", "documents": ["b"] * 100_000},
        {"query": "a", "texts": ["b"] * 100_000, "return_text": True},
        {"query": "a" * MIB, "documents": ["b"]},
        {"query": "a", "documents": ["b" * MIB]},
        {"query": "a", "documents": [{"text": "b"}]},
        {"query": "a", "documents": ["b"], "top_n": -1},
    ):
        assert error_of(ranker.post("/v1/rerank", body, timeout=LONG))["code"] == 400
    assert len(ranker.post("/v1/rerank", {"query": "a", "documents": ["b"]}).json()["results"]) == 1


@pytest.mark.parametrize("kind", ["openjev", "lev", "kev"])
def test_questions_without_end(tiny_models: dict[str, Path], kind: str) -> None:
    question = {"type": "choice", "instructions": "i", "criteria": {"a": "b", "c": "d"}}
    deep: Any = "x"
    for _ in range(150):
        deep = [deep]
    with ServerProcess("-m", tiny_models[f"tiny-{kind}"], "-c", 1024, "-np", 2, "-t", 1) as server:
        for body in (
            {"state": "s", "questions": {}},
            {"state": "s", "questions": {f"q{i}": question for i in range(20_000)}},
            {"state": "s" * MIB, "questions": {"q": question}},
            {"state": deep, "questions": {"q": {**question, "instructions": "x" * MIB}}},
            {"state": "s", "questions": {"q": {**question, "criteria": {f"k{i}": "v" for i in range(100_000)}}}},
            {"state": "s", "questions": {"q": question}, "images": ["data:image/png;base64,AAAA"] * 1000},
            {"state": "s", "questions": {"q": {"type": "score", "instructions": "i", "criteria": [{}] * 11}}},
        ):
            response = server.post("/v1/systemone", body, timeout=LONG)
            assert response.status in (400, 501), response.text
            error_of(response)
        assert server.get("/health").status == 200


# -- the size of a body


def test_a_body_over_the_limit_is_413(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, "-c", 256, "-t", 1, "--max-body-mib", 1) as server:
        assert server.post("/tokenize", {"content": "a" * (MIB - 100)}).status == 200
        for path in ("/tokenize", "/completion", "/v1/chat/completions", "/health"):
            response = server.post(path, b" " * (MIB + 1))
            assert response.status == 413
            assert error_of(response)["type"] == "invalid_request_error"
        assert server.get("/health", timeout=PATIENCE).status == 200
