"""Chats with a tiny model over real HTTP: what is demanded is enforced or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_harness import wait_for
from server_process import ServerProcess

CHAT = "/v1/chat/completions"
#: A template that knows tools.
TEMPLATE = """
{%- for t in tools %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}<call>
{{- '{"name": "' ~ c.function.name ~ '", "arguments": ' ~ (c.function.arguments | tojson) ~ '}' }}</call>{% endfor %}
{%- else %}{{ m.content }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
USER = {"role": "user", "content": "what time is it here?"}
ZONE = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}


def tool(name: str, parameters: Any = ZONE) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CLOCKS = [tool("clock_utc"), tool("clock_local")]
#: The model ends as soon as the grammar lets it.
ENDS = {"logit_bias": [[2, 100]], "max_tokens": 400}


@pytest.fixture(scope="module")
def server(tiny_model_path: Path) -> Iterator[ServerProcess]:
    flags = ["-m", tiny_model_path, "-c", 1024, "-np", 2, "-t", 1, "--no-warmup", "--chat-template", TEMPLATE]
    with ServerProcess(*flags) as server:
        yield server


def ask(server: ServerProcess, **body: Any) -> tuple[int, Any]:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 16, **body}
    response = server.post(CHAT, body)
    return response.status, response.json()


def answer(server: ServerProcess, **body: Any) -> Any:
    status, out = ask(server, **body)
    assert status == 200, out
    return out["choices"][0]


def content(server: ServerProcess, **body: Any) -> str:
    text = answer(server, **body)["message"]["content"]
    assert isinstance(text, str)
    return text


def streamed(server: ServerProcess, **body: Any) -> list[Any]:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 16, **body, "stream": True}
    with server.stream(CHAT, body) as stream:
        assert stream.status == 200, stream.read()
        events = list(stream)
        assert stream.lines[-1] == "data: [DONE]"
        return events


def joined(events: list[Any], member: str = "content") -> str:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get(member) or "" for delta in deltas)


def refused(server: ServerProcess, **body: Any) -> str:
    """The text of the error, after seeing that the server is well."""
    status, out = ask(server, **body)
    assert status == 400, out
    assert out["error"]["type"] == "invalid_request_error"
    assert server.get("/health").status == 200
    message = out["error"]["message"]
    assert isinstance(message, str)
    return message


def test_a_stream_says_the_same_as_one_piece(server: ServerProcess) -> None:
    assert joined(streamed(server)) == content(server) != ""


def test_counts_agree_with_the_rendered_prompt(server: ServerProcess) -> None:
    _, body = ask(server)
    counted = server.post("/v1/chat/completions/input_tokens", {"messages": [USER]}).json()
    assert body["usage"]["prompt_tokens"] == counted["input_tokens"]
    prompt = server.post("/apply-template", {"messages": [USER]}).json()["prompt"]
    assert prompt == "<|user|>what time is it here?<|end|><|assistant|>"
    tokens = server.post("/tokenize", {"content": prompt, "add_special": True}).json()["tokens"]
    assert len(tokens) == counted["input_tokens"]


def test_the_template_is_a_property(server: ServerProcess) -> None:
    props = server.get("/props").json()
    assert props["chat_template"] == TEMPLATE
    assert props["chat_template_caps"]["supports_tools"]


def test_choices_differ_by_their_seed(server: ServerProcess) -> None:
    _, body = ask(server, n=2, temperature=2.0, seed=1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 2
    assert body["usage"]["completion_tokens"] == 32


def test_an_assistants_last_message_is_continued(server: ServerProcess) -> None:
    last = {"role": "assistant", "content": "It is ha"}
    body = {"messages": [USER, last], "grammar": 'root ::= "lf past ten"'}
    assert server.post("/apply-template", body).json()["prompt"].endswith("<|assistant|>It is ha")
    assert content(server, **body) == "It is half past ten"


def test_broken_bytes_become_replacement_characters(server: ServerProcess) -> None:
    hot = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "max_tokens": 64, "logprobs": True, "top_logprobs": 3}
    for seed in range(4):
        choice = answer(server, seed=seed, **hot)
        entries = choice["logprobs"]["content"]
        raw = b"".join(bytes(entry["bytes"]) for entry in entries)
        text = choice["message"]["content"]
        assert raw.decode(errors="replace").startswith(text) or text.startswith(raw.decode(errors="replace"))
        events = streamed(server, seed=seed, **hot)
        assert joined(events) == text
        listed = [event["choices"][0].get("logprobs") for event in events]
        assert [entry["id"] for part in listed if part for entry in part["content"]] == [e["id"] for e in entries]


