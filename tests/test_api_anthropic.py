"""The Messages API without a model: what a request becomes, which objects and events an answer becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from test_api_chat_params import SOURCE

from llamasrv.api.anthropic.format import message_json
from llamasrv.api.anthropic.request import read_anthropic_request
from llamasrv.api.anthropic.stream import AnthropicStream
from llamasrv.api.chat_state import ChatState
from llamasrv.api.errors import ApiError
from llamasrv.binding import ChatRequest, ChatTemplates
from llamasrv.engine.result import ErrorType, FinalResult, PartialResult, Result, StopType

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TEMPLATES = ChatTemplates(SOURCE)
SCHEMA = {"type": "object", "properties": {"zone": {}}}
CALL = '<calls>[{"name": "clock", "arguments": {"zone": 1}}]</calls>'
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def chat_of(**body: Any) -> dict[str, Any]:
    return read_anthropic_request({"messages": [{"role": "user", "content": "hi"}], **body})


def messages_of(*messages: Any, **body: Any) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = chat_of(messages=list(messages), **body)["messages"]
    return out


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


# -- requests


def test_fields_that_have_other_names() -> None:
    chat = chat_of(max_tokens=7, stop_sequences=["END"], temperature=0.5, top_p=0.9, top_k=3, stream=True, service="x")
    assert chat == {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
    }
    assert chat_of()["max_tokens"] == 4096


@pytest.mark.parametrize("system", ["be brief", [text("be "), {**text("brief"), "cache_control": {"type": "x"}}]])
def test_the_system_prompt_is_a_message(system: Any) -> None:
    assert messages_of({"role": "user", "content": "hi"}, system=system) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_a_stamp_that_differs_in_every_request_does_not_break_prefixes() -> None:
    head = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch="
    [first, second] = (messages_of(system=f"{head}{stamp};You are")[0]["content"] for stamp in ("a5145", "00c0d"))
    assert first == second == f"{head}fffff;You are"
    for other in (f"{head}a5145", "Say cch=a5145;", f" {head}a5145;"):
        assert messages_of(system=other)[0]["content"] == other


def test_blocks_of_an_answer_are_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        text("I look"),
        {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": 1}},
        {"type": "tool_use", "id": "t2", "name": "clock", "input": {}},
    ]
    assert messages_of({"role": "assistant", "content": blocks}) == [
        {
            "role": "assistant",
            "content": [text("I look")],
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "clock", "arguments": '{"zone":1}'}},
                {"id": "t2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
            ],
        }
    ]
    [called] = messages_of({"role": "assistant", "content": blocks[3:]})
    assert called["content"] == ""
    assert messages_of({"role": "assistant", "content": []}, {"role": "assistant"}) == []


def test_results_of_tools_keep_their_place_among_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("no"), text("on")], "is_error": False}
    bare = {"type": "tool_result", "tool_use_id": "t2"}
    assert messages_of({"role": "user", "content": [text("before"), result, bare, text("after")]}) == [
        {"role": "user", "content": [text("before")]},
        {"role": "tool", "tool_call_id": "t1", "content": "noon"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": [text("after")]},
    ]


def test_images_and_documents() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a page"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("see"), PIXEL]}
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert messages_of({"role": "user", "content": [PIXEL, url, document, result]}) == [
        {
            "role": "user",
            "content": [pixel, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}, text("a page")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [text("see"), pixel]},
    ]


def test_tools() -> None:
    tools = [{"name": "clock", "description": "tells", "input_schema": SCHEMA}, {"name": "dice"}]
    assert chat_of(tools=tools)["tools"] == [
        {"type": "function", "function": {"name": "clock", "description": "tells", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "dice", "description": "", "parameters": {}}},
    ]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "clock"}, {"type": "function", "function": {"name": "clock"}}),
    ],
)
def test_tool_choice(choice: dict[str, Any], wanted: Any) -> None:
    chat = chat_of(tool_choice=choice)
    assert chat["tool_choice"] == wanted
    assert "parallel_tool_calls" not in chat
    assert chat_of(tool_choice={**choice, "disable_parallel_tool_use": True})["parallel_tool_calls"] is False


def test_thinking() -> None:
    assert chat_of(thinking={"type": "enabled", "budget_tokens": 50})["thinking_budget_tokens"] == 50
    assert chat_of(thinking={"type": "enabled"})["thinking_budget_tokens"] == 10_000
    off = chat_of(thinking={"type": "disabled"}, chat_template_kwargs={"a": 1})
    assert off["chat_template_kwargs"] == {"enable_thinking": False, "a": 1}
    assert "thinking_budget_tokens" not in off


def test_output_format_and_effort() -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for body in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert chat_of(**body)["response_format"]["json_schema"]["schema"] == SCHEMA
    assert chat_of(output_config={"effort": "low"})["reasoning_effort"] == "low"


def block(**members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [members]}]}


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "'messages' is required"),
        ({"messages": "hi"}, "'messages' must be an array"),
        ({"messages": [1]}, "messages[0] must be an object"),
        ({"messages": [{"content": "x"}]}, "messages[0]: 'role'"),
        ({"messages": [{"role": "user"}]}, "messages[0]: 'content'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]: 'content'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] must be an object"),
        (block(), "messages[0].content[0]: 'type'"),
        (block(type="text"), "messages[0].content[0]: 'text' must be a string"),
        (block(type="thinking"), "'thinking' must be a string"),
        (block(type="image"), 'blocks of type "image"'),
        (block(type="image", source={"type": "file"}), 'with source "file"'),
        (block(type="image", source={"type": "base64"}), "'data' must be a string"),
        (block(type="document", source={"type": "base64"}), 'blocks of type "document"'),
        (block(type="server_tool_use"), 'blocks of type "server_tool_use"'),
        (block(type="tool_use", id="a", input={}), "'name' must be a string"),
        (block(type="tool_use", name="a", input={}), "'id' must be a string"),
        (block(type="tool_result", content="x"), "'tool_use_id' must be a string"),
        (block(type="tool_result", tool_use_id="x", content=5), "'content' must be a string"),
        (block(type="tool_result", tool_use_id="x", content=[5]), "content[0].content[0] must be an object"),
        ({"messages": [], "system": 5}, "'system' must be a string"),
        ({"messages": [], "system": [PIXEL]}, "system[0]: blocks of type"),
        ({"messages": [], "tools": {}}, "'tools' must be an array"),
        ({"messages": [], "tools": [5]}, "'tools' must be an array"),
        ({"messages": [], "tool_choice": "auto"}, "'tool_choice' must be an object"),
        ({"messages": [], "tool_choice": {"type": "x"}}, "Invalid tool_choice"),
        ({"messages": [], "thinking": True}, "'thinking' must be an object"),
        ({"messages": [], "output_config": {"format": {"type": "yaml"}}}, "unsupported output format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], part: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_anthropic_request(body)
    assert caught.value.status == 400
    assert part in caught.value.message


# -- answers


def state_of() -> ChatState:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}]
    request = ChatRequest([{"role": "user", "content": "hi"}], tools=tools, reasoning_format="auto")
    return ChatState(TEMPLATES.apply(request))


def final(content: str = "", stop: StopType = StopType.EOS, word: str = "") -> FinalResult:
    return FinalResult(
        id=1,
        content=content.encode(),
        stop=stop,
        stopping_word=word,
        n_decoded=9,
        n_prompt_tokens=5,
        n_prompt_tokens_cache=2,
    )


def plain(result: FinalResult) -> dict[str, Any]:
    value = message_json(state_of(), result, "chatcmpl-1", "tiny", ["END"])
    Message.model_validate(value, strict=True)
    return value


def parts(*texts: str) -> list[Result]:
    begin = PartialResult(id=1, is_begin=True)
    pieces = [
        PartialResult(id=1, content=piece.encode(), n_prompt_tokens=5, n_prompt_tokens_cache=2) for piece in texts
    ]
    return [begin, *pieces]


def events_of(results: list[Result]) -> list[dict[str, Any]]:
    """The events on the wire, each checked by the client's strict model."""
    stream = AnthropicStream(state_of(), "chatcmpl-1", "tiny", ["END"])
    data = b"".join(stream.frame(result) for result in results) + stream.end()
    events = []
    for frame in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, line = frame.partition("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def test_a_plain_answer() -> None:
    value = plain(final(f"<think>hm</think>So: {CALL}"))
    thinking, said, call = value["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert said["text"].strip() == "So:"
    assert call["name"] == "clock" and call["input"] == {"zone": 1} and call["id"]
    assert value["stop_reason"] == "tool_use"
    assert value["usage"] == {"cache_read_input_tokens": 2, "input_tokens": 3, "output_tokens": 9}


@pytest.mark.parametrize(
    ("stop", "word", "reason", "sequence"),
    [
        (StopType.EOS, "", "end_turn", None),
        (StopType.WORD, "END", "stop_sequence", "END"),
        (StopType.WORD, "<|end|>", "end_turn", None),
        (StopType.LIMIT, "", "max_tokens", None),
    ],
)
def test_reasons_to_stop(stop: StopType, word: str, reason: str, sequence: str | None) -> None:
    value = plain(final("<think></think>No", stop, word))
    assert (value["stop_reason"], value["stop_sequence"]) == (reason, sequence)
    last = events_of([*parts("<think></think>No"), final("", stop, word)])[-2]
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_call_that_is_cut_off_has_no_arguments() -> None:
    value = plain(final(f"<think></think>{CALL[:-15]}", StopType.LIMIT))
    assert value["stop_reason"] == "max_tokens"
    assert [block["input"] for block in value["content"] if block["type"] == "tool_use"] == [{}]


def test_events_of_every_kind_of_block_in_their_order() -> None:
    events = events_of([*parts("<think>h", "m</think>", "So: ", *CALL), final()])
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["usage"] == {"cache_read_input_tokens": 2, "input_tokens": 3, "output_tokens": 0}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == 9
    assert [event["type"] for event in events].count("message_start") == 1

    blocks = events[1:-2]
    for index, kind in enumerate(["thinking", "text", "tool_use"]):
        own = [event for event in blocks if event["index"] == index]
        assert own[0]["type"] == "content_block_start" and own[0]["content_block"]["type"] == kind
        assert own[-1]["type"] == "content_block_stop"
        assert {event["type"] for event in own[1:-1]} == {"content_block_delta"}
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks)
    deltas = [event["delta"] for event in blocks if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert deltas[2] == {"type": "signature_delta", "signature": ""}
    assert "".join(delta.get("text", "") for delta in deltas).strip() == "So:"
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"zone": 1}


def test_an_empty_answer_has_its_frame() -> None:
    assert [event["type"] for event in events_of([final()])] == ["message_start", "message_delta", "message_stop"]


def test_an_error_within_a_stream() -> None:
    stream = AnthropicStream(state_of(), "chatcmpl-1", "tiny", [])
    name, _, line = stream.error(ApiError(ErrorType.SERVER, "it broke")).decode().partition("\n")
    assert name == "event: error"
    body = json.loads(line.removeprefix("data: "))
    assert body["type"] == "error"
    assert body["error"]["message"] == "it broke"
