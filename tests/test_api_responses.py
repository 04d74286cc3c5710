"""The Responses API without a model: what a request becomes, which objects and events an answer becomes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from api_fakes import api_context
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from test_api_chat_params import SOURCE

from llamasrv.api.chat_state import ChatState
from llamasrv.api.errors import ApiError
from llamasrv.api.responses.format import Reply, response_json
from llamasrv.api.responses.logprobs import TokenTrail
from llamasrv.api.responses.request import ResponsesRequest, read_responses_request
from llamasrv.api.responses.stream import ResponsesStream
from llamasrv.binding import ChatRequest, ChatTemplates
from llamasrv.engine.result import ErrorType, FinalResult, PartialResult, PromptProgress, Result, StopType, TokenProb
from llamasrv.engine.stats import SlotStats
from llamasrv.engine.task import TaskParams

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEMPLATES = ChatTemplates(SOURCE)
TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {"zone": {}}}}
CALL = '<calls>[{"name": "clock", "arguments": {"zone": 1}}]</calls>'


def messages_of(*items: Any, **body: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = chat_of(input=list(items), **body)["messages"]
    return messages


def chat_of(**body: Any) -> dict[str, Any]:
    return read_responses_request({"input": "hi", **body}).chat


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def refused(**body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        read_responses_request(body)
    assert caught.value.status == 400
    return caught.value.message


# -- requests


def test_a_text_is_the_users_and_instructions_are_the_systems() -> None:
    chat = chat_of(instructions="be brief", max_output_tokens=7, temperature=0.5)
    assert chat["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert chat["max_tokens"] == 7
    assert chat["temperature"] == 0.5
    assert not chat.keys() & {"input", "instructions", "max_output_tokens"}


def test_null_is_the_same_as_absent() -> None:
    names = ("instructions", "max_output_tokens", "tools", "reasoning", "text", "previous_response_id", "conversation")
    assert chat_of(**dict.fromkeys(names)) == {**chat_of(), "previous_response_id": None, "conversation": None}


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_messages_with_parts_and_with_plain_text(role: str) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of({"role": role, "content": "x"}, {"type": "message", "role": role, "content": parts}) == [
        {"role": role, "content": [text("x")]},
        {"role": role, "content": [text("a"), text("b")]},
    ]


def test_an_image_is_left_to_the_chat_request() -> None:
    [message] = messages_of({"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]})
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "data:x"}}]


@pytest.mark.parametrize("kind", [{}, {"type": "message"}])
def test_an_answer_may_be_given_with_and_without_its_type(kind: dict[str, str]) -> None:
    assert messages_of({"role": "assistant", "content": "done", **kind}) == [
        {"role": "assistant", "content": [text("done")]}
    ]


def test_items_of_one_answer_are_one_message() -> None:
    messages = messages_of(
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "I look", "annotations": []},
                {"type": "refusal", "refusal": "not there"},
            ],
        },
        {"type": "message", "role": "assistant", "content": "once more"},
        {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"},
        {"type": "function_call", "call_id": "call_2", "name": "clock", "arguments": '{"zone":1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "one"}]},
    )
    assert messages == [
        {"role": "user", "content": [text("q")]},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": [text("I look"), text("not there"), text("once more")],
            "tool_calls": [
                {"type": "function", "id": "call_1", "function": {"name": "clock", "arguments": "{}"}},
                {"type": "function", "id": "call_2", "function": {"name": "clock", "arguments": '{"zone":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_2", "content": [text("one")]},
    ]


def test_reasoning_without_its_text_gives_the_summary_or_nothing() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    assert messages_of(summary)[0]["reasoning_content"] == "short"
    assert messages_of({"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None}) == []


def test_functions_are_wrapped_and_other_tools_skipped() -> None:
    chat = chat_of(tools=[{"type": "web_search"}, TOOL])
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "clock", "parameters": TOOL["parameters"], "strict": True}}
    ]
    assert "tools" not in chat_of(tools=[{"type": "web_search"}])


def test_formats_and_effort() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "name": "pet", "schema": schema, "strict": True}
    chat = chat_of(text={"format": wanted, "verbosity": "low"}, reasoning={"effort": "low"})
    assert chat["response_format"]["type"] == "json_schema"
    assert chat["response_format"]["json_schema"]["schema"] == schema
    assert chat["reasoning_effort"] == "low"
    assert chat_of(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in chat_of(text={"verbosity": "low"})


def test_there_is_one_answer() -> None:
    assert not chat_of(n=3, n_cmpl=3).keys() & {"n", "n_cmpl"}


def test_probabilities_are_asked_for_by_include() -> None:
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    chat = chat_of(include=include, top_logprobs=3)
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 3)
    asked = read_responses_request({"input": "hi", "include": include})
    assert asked.n_top == 0
    assert asked.chat["top_logprobs"] == 1
    assert not chat_of(top_logprobs=3, include=[]).keys() & {"logprobs", "top_logprobs"}


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({}, "'input' is required"),
        ({"input": "a", "include": "all"}, "'include' must be an array"),
        ({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": "x"}, "'top_logprobs'"),
        ({"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": -1}, "'top_logprobs'"),
        ({"input": None}, "'input' is required"),
        ({"input": 5}, "must be a string or array"),
        ({"input": [5]}, "input[0] must be an object"),
        ({"input": [{}]}, "Cannot determine type of 'item': input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "Cannot determine type of 'item'"),
        ({"input": "a", "previous_response_id": "resp_1"}, "'previous_response_id' is not supported"),
        ({"input": "a", "conversation": "conv_1"}, "'conversation' is not supported"),
        ({"input": "a", "background": True}, "'background' is not supported"),
        ({"input": "a", "instructions": 5}, "instructions must be a string"),
        ({"input": "a", "tools": {}}, "'tools' must be an array"),
        ({"input": "a", "tools": [1]}, "'tools' must be an array"),
        ({"input": "a", "reasoning": "high"}, "'reasoning' must be an object"),
        ({"input": "a", "text": []}, "'text' must be an object"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content must be"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content must be"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "'text' of 'Input text' must be a string"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'image_url' is required"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "'type' must be one of 'input_text'"),
        ({"input": [{"role": "assistant", "content": [{"type": "output_text"}]}]}, "'text' of 'Output text'"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "'refusal' of 'Refusal'"),
        ({"input": [{"role": "assistant", "content": [{"type": "x"}]}]}, "'output_text' or 'refusal'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output must be"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content[].text"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], part: str) -> None:
    assert part in refused(**body)


# -- answers


def state_of(**request: Any) -> ChatState:
    request = {"reasoning_format": "auto", **request}
    tools = [{"type": "function", "function": {"name": "clock", "parameters": TOOL["parameters"]}}]
    messages = [{"role": "user", "content": "hi"}]
    return ChatState(TEMPLATES.apply(ChatRequest(messages, tools=tools, **request)))


def reply_of(**body: Any) -> Reply:
    asked: ResponsesRequest = read_responses_request({"input": "hi", "tools": [TOOL], **body})
    return Reply(api_context(), asked, TaskParams())


def final(content: str = "", stop: StopType = StopType.EOS) -> FinalResult:
    return FinalResult(
        id=1, content=content.encode(), stop=stop, n_decoded=9, n_prompt_tokens=5, n_prompt_tokens_cache=2
    )


def parts(*texts: str) -> list[Result]:
    begin = PartialResult(id=1, is_begin=True)
    return [begin, *(PartialResult(id=1, content=piece.encode()) for piece in texts)]


def events_of(results: list[Result], stream: ResponsesStream | None = None) -> list[dict[str, Any]]:
    """The events on the wire, each checked by the client's strict model."""
    stream = stream or ResponsesStream(reply_of(), state_of())
    data = b"".join(stream.frame(result) for result in results) + stream.end()
    return checked(data)