def test_a_stop_string_is_cut_and_held_text_is_released(server: ServerProcess) -> None:
    cut = {"grammar": 'root ::= "abc STOP"', "stop": ["STOP"]}
    held = {"grammar": 'root ::= "one two three"', "stop": ["three\nEND"]}
    short = {"grammar": 'root ::= "aaaa" "b"*', "stop": ["bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"]}
    assert joined(streamed(server, max_tokens=32, **cut)) == content(server, max_tokens=32, **cut) == "abc "
    assert joined(streamed(server, max_tokens=32, **held)) == content(server, max_tokens=32, **held) == "one two three"
    text = content(server, max_tokens=8, **short)
    assert joined(streamed(server, max_tokens=8, **short)) == text
    assert re.fullmatch("a{1,4}b*", text)


def test_a_prompt_that_is_too_long_is_refused_before_the_stream(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "tick tock " * 600}]
    for stream in (False, True):
        status, body = ask(server, messages=messages, stream=stream)
        error = body["error"]
        assert (status, error["type"]) == (400, "exceed_context_size_error")
        assert error["n_prompt_tokens"] > error["n_ctx"] == 512


PET = {"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}}, "required": ["pet"]}


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "schema": PET},
        {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": PET}},
        {"type": "json_object", "schema": PET},
    ],
)
def test_a_schema_is_enforced_wherever_it_stands(server: ServerProcess, wanted: Any) -> None:
    body = {"response_format": wanted, "max_tokens": 60}
    assert json.loads(content(server, **body))["pet"] in ("cat", "dog")
    assert json.loads(joined(streamed(server, **body)))["pet"] in ("cat", "dog")


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"type": "json_schema", "json_schema": {"name": "pet"}}, "json_schema.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "yaml"}, '"text", "json_object" or "json_schema"'),
        (5, "response_format"),
    ],
)
def test_a_response_format_without_sense_is_refused(server: ServerProcess, wanted: Any, named: str) -> None:
    assert named in refused(server, response_format=wanted)


@pytest.mark.parametrize("pattern", [r"^ready\!$", r"^\d{2,}$", "(?=x)", "^[ab", "ready"])
def test_a_pattern_is_enforced_or_refused(server: ServerProcess, pattern: str) -> None:
    schema = {"type": "object", "properties": {"state": {"type": "string", "pattern": pattern}}, "required": ["state"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    status, body = ask(server, response_format=wanted, max_tokens=64)
    if status == 400:
        assert "state" in body["error"]["message"]
        assert pattern in body["error"]["message"] or json.dumps(pattern)[1:-1] in body["error"]["message"]
        return
    assert status == 200
    [choice] = body["choices"]
    if choice["finish_reason"] == "stop":
        assert re.search(pattern, json.loads(choice["message"]["content"])["state"])
    else:
        assert re.match(r'\s*\{\s*"state"\s*:\s*"', choice["message"]["content"])


@pytest.mark.parametrize(
    "grammar", ['root := "x"', 'Root ::= "x"', "root ::= missing", 'root ::= root "x"', 7, {"a": 1}]
)
def test_a_bad_grammar_is_refused(server: ServerProcess, grammar: Any) -> None:
    assert "grammar" in refused(server, grammar=grammar)


def check_call(function: Any, names: tuple[str, ...]) -> None:
    assert function["name"] in names
    assert json.loads(function["arguments"])["zone"] in ("UTC", "CET")


def test_a_named_tool_is_called(server: ServerProcess) -> None:
    for name in ("clock_utc", "clock_local"):
        wanted = {"type": "function", "function": {"name": name}}
        choice = answer(server, tools=CLOCKS, tool_choice=wanted, **ENDS)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"]
        for call in choice["message"]["tool_calls"]:
            check_call(call["function"], (name,))


def test_a_required_tool_streams_as_deltas(server: ServerProcess) -> None:
    events = streamed(server, tools=CLOCKS, tool_choice="required", **ENDS)
    calls: dict[int, dict[str, str]] = {}
    ids = []
    for event in events:
        for delta in event["choices"][0]["delta"].get("tool_calls", []):
            call = calls.setdefault(delta["index"], {"name": "", "arguments": ""})
            ids += [delta["id"]] if "id" in delta else []
            for member, text in delta["function"].items():
                call[member] += text
    assert list(calls) == list(range(len(calls))) != []
    assert len(set(ids)) == len(ids) == len(calls)
    for call in calls.values():
        check_call(call, ("clock_utc", "clock_local"))
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_parallel_calls_there_is_one(server: ServerProcess) -> None:
    body = {"tools": CLOCKS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    choice = answer(server, **body)
    [call] = choice["message"]["tool_calls"]
    check_call(call["function"], ("clock_utc", "clock_local"))
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "none_such"}}, {"type": "function"}, 5, "perhaps"]
)
def test_a_tool_choice_without_sense_is_refused(server: ServerProcess, choice: Any) -> None:
    assert refused(server, tools=CLOCKS, tool_choice=choice)


