"""The Responses and Messages APIs over real HTTP, as the clients of their makers see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response as OpenAiResponse
from pydantic import BaseModel
from server_process import Response, ServerProcess, Stream

ZONE = {"type": "object", "properties": {"zone": {"enum": ["here", "there"]}}, "required": ["zone"]}
FUNCTION: Any = {
    "type": "function",
    "name": "clock",
    "description": "tells the time",
    "parameters": ZONE,
    "strict": True,
}
TOOL: Any = {"name": "clock", "description": "tells the time", "input_schema": ZONE}
LONG = "word " * 900


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "-m", tiny_model_path, "-c", 4096, "-np", 2, "-t", 1, "--jinja", "--alias", "tiny", "--temp", 0
    ) as running:
        yield running


#: A template whose answers begin with reasoning.
THINKING = """
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""


@pytest.fixture(scope="module")
def thinker(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(THINKING)
    flags = ("-m", tiny_model_path, "-c", 2048, "-np", 1, "-t", 1, "--chat-template-file", template, "--jinja")
    with ServerProcess(*flags, "--grammar", 'root ::= "hm</think>Noon"') as running:
        yield running


@pytest.fixture(scope="module")
def small(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_model_path, "-c", 256, "-np", 1, "-t", 1, "--jinja") as running:
        yield running


@pytest.fixture(scope="module")
def openai_client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client


def responses_events(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    body = {"input": "Tell me", "temperature": 0, "stream": True, **body}
    with server.stream("/v1/responses", body) as stream:
        assert stream.status == 200
        events = list(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# -- Responses


def test_a_response(openai_client: openai.OpenAI) -> None:
    response = openai_client.responses.create(
        model="tiny",
        instructions="Be brief.",
        input=[{"role": "developer", "content": "Book"}, {"role": "user", "content": "What is the best book?"}],
        max_output_tokens=8,
        temperature=0,
        metadata={"a": "b"},
    )
    assert response.id.startswith("resp_")
    assert response.model == "tiny"
    assert response.output[0].id is not None and response.output[0].id.startswith("msg_")
    assert response.output_text
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert response.metadata == {"a": "b"}
    assert response.max_output_tokens == 8


def test_a_response_that_ends_by_itself_is_complete(openai_client: openai.OpenAI) -> None:
    response = openai_client.responses.create(
        model="tiny", input="Yes or no?", extra_body={"grammar": 'root ::= "yes"'}, temperature=0
    )
    assert (response.status, response.output_text, response.incomplete_details) == ("completed", "yes", None)


def test_streamed_and_plain_responses_agree(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Once", "max_output_tokens": 12, "temperature": 0}
    plain = openai_client.responses.create(**asked)
    events = list(openai_client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert text == last.response.output_text == plain.output_text
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {last.response.output[0].id}


def test_the_stream_helper_gathers_the_response(openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(
        model="tiny", input="Yes?", extra_body={"grammar": 'root ::= "yes"'}, temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "yes"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_a_function_is_called_and_its_answer_taken(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [FUNCTION], "temperature": 0}
    question: Any = {"role": "user", "content": "What time is it?"}
    first = openai_client.responses.create(**asked, input=[question], tool_choice={"type": "function", "name": "clock"})
    [call] = first.output
    assert call.type == "function_call"
    assert call.name == "clock"
    assert json.loads(call.arguments)["zone"] in ("here", "there")
    assert call.status == "completed"

    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    second = openai_client.responses.create(
        **asked, input=[question, *first.output, answer], tool_choice="none", max_output_tokens=8
    )
    assert second.output_text


def test_a_streamed_function_call(openai_client: openai.OpenAI) -> None:
    events = list(
        openai_client.responses.create(
            model="tiny", input="time?", tools=[FUNCTION], tool_choice="required", temperature=0, stream=True
        )
    )
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    last = events[-1]
    assert last.type == "response.completed"
    assert added and [item.id for item in added] == [item.id for item in done]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.response.output]
    assert len(deltas) > 1
    assert "".join(deltas) == "".join(item.arguments for item in done if item.type == "function_call")


def test_parse_gives_an_object(openai_client: openai.OpenAI) -> None:
    class Pet(BaseModel):
        is_cat: bool

    parsed = openai_client.responses.parse(model="tiny", input="A pet", text_format=Pet, temperature=0)
    assert isinstance(parsed.output_parsed, Pet)


def test_probabilities_of_a_response(openai_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": "Once",
        "max_output_tokens": 6,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    plain = openai_client.responses.create(**asked)
    last = list(openai_client.responses.create(**asked, stream=True))[-1]
    assert last.type == "response.incomplete"
    for response in (plain, last.response):
        [message] = response.output
        assert message.type == "message"
        [part] = message.content
        assert part.type == "output_text" and part.logprobs is not None
        assert len(part.logprobs) == 6
        assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode().endswith(part.text)
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)


def test_unprefixed_names_and_counting(server: ServerProcess) -> None:
    body = {"input": "Hello", "max_output_tokens": 4, "temperature": 0}
    value = server.post("/responses", body).json()
    OpenAiResponse.model_validate(value, strict=True)
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        counted = server.post(path, body).json()
        assert counted == {"input_tokens": value["usage"]["input_tokens"], "object": "response.input_tokens"}


def test_progress_and_times_of_a_streamed_response(server: ServerProcess) -> None:
    events = responses_events(server, max_output_tokens=4, timings_per_token=True, return_progress=True)
    progress = [event for event in events if "prompt_progress" in event]
    assert progress and {event["type"] for event in progress} == {"response.in_progress"}
    assert progress[-1]["prompt_progress"]["total"] == progress[-1]["prompt_progress"]["processed"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert deltas and all(event["timings"]["predicted_n"] > 0 for event in deltas)
    assert events[-1]["timings"]["predicted_n"] == 4
    # clients that ask for these know this one last event
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["status"] == "incomplete"


# -- Messages


def test_a_message(anthropic_client: anthropic.Anthropic) -> None:
    message = anthropic_client.messages.create(
        model="tiny", max_tokens=8, system="Be brief.", messages=[{"role": "user", "content": "Once"}]
    )
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 8
    [block] = message.content
    assert block.type == "text" and block.text
    with anthropic_client.messages.stream(
        model="tiny", max_tokens=8, system="Be brief.", messages=[{"role": "user", "content": "Once"}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert final.content[0].model_dump(exclude_none=True)["text"] == block.text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 8


def test_a_stop_sequence_is_named(anthropic_client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Once"}],
        "max_tokens": 16,
    }
    [block] = anthropic_client.messages.create(**asked).content
    assert block.type == "text"
    word = block.text.split()[1]
    message = anthropic_client.messages.create(**asked, stop_sequences=[word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert all(part.type == "text" and word not in part.text for part in message.content)


def test_a_tool_is_used_and_its_result_taken(anthropic_client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [TOOL]}
    question: Any = {"role": "user", "content": "What time is it?"}
    choice: Any = {"type": "tool", "name": "clock", "disable_parallel_tool_use": True}
    first = anthropic_client.messages.create(**asked, max_tokens=300, messages=[question], tool_choice=choice)
    assert first.stop_reason == "tool_use"
    [use] = first.content
    assert use.type == "tool_use"
    assert use.name == "clock"
    assert use.input["zone"] in ("here", "there")

    with anthropic_client.messages.stream(**asked, max_tokens=300, messages=[question], tool_choice=choice) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == use.input

    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "noon"}]}
    second = anthropic_client.messages.create(
        **asked,
        max_tokens=8,
        messages=[question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}],
        tool_choice={"type": "none"},
    )
    assert [part.type for part in second.content] == ["text"]


def test_counting_tokens(anthropic_client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Once upon a time"}]}
    counted = anthropic_client.messages.count_tokens(**asked).input_tokens
    usage = anthropic_client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert anthropic_client.messages.count_tokens(**asked, tools=[TOOL], system="Be brief.").input_tokens > counted


# -- reasoning


def test_thinking_is_a_block_of_its_own(thinker: ServerProcess) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "Once"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    url = f"http://127.0.0.1:{thinker.port}"
    with anthropic.Anthropic(base_url=url, api_key="none", _strict_response_validation=True) as client:
        plain = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for message in (plain, streamed):
        thinking, said = message.content
        assert thinking.type == "thinking" and thinking.thinking == "hm"
        assert said.type == "text" and said.text == "Noon"
        assert message.stop_reason == "end_turn"


def test_reasoning_is_an_item_of_its_own(thinker: ServerProcess) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Once", "max_output_tokens": 40}
    url = f"http://127.0.0.1:{thinker.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", _strict_response_validation=True) as client:
        plain = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        last = events[-1]
        assert last.type == "response.completed"
        question = {"role": "user", "content": "Once"}
        again: Any = [question, *last.response.output, question]
        assert client.responses.create(model="tiny", input=again).output_text == "Noon"
    for response in (plain, last.response):
        reasoning, message = response.output
        assert reasoning.type == "reasoning" and reasoning.content
        assert (reasoning.status, reasoning.content[0].text) == ("completed", "hm")
        assert message.type == "message" and response.output_text == "Noon"
        assert response.usage is not None
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm"


# -- requests that cannot be served


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_an_error_before_any_stream(small: ServerProcess, path: str, stream: bool) -> None:
    body = {"input": LONG, "messages": [{"role": "user", "content": LONG}], "stream": stream}
    response = small.post(path, body)
    assert response.status == 400
    error = response.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 256


HOSTILE: list[Any] = [
    None,
    [],
    {},
    {"input": [[]], "messages": [[]]},
    {"input": {}, "messages": {}},
    {"input": [{"role": {}, "content": {}}], "messages": [{"role": {}, "content": {}}]},
    {"input": [{"role": "user", "content": [None]}], "messages": [{"role": "user", "content": [None]}]},
    {"input": [{"type": {}, "summary": {}}], "messages": [{"role": "user", "content": [{"type": {}}]}]},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "name": {}}]},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "tool", "name": []}},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "temperature": "hot"},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "stream": "yes"},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": {}, "max_output_tokens": {}},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "stop_sequences": 5, "stop": 5},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "text": 5, "thinking": 5},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "reasoning": {"effort": 5}, "system": 5},
    {"input": "a", "messages": [{"role": "user", "content": "a"}], "tools": [[[[]]]]},
]
PATHS = ["/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: json.dumps(body)[:60])
def test_nonsense_is_the_callers_mistake(server: ServerProcess, path: str, body: Any) -> None:
    data = json.dumps(body).encode()
    response: Response = server.post(path, data)
    counting = path in (PATHS[1], PATHS[3])
    # counting does not look at what only sampling would use
    assert response.status == 400 or (counting and response.status == 200), response.text
    if response.status == 400:
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_deep_nesting_is_refused(server: ServerProcess, path: str) -> None:
    tools = "[" * 3000 + "]" * 3000
    body = '{"input": "a", "messages": [{"role": "user", "content": "a"}], "tools": ' + tools + "}"
    assert server.post(path, body.encode()).status == 400
    assert server.get("/health").status == 200


def test_pictures_are_named_as_what_the_model_cannot_take(server: ServerProcess) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "image", "source": source}]
    messages = server.post("/v1/messages", {"messages": [{"role": "user", "content": content}]})
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    responses = server.post("/v1/responses", {"input": [{"role": "user", "content": [image]}]})
    assert (messages.status, responses.status) == (500, 400)
    for answer in (messages, responses):
        assert "image input is not supported" in answer.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_slot(server: ServerProcess) -> None:
    for path in ("/v1/responses", "/v1/messages"):
        body = {"input": "a", "messages": [{"role": "user", "content": "a"}], "stream": True, "ignore_eos": True}
        stream: Stream = server.stream(path, {**body, "max_tokens": 100_000})
        next(iter(stream))
        stream.hang_up()
    events = responses_events(server, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
