"""The same requests of the Responses and Messages APIs to the genuine llama-server and to ours.

What the genuine one answers is all there in ours, with the same values; ours has more where clients demand it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from test_api_chat_params import SOURCE
from test_differential import VOLATILE, Pair, assert_same, start_pair

pytestmark = pytest.mark.reference

#: Ids and times are drawn anew.
DRAWN = VOLATILE | {"id", "item_id", "call_id", "created_at", "completed_at"}
YES = 'root ::= "yes"'
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
FUNCTION = {"type": "function", "name": "clock", "description": "tells the time", "parameters": ZONE}
TOOL = {"name": "clock", "description": "tells the time", "input_schema": ZONE}


@pytest.fixture(scope="module")
def pair(
    reference_server: tuple[str, ...], tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(SOURCE)
    with ExitStack() as stack:
        flags = ("-m", tiny_model_path, "-c", 2048, "-np", 1, "--alias", "tiny", "--chat-template-file", template)
        yield start_pair(reference_server, stack, *flags, "--jinja", "--temp", 0)


def missing(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """What of a value is not the same in another, which may have more members."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        out = [f"{where}.{key} is missing" for key in theirs.keys() - ours.keys()]
        for key in theirs.keys() & ours.keys() - DRAWN:
            out += missing(theirs[key], ours[key], f"{where}.{key}")
        return out
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return [
            text for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) for text in missing(a, b, f"{where}[{i}]")
        ]
    return [] if theirs == ours else [f"{where}: {theirs!r} theirs, {ours!r} ours"]


def events(server: ServerProcess, path: str, body: Any) -> list[Any]:
    with server.stream(path, {**body, "stream": True}) as stream:
        assert stream.status == 200
        return list(stream)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CALL = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": '{"zone": "here"}'}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}

RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "What time is it?"},
    "instructions": {"input": "What time is it?", "instructions": "Be brief."},
    "plain messages": {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    "parts": {"input": [message("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])]},
    "answer": {"input": [message("user", "a"), message("assistant", "b"), message("user", "c")]},
    "answer in parts": {
        "input": [
            message("user", "a"),
            message("assistant", [{"type": "output_text", "text": "b"}]),
            message("user", "c"),
        ]
    },
    "call and its output": {
        "input": [
            message("user", "a"),
            CALL,
            {**CALL, "call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
        ]
    },
    "output in parts": {
        "input": [
            message("user", "a"),
            CALL,
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "noon"}]},
        ]
    },
    "reasoning before a call": {
        "input": [
            message("user", "a"),
            REASONING,
            CALL,
            {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
        ]
    },
    "tools": {"input": "a", "tools": [FUNCTION, {"type": "web_search"}], "tool_choice": "none"},
    "effort": {"input": "a", "reasoning": {"effort": "low"}},
    "no thoughts": {"input": "a", "reasoning": {"effort": "none"}},
}


def blocks(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return list(content)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


USE = {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "here"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "noon"}
ASK = {"role": "user", "content": "What time is it?"}

MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"messages": [ASK]},
    "system": {"messages": [ASK], "system": "Be brief."},
    "system in blocks": {"messages": [ASK], "system": [text("Be "), text("brief.")]},
    "stamped system": {"messages": [ASK], "system": "x-anthropic-billing-header: a=1; cch=a5145;You are"},
    "blocks": {"messages": [{"role": "user", "content": blocks(text("a"), text("b"))}]},
    "turns": {"messages": [ASK, {"role": "assistant", "content": "Noon."}, ASK]},
    "tool and its result": {
        "messages": [ASK, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    },
    "text before a result": {
        "messages": [
            ASK,
            {"role": "assistant", "content": [text("I look."), USE]},
            {"role": "user", "content": [text("See:"), {**RESULT, "content": [text("no"), text("on")]}]},
        ]
    },
    "thoughts": {
        "messages": [
            ASK,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, USE]},
            {"role": "user", "content": [RESULT]},
        ]
    },
    "tools": {"messages": [ASK], "tools": [TOOL], "tool_choice": {"type": "auto"}},
    "no messages": {"messages": []},
}


def without_tools(bodies: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that go together with a grammar, with one under which an answer ends by itself."""
    return {name: {**body, "grammar": YES} for name, body in bodies.items() if "tools" not in body}


@pytest.mark.parametrize("body", RESPONSES.values(), ids=RESPONSES)
def test_requests_for_responses_become_the_same_prompt(pair: Pair, body: dict[str, Any]) -> None:
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        assert pair.same("POST", path, body)["input_tokens"] > 0


@pytest.mark.parametrize("body", MESSAGES.values(), ids=MESSAGES)
def test_requests_for_messages_become_the_same_prompt(pair: Pair, body: dict[str, Any]) -> None:
    assert pair.same("POST", "/v1/messages/count_tokens", body)["input_tokens"] > 0


@pytest.mark.parametrize("body", without_tools(RESPONSES).values(), ids=without_tools(RESPONSES))
def test_responses(pair: Pair, body: dict[str, Any]) -> None:
    for path in ("/v1/responses", "/responses"):
        theirs, ours = pair.request("POST", path, body)
        assert (theirs.status, ours.status) == (200, 200), ours.text
        assert missing(theirs.json(), ours.json()) == []


@pytest.mark.parametrize("body", without_tools(RESPONSES).values(), ids=without_tools(RESPONSES))
def test_streams_of_responses(pair: Pair, body: dict[str, Any]) -> None:
    theirs, ours = (events(server, "/v1/responses", body) for server in (pair.reference, pair.ours))
    assert [event["type"] for event in ours] == [event["type"] for event in theirs]
    assert missing(theirs, ours) == []


@pytest.mark.parametrize("body", MESSAGES.values(), ids=MESSAGES)
def test_messages(pair: Pair, body: dict[str, Any]) -> None:
    theirs, ours = pair.request("POST", "/v1/messages", {**body, "max_tokens": 12})
    assert (theirs.status, ours.status) == (200, 200), ours.text
    for answer in (theirs, ours):
        assert answer.headers["content-type"] == "application/json; charset=utf-8"
    a, b = theirs.json(), ours.json()
    del a["id"], b["id"]
    assert_same(a, b)


@pytest.mark.parametrize("body", MESSAGES.values(), ids=MESSAGES)
def test_streams_of_messages(pair: Pair, body: dict[str, Any]) -> None:
    body = {**body, "max_tokens": 12}
    theirs, ours = (events(server, "/v1/messages", body) for server in (pair.reference, pair.ours))
    assert [event["type"] for event in ours] == [event["type"] for event in theirs]
    assert missing(theirs, ours) == []


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no input": ("/v1/responses", {}),
    "stored response": ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    "wrong input": ("/v1/responses", {"input": 5}),
    "unknown item": ("/v1/responses", {"input": [{"type": "x"}]}),
    "file": ("/v1/responses", {"input": [message("user", [{"type": "input_file"}])]}),
    "unknown tool": ("/v1/responses", {"input": "a", "tools": {}}),
    "temperature": ("/v1/messages", {"messages": [ASK], "temperature": "hot"}),
}


@pytest.mark.parametrize(("path", "body"), WRONG.values(), ids=WRONG)
def test_both_refuse(pair: Pair, path: str, body: dict[str, Any]) -> None:
    theirs, ours = pair.request("POST", path, body)
    assert (theirs.status, ours.status) == (400, 400)
    assert ours.json()["error"]["type"] == theirs.json()["error"]["type"]
