"""The OpenAPI document: whole, valid, and true about what the parsers take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from api_fakes import FakeIds, FakeServer, FakeTools, FakeVocab, api_context, server_meta, server_params
from http_harness import Harness, ScriptedContext, serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from schema_values import values
from test_api_chat_params import SETTINGS
from test_api_hostile import context as decision_context

import api_coverage
from llamasrv.api import chat_control, chat_params, completion, embeddings, infill, rerank, slot_actions, tokenize
from llamasrv.api.anthropic import request as anthropic
from llamasrv.api.context import ApiContext
from llamasrv.api.decision import question
from llamasrv.api.decision.tasks import build_decision_tasks
from llamasrv.api.errors import ApiError
from llamasrv.api.grammar import GrammarUse
from llamasrv.api.lora import parse_lora
from llamasrv.api.openapi import document, operations_of
from llamasrv.api.openapi_page import page
from llamasrv.api.openapi_requests import Facts, request_schemas
from llamasrv.api.openapi_routes import OPERATIONS
from llamasrv.api.openapi_schema import CHECKED, Member
from llamasrv.api.responses import request as responses
from llamasrv.api.schema import FIELDS
from llamasrv.http.config import HttpConfig
from llamasrv.http.route import Route
from llamasrv.http.routes import api_routes
from llamasrv.http.state import ServerState
from llamasrv.http.vertex import Vertex

MANUAL = ("/openapi.json", "/docs")
VERTEX = Vertex("/predict", "/alive")
ALL_ON = HttpConfig(vertex=VERTEX, slot_save_path="/slots/", endpoint_metrics=True, endpoint_props=True)


def registered() -> list[Route]:
    """Every route of the API that there can be; the files of the page are public, the manual is too."""
    found = api_routes(ServerState(ScriptedContext(), ALL_ON))
    return [route for route in found if not route.is_public or route.path in MANUAL]


def made(prefix: str = "", has_keys: bool = False) -> dict[str, Any]:
    facts = Facts(4, FakeVocab.n_tokens, 8, api_context().schema.defaults)
    operations, _ = operations_of([(route.method, route.path) for route in registered()], ("/predict", "/alive"))
    return document(operations, facts, "1", prefix, has_keys)


def test_every_route_is_described() -> None:
    routes = [(route.method, route.path) for route in registered()]
    _, missing = operations_of(routes, ("/predict", "/alive"))
    assert missing == [], "declare them in llamasrv/api/openapi_routes.py"


def test_a_route_without_a_description_is_named() -> None:
    _, missing = operations_of([("GET", "/health"), ("PUT", "/new")])
    assert missing == [("PUT", "/new")]


def test_nothing_is_described_that_does_not_exist() -> None:
    everything = {(route.method, route.path) for route in registered()}
    found, _ = operations_of(everything, ("/predict", "/alive"))
    paths = made()["paths"]
    described = {(method.upper(), path) for path, item in paths.items() for method in item}
    assert described == {(method, re.sub(r"<(\w+)>", r"{\1}", path)) for method, path in everything}
    assert len(found) == len(described)
    assert [op for op in OPERATIONS if (op.method, op.path) not in everything] == []


@pytest.mark.parametrize("facts", [Facts(), Facts(4, 512, 64, api_context().schema.defaults)])
@pytest.mark.parametrize(("prefix", "has_keys"), [("", False), ("/ai", True)])
def test_the_document_is_valid(facts: Facts, prefix: str, has_keys: bool) -> None:
    operations, _ = operations_of([(route.method, route.path) for route in registered()], ("/predict", "/alive"))
    found = document(operations, facts, "1", prefix, has_keys)
    validate(found)
    assert found["info"]["title"] == "llamasrv"
    assert found["servers"] == [{"url": prefix or "/"}]


def test_keys_are_asked_for_everywhere_but_on_public_paths() -> None:
    found = made(has_keys=True)
    assert found["security"] == [{"bearer": []}, {"key": []}]
    public = {path for path, item in found["paths"].items() for op in item.values() if op.get("security") == []}
    assert public == {"/health", "/v1/health", "/models", "/v1/models", "/openapi.json", "/docs"}
    assert "401" in found["paths"]["/completion"]["post"]["responses"]
    assert "security" not in made()


def test_every_schema_and_reference_is_used_and_exists() -> None:
    found = made()
    referred = set(re.findall(r"#/components/(\w+/\w+)", json.dumps(found)))
    existing = {f"{kind}/{name}" for kind, items in found["components"].items() for name in items}
    assert referred == existing


# -- the document says what is so


def test_every_field_of_a_completion_is_a_member() -> None:
    schemas = request_schemas(Facts(n_slots=3))
    members = schemas["CompletionRequest"]["properties"]
    for field in FIELDS:
        for name in field.names:
            shown = members[field.group]["properties"][name] if field.group else members[name]
            assert shown["description"]
    assert members["n"]["maximum"] == 3
    assert "minimum" not in members["top_p"]
    assert "0 to 1 become the bound" in members["top_p"]["description"]
    assert (members["n_predict"]["minimum"], members["n_predict"]["type"]) == (-1, ["integer", "null"])


def test_what_a_dialect_passes_over_is_no_member_of_it() -> None:
    schemas = request_schemas(Facts())
    declared = {member.name for member in responses.MEMBERS}
    members = set(schemas["ResponsesRequest"]["properties"])
    assert {"n", "n_cmpl"} <= responses.CONSUMED - declared
    assert not members & (responses.CONSUMED - declared)
    assert declared <= members
    assert {"temperature", "n_predict"} <= members
    assert {"n", "n_cmpl"} <= set(schemas["ChatRequest"]["properties"])


def test_defaults_are_those_of_the_server() -> None:
    facts = Facts(defaults=api_context(n_predict=77).schema.defaults)
    members = request_schemas(facts)["CompletionRequest"]["properties"]
    assert members["n_predict"]["default"] == 77
    assert members["cache_prompt"]["default"] is True


#: Parser module -> the members that it declares, and names that it reads from objects within the request.
PARSERS: dict[str, tuple[tuple[Member, ...], str]] = {
    "completion.py": (completion.MEMBERS, ""),
    "infill.py": (infill.MEMBERS, "text filename"),
    "embeddings.py": (embeddings.MEMBERS, ""),
    "rerank.py": (rerank.MEMBERS, ""),
    "tokenize.py": ((*tokenize.TOKENIZE_MEMBERS, *tokenize.DETOKENIZE_MEMBERS), ""),
    "slot_actions.py": (slot_actions.MEMBERS, ""),
    "chat_control.py": (chat_control.MEMBERS, ""),
    "anthropic/request.py": (
        anthropic.MEMBERS,
        "role content text id name input thinking type source media_type data url tool_use_id description "
        "input_schema disable_parallel_tool_use format effort reasoning_content",
    ),
    "responses/request.py": (
        responses.MEMBERS,
        "role type text content name arguments call_id output summary refusal image_url n n_cmpl reasoning_content "
        "tool_calls",
    ),
    "chat_params.py": (chat_params.MEMBERS, "type schema role"),
    "decision/question.py": (question.MEMBERS, ""),
}


@pytest.mark.parametrize("module", PARSERS)
def test_what_a_parser_reads_is_declared(module: str) -> None:
    members, inner = PARSERS[module]
    known = (
        {member.name for member in members} | set(inner.split()) | {name for field in FIELDS for name in field.names}
    )
    path = Path(api_coverage.ROOT) / "llamasrv" / "api" / module
    assert set(api_coverage.names_read(path)) <= known


def is_checked(schema: Any, schemas: Mapping[str, Any]) -> bool:
    """Whether a value of this schema may be refused for its content."""
    if isinstance(schema, list):
        return any(is_checked(part, schemas) for part in schema)
    if not isinstance(schema, dict):
        return False
    if CHECKED in schema:
        return True
    target = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}
    return any(is_checked(part, schemas) for part in (*schema.values(), *target.values()))


def chat_of(data: Mapping[str, Any]) -> None:
    vocab = FakeVocab()
    context = api_context()
    plan = chat_params.parse_chat(data, SETTINGS, vocab, GrammarUse(FakeTools(), vocab))
    context.schema.parse(plan.data)


def embeddings_context() -> ApiContext:
    meta = server_meta(pooling_type=1, n_embd_out=8)
    return ApiContext(FakeServer(server_params(embedding=True, pooling_type="mean"), meta), FakeTools())


USER = {"role": "user", "content": "hi"}
#: Schema -> a body that is taken, and what takes it.
READERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]] = {
    "CompletionRequest": (
        {"prompt": "a"},
        lambda data: completion.build_completion_tasks(api_context(), data, FakeIds()),
    ),
    "InfillRequest": (
        {"input_prefix": "a", "input_suffix": "b"},
        lambda data: (infill.infill_prompt(api_context(), data), api_context().schema.parse(data)),
    ),
    "ChatRequest": ({"messages": [USER]}, chat_of),
    "ResponsesRequest": ({"input": "a"}, lambda data: chat_of(responses.read_responses_request(data).chat)),
    "MessagesRequest": ({"messages": [USER]}, lambda data: chat_of(anthropic.read_anthropic_request(data))),
    "EmbeddingsRequest": (
        {"input": "a"},
        lambda data: embeddings.build_embedding_tasks(embeddings_context(), data, FakeIds(), True),
    ),
    "RerankRequest": (
        {"query": "a", "documents": ["b"]},
        lambda data: rerank.build_rerank_tasks(embeddings_context(), data, FakeIds()),
    ),
    "DecisionRequest": (
        {"state": "a", "questions": {"q": {"type": "noul", "instructions": "i"}}},
        lambda data: build_decision_tasks(decision_context("lev"), data, FakeIds()),
    ),
    "TokenizeRequest": ({"content": "a"}, lambda data: tokenize.tokenize_json(FakeVocab(), data)),
    "DetokenizeRequest": ({"tokens": [1]}, lambda data: tokenize.detokenize_json(FakeVocab(), data)),
    "ControlRequest": ({"id": "a", "action": "reasoning_end"}, lambda data: chat_control.control_task(data, FakeIds())),
}
SCHEMAS = request_schemas(Facts(4, FakeVocab.n_tokens, 8))
#: The fields of a completion are the same everywhere, but a chat looks at some of them itself.
MEMBERS = [
    (name, member)
    for name in READERS
    for member in SCHEMAS[name]["properties"]
    if name not in ("InfillRequest", "ResponsesRequest") or member not in SCHEMAS["CompletionRequest"]["properties"]
]
#: Refusals that are no matter of form: the request as a whole asks for what cannot be.
_TOGETHER = ("no triggers set", "top_logprobs requires", "Cannot set both", "cannot be empty")


@pytest.mark.parametrize(("schema", "member"), MEMBERS)
@settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_the_document_allows_is_taken(schema: str, member: str, data: st.DataObject) -> None:
    base, read = READERS[schema]
    of = SCHEMAS[schema]["properties"][member]
    value = data.draw(values(of, SCHEMAS))
    refusal = ""
    try:
        read({**base, member: value})
    except ApiError as error:
        refusal = error.message
    assert not refusal or is_checked(of, SCHEMAS) or any(text in refusal for text in _TOGETHER)


def test_adapters_that_the_document_allows_are_taken() -> None:
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(values(SCHEMAS["LoraAdaptersRequest"], SCHEMAS))
    def run(value: Any) -> None:
        parse_lora(value)

    run()


def test_members_that_must_be_there_are_missed() -> None:
    for name, (base, read) in READERS.items():
        for member in SCHEMAS[name].get("required", ()):
            with pytest.raises(ApiError):
                read({key: value for key, value in base.items() if key != member})


# -- over HTTP


@pytest.fixture
def served() -> Iterator[Harness]:
    config = HttpConfig(port=0, api_prefix="/ai", api_keys=("k",), vertex=VERTEX, n_parallel=4)
    with serve(config, api_routes) as harness:
        harness.context.params = server_params()
        yield harness


def test_the_manual_needs_no_key_and_lies_under_the_prefix(served: Harness) -> None:
    response, body = served.request("GET", "/ai/openapi.json")
    assert (response.status, response.headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    found = json.loads(body)
    validate(found)
    assert found["servers"] == [{"url": "/ai"}]
    assert "/predict" in found["paths"]
    assert "/slots/{id_slot}" in found["paths"]
    response, body = served.request("GET", "/ai/docs")
    assert (response.status, response.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert served.request("GET", "/openapi.json", headers={"X-Api-Key": "k"})[0].status == 404
    assert served.request("GET", "/docs", headers={"X-Api-Key": "k"})[0].status == 404


def test_the_manual_is_there_while_the_model_loads_and_learns_from_it() -> None:
    with serve(HttpConfig(port=0, n_parallel=2), api_routes, is_ready=False) as harness:
        assert harness.request("GET", "/health")[0].status == 503

        def n_predict() -> dict[str, Any]:
            found = json.loads(harness.request("GET", "/openapi.json")[1])
            member: dict[str, Any] = found["components"]["schemas"]["CompletionRequest"]["properties"]["n_predict"]
            return member

        assert "default" not in n_predict()
        assert harness.request("GET", "/docs")[0].status == 200
        harness.context.params = server_params(n_predict=5)
        harness.state.is_ready = True
        assert n_predict()["default"] == 5


def test_the_page_shows_every_route_and_asks_no_other_machine(served: Harness) -> None:
    text = served.request("GET", "/ai/docs")[1].decode()
    for path in made()["paths"]:
        assert f"<code>{path}</code>" in text
    assert "prefers-color-scheme" in text or "color-scheme: light dark" in text
    assert "<script" not in text
    assert not re.findall(r"""(?:src|href)\s*=\s*['"]?(?:https?:)?//(?!127\.0\.0\.1)""", text)
    assert f"http://127.0.0.1:{served.port}/ai/v1/chat/completions" in text
    assert "Authorization: Bearer $KEY" in text


def test_what_a_caller_says_of_itself_is_escaped_in_the_page(served: Harness) -> None:
    sock = served.raw(b'GET /ai/docs HTTP/1.1\r\nHost: x"><script>alert(1)</script>\r\nConnection: close\r\n\r\n')
    data = b""
    while part := sock.recv(65536):
        data += part
    assert b"<script" not in data


def test_the_page_is_well_formed() -> None:
    from html.parser import HTMLParser

    class Balance(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag in ("details", "summary", "table", "pre", "h1", "h2"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag in ("details", "summary", "table", "pre", "h1", "h2"):
                assert self.open.pop() == tag

    balance = Balance()
    balance.feed(page(made("/ai", True), "http://localhost:8080"))
    assert balance.open == []