@pytest.mark.parametrize("arguments", ['{"a":', "", None, {"a": 1}, [1], "5"])
def test_arguments_of_earlier_calls_never_break_the_server(server: ServerProcess, arguments: Any) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "ping", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "t1", "content": "x"}
    history = [USER, {"role": "assistant", "tool_calls": [call]}, result, USER]
    status, body = ask(server, messages=history, max_tokens=1)
    assert status in (200, 400), body
    if status == 400:
        assert "messages[1]" in body["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "other", "content": "x"},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": []},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None},
        "hi",
    ],
)
def test_odd_messages_never_break_the_server(server: ServerProcess, message: Any) -> None:
    status, body = ask(server, messages=[USER, message, USER], max_tokens=1)
    assert status in (200, 400), body


@pytest.mark.parametrize(
    "body",
    [
        {"stream": "false"},
        {"stop": 5},
        {"messages": "hi"},
        {"messages": None},
        {"messages": {}},
        {"tools": {}},
        {"tools": "x"},
        {"temperature": "hot"},
        {"max_tokens": "many"},
        {"logprobs": True, "top_logprobs": "x"},
        {"top_logprobs": 3},
        {"n": 99},
        {"chat_template_kwargs": 5},
        {"reasoning_format": "loud"},
        {"continue_final_message": 5},
    ],
)
def test_values_of_a_wrong_type_are_refused(server: ServerProcess, body: Any) -> None:
    assert refused(server, **body)


def test_lone_surrogates_are_refused(server: ServerProcess) -> None:
    response = server.post(CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}')
    assert response.status in (200, 400)
    assert server.get("/health").status == 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_media_is_refused_by_a_model_without_it(server: ServerProcess, kind: str) -> None:
    part = {"type": kind, kind: {"url": "http://192.0.2.1/x.png", "data": "AAAA", "format": "wav"}}
    message = refused(server, messages=[{"role": "user", "content": [part]}])
    assert "input is not supported" in message


def test_control_of_a_completion_that_is_unknown(server: ServerProcess) -> None:
    response = server.post(f"{CHAT}/control", {"id": "chatcmpl-x", "action": "reasoning_end"})
    assert response.status == 200
    assert response.json() == {"success": False, "message": "no active completion for this id"}


def test_a_stream_that_names_its_conversation_can_be_read_again(server: ServerProcess) -> None:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 16, "stream": True}
    with server.stream(CHAT, body, headers={"X-Conversation-Id": "talk"}) as stream:
        first = stream.read()
    assert first.endswith(b"data: [DONE]\n\n")
    again = server.get("/v1/stream?conv_id=talk&from=0")
    assert (again.status, again.body) == (200, first)


#: A template whose answers begin with reasoning.
THINKING = """
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
<think>
{% endif %}"""


@pytest.fixture(scope="module")
def thinker(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    # its tokenizer finds the tags again within the prompt
    flags = ["-m", tiny_models["tiny-bpe"], "-c", 4096, "-np", 2, "-t", 1, "--no-warmup", "--chat-template", THINKING]
    with ServerProcess(*flags) as server:
        yield server


def test_reasoning_is_apart_from_the_content(thinker: ServerProcess) -> None:
    body = {"grammar": 'root ::= "hm\\n</think>\\nNoon"', "max_tokens": 64}
    message = answer(thinker, **body)["message"]
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("hm", "Noon")
    events = streamed(thinker, **body)
    assert joined(events, "reasoning_content") == message["reasoning_content"]
    assert joined(events) == message["content"]
    assert content(thinker, reasoning_format="none", **body).endswith("hm\n</think>\nNoon")


def test_reasoning_under_way_is_ended_by_control(thinker: ServerProcess) -> None:
    body = {"messages": [USER], "max_tokens": 1500, "ignore_eos": True, "reasoning_control": True, "stream": True}
    control = {"action": "reasoning_end"}
    with thinker.stream(CHAT, body) as stream:
        reasoning = text = ""
        is_told = False
        for event in stream:
            delta = event["choices"][0]["delta"]
            reasoning += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            if reasoning and not is_told:
                is_told = True
                done = thinker.post(f"{CHAT}/control", {"id": event["id"], **control})
                assert done.json() == {"success": True}
            if text:
                break
    assert reasoning
    assert text


def test_reasoning_is_ended_only_where_the_request_allows_it(thinker: ServerProcess) -> None:
    body = {"messages": [USER], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with thinker.stream(CHAT, body) as stream:
        event = next(iter(stream))
        done = thinker.post(f"{CHAT}/control", {"id": event["id"], "action": "reasoning_end"})
    answered = {"success": False, "message": "reasoning control not enabled for this completion"}
    assert done.json() == answered


@pytest.mark.slow
def test_chats_wake_a_sleeping_server(tiny_model_path: Path) -> None:
    flags = ["-m", tiny_model_path, "-c", 512, "-np", 1, "-t", 1, "--no-warmup", "--sleep-idle-seconds", 1]
    with ServerProcess(*flags, "--chat-template", TEMPLATE) as server:
        before = content(server)
        for _ in range(2):
            assert wait_for(lambda: server.get("/props").json()["is_sleeping"], timeout=60)
            assert server.get("/props").json()["chat_template"] == TEMPLATE
            assert content(server) == before
