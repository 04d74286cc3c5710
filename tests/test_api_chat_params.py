"""Chat requests to completion requests: what is checked, what the template gets, what is enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from api_fakes import FakeIds, FakeVocab, api_context, server_params
from conftest import unavailable
from server_process import ServerProcess

from llamasrv import binding
from llamasrv.api.chat_params import ChatPlan, parse_chat
from llamasrv.api.chat_settings import ChatSettings
from llamasrv.api.chat_tasks import build_chat_task
from llamasrv.api.content import MediaError
from llamasrv.api.errors import ApiError
from llamasrv.api.grammar import GrammarUse
from llamasrv.binding import ChatTemplates, Model, Params, backend_init

USER = {"role": "user", "content": "what time is it here?"}
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}


def tool(name: str, parameters: Any = PARAMETERS) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CLOCKS = [tool("clock_utc"), tool("clock_local")]

#: A template that knows tools and reasoning.
SOURCE = """
{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.tool_calls %}<calls>[{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}
{{- '{"name": "' ~ c.function.name ~ '", "arguments": ' ~ (c.function.arguments | tojson) ~ '}' }}
{%- endfor %}]</calls>{% else %}{{ m.content }}{% endif %}<|end|>
{%- else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}
{%- if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{% if greeting %}[{{ greeting }}]{% endif %}"""


def settings_of(source: str = SOURCE, use_jinja: bool = True, **changed: Any) -> ChatSettings:
    templates = ChatTemplates(source, use_jinja=use_jinja)
    return ChatSettings(templates, **{"enable_thinking": templates.supports_thinking, **changed})


SETTINGS = settings_of()
PLAIN = settings_of("chatml")


@pytest.fixture(scope="module")
def model(tiny_models: dict[str, Path]) -> Iterator[Model]:
    flags = ["-m", str(tiny_models["tiny-bpe"]), "-c", "64", "-np", "1", "--no-warmup", "-lv", "0"]
    with Params.parse(["llamasrv", *flags]) as params:
        backend_init(params)
        with Model.load(params) as model:
            yield model


@pytest.fixture
def parse(model: Model) -> Callable[..., ChatPlan]:
    """Parse a request for SETTINGS, or others given first; members are keyword arguments."""
    grammars = GrammarUse(binding, model.vocab)

    def run(settings: ChatSettings = SETTINGS, **body: Any) -> ChatPlan:
        return parse_chat({"messages": [USER], **body}, settings, model.vocab, grammars)

    return run


Parse = Callable[..., ChatPlan]


def refused(parse: Parse, settings: ChatSettings = SETTINGS, **body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        parse(settings, **body)
    assert caught.value.status == 400
    assert caught.value.type.label == "invalid_request_error"
    return caught.value.message


# prompt and fields


def test_prompt_is_rendered_and_other_fields_pass_on(parse: Parse) -> None:
    plan = parse(temperature=0.5, max_tokens=7, stop="x", mirostat=1, prompt="ignored", stream=True)
    assert plan.prompt == plan.data["prompt"] == "<|user|>what time is it here?<|end|><|assistant|>"
    wanted = {"temperature": 0.5, "max_tokens": 7, "stop": "x", "mirostat": 1, "stream": True}
    assert wanted.items() <= plan.data.items()
    assert "messages" not in plan.data
    assert plan.grammar == ""


def test_fields_that_the_session_provides_are_dropped(parse: Parse) -> None:
    plan = parse(grammar_lazy=True, grammar_triggers=[{"type": 1}], preserved_tokens=["x"])
    assert not {"grammar_lazy", "grammar_triggers", "preserved_tokens"} & plan.data.keys()


def test_vocabulary_of_another_kind_will_do() -> None:
    context = api_context()
    plan = parse_chat({"messages": [USER]}, SETTINGS, FakeVocab(), context.schema.grammars)
    assert plan.prompt.startswith("<|user|>")
    assert context.schema.parse(plan.data).sampling.grammar == ("none", "")


@pytest.mark.parametrize(
    "field", ["tools", "tool_choice", "response_format", "json_schema", "grammar", "reasoning_format"]
)
def test_null_is_the_same_as_absent(parse: Parse, field: str) -> None:
    assert parse(**{field: None}).prompt == parse().prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallel_tool_calls", "yes"),
        ("add_generation_prompt", 1),
        ("echo", "x"),
        ("reasoning_effort", 5),
        ("chat_template_kwargs", []),
        ("grammar", 7),
        ("reasoning_format", 7),
    ],
)
def test_wrong_type_is_refused_by_name(parse: Parse, field: str, value: Any) -> None:
    assert refused(parse, **{field: value}).startswith(f"Field '{field}': type must be ")


# messages


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hi", "Expected 'messages' to be an array"),
        (None, "Expected 'messages' to be an array"),
        ([5], "All non-assistant messages must contain 'content'"),
        ([{}], "All non-assistant messages must contain 'content'"),
        ([{"role": "assistant"}], "Assistant message must contain either 'content' or 'tool_calls'!"),
        ([{"role": "user", "content": 5}], "Expected 'content' to be a string or an array"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "unsupported content[].type"),
        ([{"content": "x"}], "Failed to parse messages: Missing 'role' in message: "),
        ([USER, {"role": 7, "content": "x"}], "messages[1]: 'role' must be string, but is number"),
        ([USER, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content[0]: 'text' must be string"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0]: 'name' must be string"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "messages[0]: 'tool_calls' must be array"),
        ([{"role": "assistant", "tool_calls": [{}]}], "Missing tool call type: {}"),
        ([{"role": "assistant", "tool_calls": [{"type": "x"}]}], 'Unsupported tool call type: {"type":"x"}'),
        ([{"role": "assistant", "tool_calls": [{"type": "function"}]}], "Missing tool call function: "),
        ([{"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}], "Missing tool call name: "),
    ],
)
def test_malformed_messages_are_refused(parse: Parse, messages: Any, text: str) -> None:
    assert text in refused(parse, messages=messages)


def test_messages_are_required() -> None:
    with pytest.raises(ApiError, match="'messages' is required"):
        parse_chat({}, SETTINGS, FakeVocab(), api_context().schema.grammars)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
            "image input is not supported - hint",
        ),
        ({"type": "input_audio", "input_audio": {"data": "AA"}}, "audio input is not supported - hint"),
        ({"type": "input_video"}, "video input is not supported - hint"),
        ({"type": "video_url"}, "video input is not supported - hint"),
    ],
)
def test_media_are_refused_before_anything_is_fetched(parse: Parse, part: Any, text: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}, {"role": 5}]
    assert text in refused(parse, messages=messages[:1])
    with pytest.raises(MediaError):
        parse(messages=messages[:1])


def test_text_parts_are_joined(parse: Parse) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in parse(messages=[{"role": "user", "content": parts}]).prompt


@pytest.mark.parametrize("content", [None, [], ""])
def test_empty_content_is_no_error(parse: Parse, content: Any) -> None:
    assert parse(messages=[{"role": "user", "content": content}]).prompt.startswith("<|user|><|end|>")


@pytest.mark.parametrize("settings", [SETTINGS, PLAIN], ids=["objects", "strings"])
@pytest.mark.parametrize("arguments", ["", None, "{}", '{"a": 1}', {"a": 1}, [1], 5, "[1]", '"x"'])
def test_any_arguments_in_the_history_render_or_are_refused(
    parse: Parse, settings: ChatSettings, arguments: Any
) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "ping", "arguments": arguments}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "unknown", "content": "pong"}, USER]
    assert "pong" in parse(settings, messages=history, tools=[tool("ping")]).prompt


def test_broken_arguments_in_the_history_are_refused_by_place_where_they_are_taken_apart(parse: Parse) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "ping", "arguments": '{"a":'}}
    history = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    assert SETTINGS.templates.caps["supports_object_arguments"]
    text = refused(parse, messages=history)
    assert text.startswith("Failed to parse tool call arguments as JSON: messages[1].tool_calls[0]: ")
    assert not PLAIN.templates.caps["supports_object_arguments"]
    parse(PLAIN, messages=history)


def test_nulls_that_clients_send_back_are_no_error(parse: Parse) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": None, "reasoning_content": None, "name": None}
    parse(messages=[USER, message, USER])
    parse(messages=[USER, {"role": "assistant", "tool_calls": None}, USER])


def test_complaint_of_the_template_is_the_clients_mistake(parse: Parse) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'ghost' %}{{ raise_exception('no ghosts') }}{% endif %}{{ m.content }}"
    )
    settings = settings_of(source + "{% endfor %}")
    assert "no ghosts" in refused(parse, settings, messages=[{"role": "ghost", "content": "x"}])


def test_deep_values_are_refused(parse: Parse) -> None:
    text = "[" * 5000 + "]" * 5000
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    assert "nested too deeply" in refused(parse, PLAIN, messages=[{"role": "assistant", "tool_calls": [call]}, USER])
    # too deep for the JSON reader, where it has to be JSON
    assert "messages[0].tool_calls[0]" in refused(parse, messages=[{"role": "assistant", "tool_calls": [call]}, USER])


# tools


def test_tools_are_rendered_and_constrain_a_call(parse: Parse) -> None:
    plan = parse(tools=CLOCKS)
    assert "clock_utc" in plan.prompt
    assert "clock_local" in plan.prompt
    assert plan.grammar
    assert plan.grammar_lazy
    plan = parse(tools=CLOCKS, tool_choice="none")
    assert plan.grammar == ""


def test_demanded_call_leaves_no_room_for_prose(parse: Parse, model: Model) -> None:
    plan = parse(tools=CLOCKS, tool_choice="required", chat_template_kwargs={"enable_thinking": False})
    assert not plan.grammar_lazy
    assert plan.grammar == plan.answer.grammar_of_calls != plan.answer.grammar
    assert plan.generation_prompt == plan.answer.generation_prompt != ""


def test_named_tool_is_the_only_one_that_can_be_called(parse: Parse) -> None:
    choice = {"type": "function", "function": {"name": "clock_utc"}}
    for wanted in (choice, {"type": "function", "name": "clock_utc"}):
        plan = parse(tools=CLOCKS, tool_choice=wanted)
        assert "clock_utc" in plan.grammar
        assert "clock_local" not in plan.grammar
        assert not plan.grammar_lazy


def test_allowed_tools_are_a_choice_among_some(parse: Parse) -> None:
    allowed = [{"type": "function", "function": {"name": "clock_utc"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    plan = parse(tools=CLOCKS, tool_choice=choice)
    assert "clock_local" not in plan.prompt + plan.grammar
    assert not plan.grammar_lazy
    flat = {"type": "allowed_tools", "tools": [{"type": "function", "name": "clock_local"}]}
    plan = parse(tools=CLOCKS, tool_choice=flat)
    assert "clock_utc" not in plan.prompt + plan.grammar
    assert plan.grammar_lazy


@pytest.mark.parametrize(
    "choice",
    [
        "perhaps",
        5,
        [],
        True,
        {},
        {"type": "function"},
        {"type": "function", "function": 5},
        {"type": "function", "function": {"name": 5}},
        {"type": "function", "function": {"name": "clock_mars"}},
        {"type": "custom", "name": "clock_utc"},
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "tools": [{"type": "function", "name": "clock_mars"}]},
        {"type": "allowed_tools", "mode": "required", "tools": []},
    ],
)
def test_wrong_choices_are_refused(parse: Parse, choice: Any) -> None:
    assert refused(parse, tools=CLOCKS, tool_choice=choice).startswith("Invalid tool_choice: ")


def test_call_cannot_be_demanded_without_tools(parse: Parse) -> None:
    for tools in (None, []):
        assert "there is no tool to call" in refused(parse, tools=tools, tool_choice="required")
    assert "no tool named" in refused(parse, tool_choice={"type": "function", "function": {"name": "x"}})


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (5, "Expected 'tools' to be an array, got 5"),
        ([5], "Missing tool type: 5"),
        ([{}], "Missing tool type: {}"),
        ([{"type": "web"}], 'Unsupported tool type: {"type":"web"}'),
        ([{"type": "function"}], "Missing tool function: "),
        ([{"type": "function", "function": {}}], "tools[0]: 'function.name' must be a string"),
        ([{"type": "function", "function": {"name": "f", "description": 5}}], "tools[0]: 'function.description'"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0]: 'function.parameters'"),
        ([tool("f", {"$ref": "#/a", "a": {"$ref": "#/a"}})], "tools[0]: circular $ref"),
    ],
)
def test_malformed_tools_are_refused(parse: Parse, tools: Any, text: str) -> None:
    message = refused(parse, tools=tools)
    assert message.startswith("Failed to parse tools: ")
    assert text in message


def test_tools_without_parameters_or_description_work(parse: Parse) -> None:
    bare = {"type": "function", "function": {"name": "now", "description": None, "parameters": None, "strict": None}}
    assert "now" in parse(tools=[bare], tool_choice="required").grammar


def test_recursive_schemas_of_tools_work(parse: Parse) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    tree["$defs"] = {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}
    assert parse(tools=[tool("walk", tree)], tool_choice="required").grammar


def test_tools_need_jinja(parse: Parse) -> None:
    legacy = settings_of("chatml", use_jinja=False)
    assert refused(parse, legacy, tools=CLOCKS) == "tools param requires --jinja flag"
    assert refused(parse, legacy, tool_choice="none") == "tool_choice param requires --jinja flag"
    assert parse(legacy, tools=[], tool_choice="auto").prompt.startswith("<|im_start|>user")


def test_own_grammar_beside_tools_is_refused(parse: Parse) -> None:
    text = refused(parse, tools=CLOCKS, grammar='root ::= "x"')
    assert text == "Cannot use custom grammar constraints with tools."
    assert parse(tools=CLOCKS, tool_choice="none", grammar='root ::= "x"').data["grammar"] == 'root ::= "x"'


# a template that knows no tools


def test_demanded_call_is_forced_on_a_template_without_tools(parse: Parse, model: Model) -> None:
    plan = parse(PLAIN, tools=CLOCKS, tool_choice="required", stop=["x"])
    assert plan.prompted is not plan.answer
    assert plan.prompt.startswith("<|im_start|>system\nYou can call these functions:\n")
    assert "clock_local" in plan.prompt
    assert plan.prompt.endswith("<|im_start|>assistant\n")
    binding.check_grammar(model.vocab, plan.grammar)
    assert re.search(r"^root ::= tool-call$", plan.grammar, re.MULTILINE)
    assert not plan.grammar_lazy
    assert plan.generation_prompt == ""
    answer = plan.answer.clone()
    answer.finish(b'<tool_calls>[{"name": "clock_utc", "arguments": {"zone": "Z"}}]</tool_calls>')
    (call,) = answer.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("clock_utc", {"zone": "Z"})


@pytest.mark.parametrize(
    ("first", "start"),
    [
        ({"role": "system", "content": "Be brief."}, "<|im_start|>system\nBe brief.\n\nYou can call"),
        ({"role": "system", "content": None}, "<|im_start|>system\nYou can call"),
        ({"role": "system", "content": [{"type": "text", "text": "Be."}]}, "<|im_start|>system\nBe.\nYou can call"),
        ({"role": "developer", "content": "Be brief."}, "<|im_start|>system\nBe brief.\n\nYou can call"),
    ],
)
def test_explanation_of_tools_joins_the_system_message(parse: Parse, first: Any, start: str) -> None:
    plan = parse(PLAIN, messages=[first, USER], tools=CLOCKS, tool_choice="required")
    assert plan.prompt.startswith(start)
    assert plan.prompt.count("<|im_start|>system") == 1


def test_tools_that_need_not_be_called_are_as_in_the_original(parse: Parse) -> None:
    plan = parse(PLAIN, tools=CLOCKS)
    assert plan.prompt == parse(PLAIN).prompt
    assert plan.grammar == ""


# schemas and grammars

PET = {"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}}, "required": ["pet"]}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PET}}},
        {"response_format": {"type": "json_schema", "schema": PET}},
        {"response_format": {"type": "json_object", "schema": PET}},
        {"json_schema": PET},
        {"json_schema": PET, "response_format": {"type": "json_object"}},
        {"json_schema": PET, "response_format": {"type": "text"}},
    ],
)
@pytest.mark.parametrize("settings", [SETTINGS, PLAIN, settings_of("chatml", use_jinja=False)])
def test_schema_is_enforced_in_every_form(parse: Parse, settings: ChatSettings, body: dict[str, Any]) -> None:
    plan = parse(settings, **body)
    assert "dog" in plan.grammar
    assert not plan.grammar_lazy
    assert "json_schema" not in plan.data


@pytest.mark.parametrize("value", [{"type": "text"}, {}, {"type": None}, {"type": ""}, None])
def test_free_text_is_not_constrained(parse: Parse, value: Any) -> None:
    assert parse(response_format=value).grammar == ""


@pytest.mark.parametrize("body", [{"response_format": {"type": "json_object"}}, {"json_schema": {}}])
def test_no_schema_is_any_object(parse: Parse, body: dict[str, Any]) -> None:
    grammar = parse(**body).grammar
    assert 'object ::= "{"' in grammar


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"type": "json_schema"}, "'response_format.json_schema' is required"),
        ({"type": "json_schema", "json_schema": {}}, "'response_format.json_schema.schema' is required"),
        ({"type": "json_schema", "json_schema": {"schema": None}}, "'response_format.json_schema.schema' is required"),
        ({"type": "json_schema", "json_schema": 5}, "'response_format.json_schema' must be an object"),
        ({"type": "yaml"}, '"text", "json_object" or "json_schema", but got: yaml'),
        ({"type": 5}, '"text", "json_object" or "json_schema", but got: 5'),
        ("json_object", "'response_format' must be an object, but is string"),
        ({"type": "json_object", "schema": 123}, '"json_schema": '),
        ({"type": "json_object", "schema": {"type": 123}}, '"json_schema": '),
        ({"type": "json_object", "schema": {"type": "hiccup"}}, '"json_schema": '),
    ],
)
def test_wrong_response_formats_are_refused(parse: Parse, value: Any, text: str) -> None:
    assert text in refused(parse, response_format=value)


@pytest.mark.parametrize("pattern", [r"^ready\!$", r"\d{2,}", "missing anchor$", "^a.c$"])
@pytest.mark.parametrize("settings", [SETTINGS, PLAIN])
def test_pattern_is_enforced(parse: Parse, settings: ChatSettings, pattern: str) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "pattern": pattern}}, "required": ["s"]}
    free = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    assert parse(settings, json_schema=schema).grammar != parse(settings, json_schema=free).grammar


@pytest.mark.parametrize("pattern", ["^(?=x)y$", "^[$", "^(a$"])
def test_pattern_that_cannot_be_enforced_is_refused_by_place(parse: Parse, pattern: str) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "pattern": pattern}}}
    text = refused(parse, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert "#/properties/s" in text
    assert repr(pattern) in text


def test_schema_and_grammar_exclude_each_other(parse: Parse) -> None:
    assert refused(parse, json_schema=PET, grammar='root ::= "x"') == "Cannot use both json_schema and grammar"


def test_own_grammar_goes_to_the_completion(parse: Parse) -> None:
    plan = parse(grammar='root ::= "x"')
    assert plan.data["grammar"] == 'root ::= "x"'
    assert plan.grammar == ""


@pytest.mark.parametrize("settings", [settings_of(force_pure_content=True)])
def test_schema_is_enforced_although_answers_are_not_parsed(parse: Parse, settings: ChatSettings) -> None:
    plan = parse(settings, response_format={"type": "json_schema", "json_schema": {"schema": PET}})
    assert "dog" in plan.data["grammar"]
    assert "json_schema" not in plan.data
    plan = parse(settings, json_schema=PET)
    assert "dog" in plan.data["grammar"]
    assert "json_schema" not in plan.data


def test_demanded_call_goes_before_a_schema(parse: Parse) -> None:
    for settings in (SETTINGS, PLAIN):
        plan = parse(settings, tools=CLOCKS, tool_choice="required", response_format={"type": "json_object"})
        assert "clock_utc" in plan.grammar


# continuing


def test_assistants_last_message_is_continued(parse: Parse) -> None:
    messages = [USER, {"role": "assistant", "content": "It is ha"}]
    assert parse(messages=messages).prompt.endswith("It is ha")
    off = settings_of(prefill_assistant=False)
    assert parse(off, messages=messages).prompt.endswith("It is ha<|end|><|assistant|>")
    plan = parse(off, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert plan.prompt.endswith("It is ha")
    assert [delta.content for delta in plan.answer.finish(b"lf")] == ["lf"]


def test_reasoning_is_continued(parse: Parse) -> None:
    messages = [USER, {"role": "assistant", "content": "", "reasoning_content": "Let me s"}]
    plan = parse(messages=messages, continue_final_message="reasoning_content", add_generation_prompt=False)
    assert plan.prompt.endswith("<think>Let me s")
    plan.answer.finish(b"ee</think>Noon.")
    assert plan.answer.message.reasoning_content == "Let me see"
    assert plan.answer.message.content == "Noon."


def test_what_cannot_be_continued_is_refused(parse: Parse) -> None:
    said = {"role": "assistant", "content": "x"}
    both = refused(parse, messages=[USER, said], continue_final_message=True, add_generation_prompt=True)
    assert both == "Cannot set both add_generation_prompt and continue_final_message to true."
    two = refused(parse, messages=[USER, said, said])
    assert two == "Cannot have 2 or more assistant messages at the end of the list."
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = refused(parse, messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert text == "Cannot continue an assistant message that contains tool calls."
    text = refused(parse, messages=[USER, said], continue_final_message="later")
    assert text == 'Invalid continue_final_message: expected a boolean, "content" or "reasoning_content"'


# reasoning


def test_thinking_follows_server_kwargs_and_effort(parse: Parse) -> None:
    closed = "<think></think>"
    assert closed not in parse().prompt
    assert closed in parse(chat_template_kwargs={"enable_thinking": False}).prompt
    assert closed in parse(reasoning_effort="none").prompt
    off = settings_of(enable_thinking=False)
    assert closed in parse(off).prompt
    assert closed not in parse(off, chat_template_kwargs={"enable_thinking": True}).prompt
    text = refused(parse, chat_template_kwargs={"enable_thinking": "false"})
    assert text == 'invalid type for "enable_thinking" (expected boolean, got string)'


def test_template_variables_come_from_server_and_request(parse: Parse) -> None:
    settings = settings_of(template_kwargs={"greeting": "hello", "reasoning_effort": "low"})
    assert parse(settings).prompt.endswith("[low][hello]")
    assert parse(settings, chat_template_kwargs={"greeting": "bye"}).prompt.endswith("[low][bye]")
    assert parse(settings, reasoning_effort="high").prompt.endswith("[high][hello]")
    assert "[low]" not in parse(settings, reasoning_effort="none").prompt


def test_reasoning_is_split_off_unless_the_request_says_no(parse: Parse) -> None:
    for name, expected in (("auto", "why"), ("deepseek", "why"), ("none", "")):
        plan = parse(reasoning_format=name)
        plan.answer.finish(b"<think>why</think>because")
        assert plan.answer.message.reasoning_content == expected
    assert refused(parse, reasoning_format="loud") == "Unknown reasoning format: loud"


def test_budget_of_reasoning_goes_to_the_sampler(parse: Parse) -> None:
    settings = settings_of(reasoning_budget=7, reasoning_budget_message="enough")
    data = parse(settings).data
    assert data["reasoning_budget_tokens"] == 7
    assert data["reasoning_budget_start_tag"] == "<think>"
    assert data["reasoning_budget_end_tags"] == ["</think>"]
    assert data["reasoning_budget_message"] == "enough"
    assert data["reasoning_control"] is False
    data = parse(settings, thinking_budget_tokens=9, reasoning_budget_message="stop", reasoning_control=True).data
    assert (data["reasoning_budget_tokens"], data["reasoning_budget_message"]) == (9, "stop")
    assert data["reasoning_control"] is True
    assert parse(settings, reasoning_budget_tokens=3, thinking_budget_tokens=9).data["reasoning_budget_tokens"] == 3
    assert "reasoning_budget_start_tag" not in parse(PLAIN).data
    assert "reasoning_budget_tokens" in refused(parse, settings, reasoning_budget_tokens="x")


# probabilities


def test_probabilities(parse: Parse) -> None:
    assert parse(logprobs=True).data["n_probs"] == 20
    assert parse(logprobs=True, top_logprobs=3).data["n_probs"] == 3
    assert not {"n_probs", "logprobs"} & parse(logprobs=False).data.keys()
    assert parse(logprobs=True, tools=CLOCKS).data["n_probs"] == 20
    text = refused(parse, logprobs=True, tools=CLOCKS, stream=True)
    assert text == "logprobs is not supported with tools + stream"
    assert refused(parse, top_logprobs=3) == "top_logprobs requires logprobs to be set to true"
    assert refused(parse, top_logprobs=3, logprobs=False) == "top_logprobs requires logprobs to be set to true"


# what the task gets


def test_task_parameters_take_over_from_the_session(parse: Parse, model: Model) -> None:
    context = api_context(antiprompt=["server stop"])
    plan = parse(tools=CLOCKS)
    params = context.schema.parse(plan.data)
    plan.apply_to(params)
    sampling = params.sampling
    assert sampling.grammar == ("tool_calls", plan.answer.grammar)
    assert sampling.grammar_lazy
    assert sampling.grammar_triggers == plan.answer.grammar_triggers != ()
    assert sampling.generation_prompt == "<|assistant|>"
    assert sampling.preserved_tokens == plan.answer.preserved_tokens
    assert params.antiprompt == ("server stop", *plan.answer.additional_stops)
    assert params.chat_format == "peg-native"
    assert context.schema.defaults.sampling.grammar == ("none", "")


def test_task_has_a_child_for_every_further_answer() -> None:
    context = api_context()
    body = {"messages": [USER], "n": 3, "seed": 7, "id_slot": 1, "tools": CLOCKS}
    plan = parse_chat(body, SETTINGS, context.vocab, context.schema.grammars)
    task = build_chat_task(context, plan, FakeIds())
    assert task.ids() == [10, 11, 12]
    assert bytes(task.tokens[1:]).decode() == plan.prompt
    assert task.id_slot == 1
    assert [child.params.sampling.seed for child in task.child_tasks] == [8, 9]
    for one in (task, *task.child_tasks):
        assert one.params.sampling.grammar == ("tool_calls", plan.grammar)
        assert one.params.chat_format == "peg-native"
        assert one.cmpl_id == task.cmpl_id


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_is_all_that_is_allowed_without_parallel_calls(parse: Parse, choice: str) -> None:
    source = SOURCE.replace("<calls>[", "").replace("]</calls>", "").replace(", {% endif %}\n", "{% endif %}\n")
    source = source.replace('{{- \'{"name"', '{{- \'<call>{"name"').replace("~ '}' }}", "~ '}</call>' }}")
    one, many = (
        parse(settings_of(source), tools=CLOCKS, tool_choice=choice, parallel_tool_calls=is_parallel).grammar
        for is_parallel in (False, True)
    )
    assert re.search(r"^tool-calls ::= \(.*\)\+$", many, re.MULTILINE)
    assert re.search(r"^tool-calls ::= tool-call\?? space$", one, re.MULTILINE)


def test_users_messages_are_found_in_the_tokens(parse: Parse, model: Model) -> None:
    plan = parse(messages=[USER, {"role": "assistant", "content": "Noon."}, USER])
    tokens = model.vocab.tokenize(plan.prompt, True, True)
    starts = plan.user_starts(tokens)
    mark = tuple(model.vocab.tokenize("<|user|>", False, True))
    assert len(starts) == 2
    assert all(tuple(tokens[start : start + len(mark)]) == mark for start in starts)


def test_settings_come_from_the_command_line(tiny_models: dict[str, Path]) -> None:
    flags = ["-m", str(tiny_models["tiny-bpe"]), "-c", "64", "-np", "1", "--no-warmup", "-lv", "0"]
    flags += ["--chat-template", SOURCE, "--no-prefill-assistant", "--reasoning", "off", "--reasoning-budget", "5"]
    flags += ["--reasoning-budget-message", "enough", "--reasoning-format", "none", "--skip-chat-parsing"]
    flags += ["--chat-template-kwargs", '{"greeting": "hi"}']
    with Params.parse(["llamasrv", *flags]) as params, Model.load(params) as model:
        settings = ChatSettings.from_params(params.to_dict(), ChatTemplates.from_params(model, params))
    assert settings.templates.supports_thinking
    assert not settings.enable_thinking
    assert not settings.prefill_assistant
    assert settings.reasoning_budget == 5
    assert settings.reasoning_budget_message == "enough"
    assert settings.reasoning_format == "none"
    assert settings.force_pure_content
    assert settings.template_kwargs["greeting"] == "hi"
    defaults = {"prefill_assistant": True, "default_template_kwargs": {}, "enable_reasoning": -1}
    defaults["force_pure_content_parser"] = False
    assert ChatSettings.from_params(server_params(**defaults), settings.templates).enable_thinking


# against the genuine server

HISTORY = [
    {"role": "system", "content": "Be brief."},
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call12345", "type": "function", "function": {"name": "clock_utc", "arguments": '{"zone": "Z"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call12345", "name": "clock_utc", "content": '{"time": "noon"}'},
    {"role": "assistant", "content": "Noon.", "reasoning_content": "The clock says so."},
    {"role": "user", "content": [{"type": "text", "text": "Thanks."}, {"type": "text", "text": "Sure?"}]},
]
BODIES: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": [USER], "tools": CLOCKS},
    {"messages": [USER], "tools": CLOCKS, "tool_choice": "none"},
    {"messages": HISTORY, "tools": CLOCKS, "parallel_tool_calls": True},
    {"messages": HISTORY},
    {"messages": [USER, {"role": "assistant", "content": "It is ha"}]},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER], "reasoning_effort": "low"},
    {"messages": [USER], "response_format": {"type": "json_object"}},
    {"messages": [USER, USER]},
    {"messages": [{"role": "assistant", "content": "Hi."}, USER]},
    {"messages": [USER], "tools": CLOCKS, "tool_choice": "required"},
    {"messages": [{"role": "developer", "content": "Be kind."}, USER], "reasoning_format": "none"},
    {"messages": []},
]


@pytest.mark.reference
@pytest.mark.parametrize("name", chat_templates.names() or [None])
def test_prompts_equal_those_of_the_genuine_server(
    name: str | None, reference_server: tuple[str, ...], tiny_models: dict[str, Path], model: Model
) -> None:
    if name is None:
        unavailable(f"the source of llama.cpp is not at hand: {chat_templates.FOLDER}")
    file = chat_templates.FOLDER / f"{name}.jinja"
    flags = ["-m", str(tiny_models["tiny-bpe"]), "-c", "64", "-np", "1", "--no-warmup", "--chat-template-file", file]
    with Params.parse(["llamasrv", *map(str, flags)]) as params, Model.load(params) as own:
        settings = ChatSettings.from_params(params.to_dict(), ChatTemplates.from_params(own, params))
    grammars = GrammarUse(binding, model.vocab)
    with ServerProcess(*flags, command=reference_server) as server:
        for body in BODIES:
            theirs = server.post("/apply-template", body)
            try:
                plan = parse_chat(body, settings, model.vocab, grammars)
            except ApiError:
                assert theirs.status != 200, f"refused: {body}"
                continue
            assert theirs.status == 200, f"not refused: {body}\n{theirs.text}"
            if plan.prompted is plan.answer:  # else the tools are explained to a template that knows none
                assert plan.prompt == theirs.json()["prompt"], body
