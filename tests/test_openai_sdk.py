"""The openai package as a client of the chat API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from server_process import ServerProcess
from test_chat_e2e import CLOCKS, ENDS, TEMPLATE, USER

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Pet(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    kind: Literal["cat", "dog"]
    is_young: bool


@pytest.fixture(scope="module")
def client(tiny_model_path: Path) -> Iterator[Any]:
    flags = ["-m", tiny_model_path, "-c", 2048, "-np", 2, "-t", 1, "--no-warmup", "--chat-template", TEMPLATE]
    with (
        ServerProcess(*flags, "--api-key", "secret") as server,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


def settings(**more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [USER], "temperature": 0, "max_tokens": 12, **more}


def test_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(**settings(logprobs=True, top_logprobs=2, n=2, seed=1))
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert len(choice.logprobs.content) == 12
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == 24 + answer.usage.prompt_tokens


def test_a_stream(client: Any) -> None:
    whole = client.chat.completions.create(**settings()).choices[0].message.content
    chunks = list(client.chat.completions.create(**settings(stream=True, stream_options={"include_usage": True})))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == whole
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [12]


def test_the_stream_helper_puts_the_answer_together(client: Any) -> None:
    body = settings(extra_body={"grammar": 'root ::= "yes, of course"'}) | {"max_tokens": 64}
    with client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "yes, of course"


def test_tools(client: Any) -> None:
    body = {"tools": CLOCKS, "tool_choice": {"type": "function", "function": {"name": "clock_local"}}}
    extra = {"logit_bias": ENDS["logit_bias"]}
    answer = client.chat.completions.create(**settings(**body, extra_body=extra) | {"max_tokens": 400})
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert {call.function.name for call in message.tool_calls} == {"clock_local"}
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"time": "noon"})}
        for call in message.tool_calls
    ]
    again = client.chat.completions.create(**settings(tools=CLOCKS) | {"messages": [USER, message, *results]})
    assert again.choices[0].message.role == "assistant"


def test_the_stream_helper_puts_tool_calls_together(client: Any) -> None:
    body = settings(tools=CLOCKS, tool_choice="required", extra_body={"logit_bias": ENDS["logit_bias"]})
    with client.chat.completions.stream(**body | {"max_tokens": 400}) as stream:
        arguments = [event.arguments for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert arguments == [call.function.arguments for call in calls] != []
    assert all(json.loads(text)["zone"] in ("UTC", "CET") for text in arguments)


def test_an_answer_parsed_into_a_model(client: Any) -> None:
    answer = client.chat.completions.parse(**settings(response_format=Pet) | {"max_tokens": 100})
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_errors_have_their_classes(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**settings(top_logprobs=2))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(**settings())
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        long = [{"role": "user", "content": "tick tock " * 1200}]
        client.chat.completions.create(**settings(stream=True) | {"messages": long})
    assert caught.value.body["type"] == "exceed_context_size_error"


def test_a_stream_that_is_closed_frees_its_slot(client: Any) -> None:
    for _ in range(4):  # there are two slots
        with client.chat.completions.create(**settings(stream=True) | {"max_tokens": 400}) as stream:
            next(iter(stream))
    assert client.chat.completions.create(**settings()).choices