def checked(data: bytes) -> list[dict[str, Any]]:
    events = []
    for frame in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, line = frame.partition("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_plain_answer() -> None:
    value = response_json(reply_of(temperature=0.5, metadata={"a": "b"}), state_of(), final("<think>hm</think>Noon"))
    Response.model_validate(value, strict=True)
    assert value["status"] == "completed"
    assert value["incomplete_details"] is None
    assert value["metadata"] == {"a": "b"}
    assert value["tools"][0]["name"] == "clock"
    reasoning, message = value["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Noon"
    assert value["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 3},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }


def test_a_plain_call() -> None:
    value = response_json(reply_of(), state_of(), final(f"<think></think>{CALL}"))
    Response.model_validate(value, strict=True)
    [call] = value["output"]
    assert call["type"] == "function_call"
    assert call["status"] == "completed"
    assert json.loads(call["arguments"]) == {"zone": 1}
    assert call["id"].startswith("fc_")
    assert call["call_id"] == "call_" + call["id"].removeprefix("fc_")


def test_a_plain_answer_that_is_cut_off_is_incomplete() -> None:
    value = response_json(reply_of(), state_of(), final("<think></think>No", StopType.LIMIT))
    Response.model_validate(value, strict=True)
    assert value["status"] == "incomplete"
    assert value["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in value["output"]] == ["incomplete"]


def test_text_events_are_complete_and_agree() -> None:
    events = events_of([*parts("<think></think>", "No", "on"), final()])
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    whole = events[-1]["response"]
    for event in events[:2]:
        assert event["response"].keys() >= {"id", "object", "created_at", "model", "status", "output"}
        assert event["response"]["id"] == whole["id"]
        assert event["response"]["status"] == "in_progress"
    [item] = whole["output"]
    assert events[2]["item"]["id"] == item["id"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert events[-2]["item"] == item
    assert item["content"][0]["text"] == events[6]["text"] == "Noon"
    assert whole["usage"]["output_tokens"] == 9


def test_every_item_is_complete_before_the_next_begins() -> None:
    events = events_of([*parts("<think>h", "m</think>", "So: ", *CALL), final()])
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in added] == ["reasoning", "message", "function_call"]
    assert done == events[-1]["response"]["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    marks = [kind for kind in types(events) if kind.startswith("output_item")]
    assert marks == ["output_item.added", "output_item.done"] * 3
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done[2]["arguments"]
    assert json.loads(done[2]["arguments"]) == {"zone": 1}
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places) and set(places) == {0, 1, 2}


def test_a_stream_that_is_cut_off_ends_as_incomplete() -> None:
    events = events_of([*parts("<think>hm</think>", "No"), final(stop=StopType.LIMIT)])
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert events[-2]["item"] == response["output"][-1]


def test_an_empty_answer_has_no_items() -> None:
    events = events_of([final()])
    assert types(events) == ["created", "in_progress", "completed"]
    assert events[-1]["response"]["output"] == []


def test_progress_and_times_ride_on_events() -> None:
    stats = SlotStats(n_prompt_processed=4, t_start=1000, t_prompt_last=3000)
    progress = PromptProgress(total=8, cache=0, processed=4, time_ms=1)
    results: list[Result] = [
        PartialResult(id=1, is_begin=True),
        PartialResult(id=1, progress=progress),
        PartialResult(id=1, progress=progress),
        PartialResult(id=1, content=b"<think></think>No", stats=stats),
        final(),
    ]
    events = events_of(results)
    assert types(events)[:4] == ["created", "in_progress", "in_progress", "in_progress"]
    assert [event["prompt_progress"]["processed"] for event in events if "prompt_progress" in event] == [4, 4]
    timed = {event["type"]: event["timings"] for event in events if "timings" in event}
    assert timed.keys() == {"response.output_text.delta"}
    assert timed["response.output_text.delta"]["prompt_ms"] == 2.0


def test_an_error_is_an_event_of_its_own_number() -> None:
    stream = ResponsesStream(reply_of(), state_of())
    data = stream.frame(parts()[0]) + stream.error(ApiError(ErrorType.SERVER, "it broke"))
    error = checked(data)[-1]
    assert error["type"] == "error"
    assert error["message"] == "it broke"
    assert error["error"]["code"] == 500


def prob(piece: str) -> TokenProb:
    return TokenProb(token=1, piece=piece.encode(), prob=0.5, top=[(1, piece.encode(), 0.5), (2, b"x", 0.25)])


PIECES = ["<think>", "hm", "</think>", "No", "on"]


def words(entries: list[Any]) -> list[str]:
    return [entry["token"] for entry in entries]


@pytest.mark.parametrize("n_top", [0, 1])
def test_probabilities_of_the_tokens_of_a_text(n_top: int) -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": n_top}
    last = replace(final("".join(PIECES)), probs=[prob(piece) for piece in PIECES])
    plain = response_json(reply_of(**body), state_of(), last)
    Response.model_validate(plain, strict=True)
    entries = plain["output"][1]["content"][0]["logprobs"]
    assert words(entries) == ["No", "on"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {n_top}
    assert entries[0]["logprob"] == pytest.approx(math.log(0.5))

    pieces: list[Result] = [PartialResult(id=1, content=piece.encode(), prob=prob(piece)) for piece in PIECES]
    events = events_of([*pieces, final()], ResponsesStream(reply_of(**body), state_of()))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [words(event["logprobs"]) for event in deltas] == [["No"], ["on"]]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == events[-1]["response"]["output"][1]["content"][0]["logprobs"] == entries


def test_tokens_are_found_again_in_a_text() -> None:
    trail = TokenTrail([prob(piece) for piece in ("<a>", " No", "on", " n", "ow", "</a>")])
    assert trail.take("elsewhere") == []
    assert [found.piece for found in trail.take("Noon n")] == [b" No", b"on", b" n"]
    assert [found.piece for found in trail.take("ow")] == [b"ow"]
    assert trail.take("No") == []
    trail.add(prob("é"))
    assert [found.piece for found in trail.take("é")] == ["é".encode()]
