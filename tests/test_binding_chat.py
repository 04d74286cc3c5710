"""Chat templates and sessions over every template of the pinned source."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from conftest import unavailable

from llamasrv.binding import (
    Batch,
    ChatDelta,
    ChatFormatError,
    ChatMessage,
    ChatRequest,
    ChatSession,
    ChatTemplates,
    ClosedError,
    Model,
    NativeError,
    Params,
    Role,
    Sampler,
    ToolCall,
    backend_init,
    check_grammar,
    sample_many,
)
from llamasrv.binding.chat import MAX_DEPTH
from llamasrv.binding.template_guard import MAX_BLOCKS, MAX_BRACKETS, MAX_CHAIN, check_template

ALL = chat_templates.names()

USER = {"role": "user", "content": "Ping it twice."}
PING = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Sends packets",
        "parameters": {
            "type": "object",
            "properties": {"host": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["host", "count"],
        },
    },
}
ARGUMENTS = {"host": "a.example", "count": 3}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "ping", "arguments": json.dumps(ARGUMENTS)}}
    ],
}

#: Templates in which no tool call is ever written, whatever is in the history.
WRITES_NO_CALLS = {"LFM2-8B-A1B", "LFM2.5-Instruct"}
#: What these write for a call is not what libllama's parser for them expects.
NOT_READ_BACK = {"Mistral-Small-3.2-24B-Instruct-2506", "upstage-Solar-Open-100B"}
#: Templates whose calls cannot be constrained: they know no tools.
NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "google-translategemma-4b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
#: Answers "Answer." after the reasoning "Because.", for templates that need more than their tags around it.
REASONED = {
    "Cohere2MoE": "Because.<|END_THINKING|><|START_TEXT|>Answer.<|END_TEXT|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        "<|START_THINKING|>Because.<|END_THINKING|><|START_RESPONSE|>Answer.<|END_RESPONSE|>"
    ),
    "llm-jp-llm-jp-4.1-8b-thinking": (
        "<|channel|>analysis<|message|>Because.<|end|><|start|>assistant<|channel|>final<|message|>Answer."
    ),
    "muse-glimmer": " to=self<|message|>Because.<|eom|><|start|>assistant to=user<|message|>Answer.<|eom|>",
    "openai-gpt-oss-120b": (
        "<|channel|>analysis<|message|>Because.<|end|><|start|>assistant<|channel|>final<|message|>Answer."
    ),
}
#: Templates whose models do not reason unless the request says so.
REASONS_ON_DEMAND = {"LFM2-8B-A1B", "LFM2.5-Instruct", "tencent-Hy3"}


@functools.cache
def templates(name: str) -> ChatTemplates:
    return ChatTemplates(chat_templates.source(name), bos="<s>", eos="</s>")


def each_template(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every template; without the source it is skipped once."""
    return pytest.mark.parametrize("name", ALL or [None])(test)


@pytest.fixture(autouse=True)
def needs_source(request: pytest.FixtureRequest) -> None:
    if "name" in request.fixturenames and request.getfixturevalue("name") is None:
        unavailable(f"the source of llama.cpp is not at hand: {chat_templates.FOLDER}")


@pytest.fixture(scope="module")
def params(tiny_models: dict[str, Path]) -> Iterator[Params]:
    flags = ["-m", str(tiny_models["tiny-bpe"]), "-c", "4096", "-np", "1", "--no-warmup", "-lv", "0"]
    with Params.parse(["llamasrv", *flags]) as params:
        backend_init(params)
        yield params


@pytest.fixture(scope="module")
def model(params: Params) -> Iterator[Model]:
    with Model.load(params) as model:
        yield model


def add_up(deltas: Sequence[ChatDelta]) -> ChatMessage:
    """The message that a client builds from what it is sent."""
    content = reasoning = ""
    calls: list[dict[str, str]] = []
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning_content
        if delta.index >= 0:
            if delta.index == len(calls):
                calls.append({"id": "", "name": "", "arguments": ""})
            call = calls[delta.index]
            call["id"] = delta.id or call["id"]
            call["name"] = delta.name or call["name"]
            call["arguments"] += delta.arguments
    return ChatMessage(content, reasoning, tuple(ToolCall(**call) for call in calls))


def thinks_first(session: ChatSession) -> bool:
    """Whether the prompt ends within reasoning."""
    if not session.thinking_start_tag or not session.thinking_end_tags:
        return False
    prompt = session.generation_prompt
    return prompt.rfind(session.thinking_start_tag) > prompt.rfind(session.thinking_end_tags[0])


# every template


@each_template
def test_messages_are_rendered(name: str) -> None:
    session = templates(name).apply(ChatRequest([USER]))
    assert "Ping it twice." in session.prompt
    assert session.prompt.endswith(session.generation_prompt)
    assert session.grammar == ""


@each_template
def test_system_message_is_rendered(name: str) -> None:
    session = templates(name).apply(ChatRequest([{"role": "system", "content": "Be brief."}, USER]))
    if name != "google-translategemma-4b-it":  # its prompt is fixed but for the text to translate
        assert "Be brief." in session.prompt


@each_template
def test_tools_are_rendered(name: str) -> None:
    session = templates(name).apply(ChatRequest([USER], tools=[PING]))
    if templates(name).caps["supports_tools"]:
        assert "ping" in session.prompt
        assert "Sends packets" in session.prompt


@each_template
def test_what_the_template_writes_for_a_call_is_read_back_in_deltas_that_add_up(name: str) -> None:
    session = templates(name).apply(ChatRequest([USER], tools=[PING], reasoning_format="auto"))
    if not session.grammar_triggers:
        assert not templates(name).caps["supports_tool_calls"] or name.startswith("meta-llama")
        return
    if name in WRITES_NO_CALLS | NOT_READ_BACK:
        return
    text = _text_of_call(templates(name), session)
    if thinks_first(session):
        text = "Because." + session.thinking_end_tags[0] + text
    deltas: list[ChatDelta] = []
    for char in text:
        try:
            deltas += session.feed(char.encode())
        except ChatFormatError:  # the call is followed by what would end the generation
            break
    assert add_up(deltas) == session.message
    (call,) = session.message.tool_calls
    assert call.name == "ping"
    assert json.loads(call.arguments) == ARGUMENTS
    assert call.id
    assert not thinks_first(session) or "Because." in session.message.reasoning_content


def _text_of_call(chat: ChatTemplates, session: ChatSession) -> str:
    """What the template writes for the tool call of CALLING."""
    closed = functools.partial(ChatRequest, tools=[PING], add_generation_prompt=False, reasoning_format="auto")
    before, after = (chat.apply(closed(messages)).prompt for messages in ([USER], [USER, CALLING]))
    start = next(i for i, (a, b) in enumerate(zip(before + "\0", after, strict=False)) if a != b)
    marked = after.find(session.grammar_triggers[0].value.strip(), max(0, start - 20))
    return after[marked:] if marked >= 0 else after[start:].removeprefix(session.generation_prompt)


@each_template
def test_reasoning_is_split_off(name: str) -> None:
    if not templates(name).supports_thinking or name in REASONS_ON_DEMAND:
        return
    session = templates(name).apply(ChatRequest([USER], reasoning_format="auto"))
    text = REASONED.get(name)
    if text is None:
        start = "" if thinks_first(session) else session.thinking_start_tag
        text = start + "Because." + session.thinking_end_tags[0] + "Answer."
    deltas = [delta for char in text for delta in session.feed(char.encode())]
    deltas += session.finish()
    assert add_up(deltas) == session.message
    assert "Because." in session.message.reasoning_content
    assert session.message.content.strip() == "Answer."


@each_template
def test_json_schema_becomes_a_grammar_that_parses(name: str, model: Model) -> None:
    schema = {"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}}, "required": ["pet"]}
    session = templates(name).apply(ChatRequest([USER], json_schema=schema, reasoning_format="auto"), model.vocab)
    if session.grammar:
        check_grammar(model.vocab, session.grammar)
        assert not session.grammar_lazy
        assert "dog" in session.grammar


@each_template
def test_demanded_call_is_forced_by_the_grammar(name: str, model: Model, params: Params) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "ping",
            "parameters": {
                "type": "object",
                "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 3}},
                "required": ["count"],
            },
        },
    }
    request = ChatRequest([USER], tools=[tool], tool_choice="required", reasoning_format="auto", enable_thinking=False)
    session = templates(name).apply(request, model.vocab)
    assert bool(session.grammar) is (name not in NO_TOOLS)
    assert bool(session.grammar_of_calls) is bool(session.grammar)
    if not session.grammar:
        return
    assert not session.grammar_lazy
    check_grammar(model.vocab, session.grammar)
    for seed in range(1, 9):
        answer = session.clone()
        answer.feed(generate(model, params, session, seed))
        if answer.message.reasoning_content:
            return  # the model, which is random, may think for ever
        assert answer.message.content.strip() == ""
        if answer.message.tool_calls:
            assert answer.message.tool_calls[0].name == "ping"
            return
        # the grammars of a few templates allow spaces that their parsers do not
    assert name == "muse-glimmer", "no call"  # which may call anybody by any name


def test_space_of_the_tokenizer_after_a_control_token_does_not_break_the_grammar(tiny_models: dict[str, Path]) -> None:
    flags = ["-m", str(tiny_models["tiny-llama"]), "-c", "512", "-np", "1", "--no-warmup", "-lv", "0"]
    with Params.parse(["llamasrv", *flags]) as params, Model.load(params) as model:
        chat = ChatTemplates("chatml")
        session = chat.apply(ChatRequest([USER], json_schema={"const": 7}), model.vocab)
        prefix = model.vocab.tokenize(session.generation_prompt, False, True)
        assert model.vocab.detokenize(prefix) != session.generation_prompt.encode()
        session.finish(generate(model, params, session, 1))
        assert session.message.content == "7"


def generate(model: Model, params: Params, session: ChatSession, seed: int, n_max: int = 300) -> bytes:
    """What a random model says under the grammar of the session."""
    settings = {
        "grammar": {"type": "tool_calls", "value": session.grammar_of_calls or session.grammar},
        "generation_prompt": session.generation_prompt,
        "seed": seed,
        "temp": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    model.context.memory.clear()
    tokens = model.vocab.tokenize(session.prompt, True, True)[-32:]
    batch = Batch(len(tokens))
    batch.extend(tokens, 0, 0, False)
    batch.set_output(len(tokens) - 1, True)
    n, index, text = len(tokens), len(tokens) - 1, b""
    with Sampler(model, params, settings) as sampler:
        for pos in range(n, n + n_max):
            assert model.context.decode(batch, 0, n, sync=True, serial=1) == 0
            (token,) = sample_many(model, [sampler], [index])
            if isinstance(token, NativeError):
                raise token
            if model.vocab.is_eog(token):
                break
            text += model.vocab.piece(token)
            batch = Batch(1)
            batch.add(token, pos, 0, True)
            n, index = 1, 0
    return text


@each_template
def test_messages_are_found_within_the_tokens_of_the_prompt(name: str, model: Model) -> None:
    request = ChatRequest([USER, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}])
    session = templates(name).apply(request, model.vocab)
    tokens = model.vocab.tokenize(session.prompt, True, True)
    spans = session.message_spans(tokens)
    assert [span.pos for span in spans] == sorted(span.pos for span in spans)
    for span, after in itertools.pairwise(spans):
        assert span.pos + span.len == after.pos
    for span in spans:
        delimiters = [item for item in session.message_delimiters if item.role == span.role.name.lower()]
        assert any(tuple(tokens[span.pos : span.pos + len(item.tokens)]) == item.tokens for item in delimiters)


@each_template
def test_deepest_allowed_nesting_is_survived(name: str) -> None:
    schema: Any = {"type": "string"}
    value: Any = 1
    for _ in range((MAX_DEPTH - 14) // 2):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        value = [[value]]
    tool = {"type": "function", "function": {"name": "ping", "parameters": schema}}
    deep_call = {"id": "call12345", "type": "function", "function": {"name": "ping", "arguments": json.dumps(value)}}
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [deep_call]}]
    history += [{"role": "tool", "tool_call_id": "call12345", "name": "ping", "content": json.dumps(value)}]
    for request in (
        ChatRequest([USER], tools=[tool]),
        ChatRequest([USER], json_schema=schema),
        ChatRequest(history, tools=[PING]),
    ):
        # a template may not like the values, but it must come back
        with contextlib.suppress(NativeError):
            templates(name).apply(request)


# templates


def test_default_template_is_chatml() -> None:
    chat = ChatTemplates("chatml")
    assert chat.apply(ChatRequest([USER])).prompt == (
        "<|im_start|>user\nPing it twice.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not chat.supports_thinking
    assert chat.source_tool_use == ""
    assert chat.example.startswith("<|im_start|>system\n")


def test_templates_come_from_the_model_and_outlive_it(params: Params) -> None:
    with Model.load(params) as own:
        chat = ChatTemplates.from_params(own, params)
        session = chat.apply(ChatRequest([USER]), own.vocab)
        vocab = own.vocab
        expected = own.info()
    assert chat.source == expected["chat_template"]
    assert chat.caps == expected["chat_template_caps"]
    assert "Ping it twice." in chat.apply(ChatRequest([USER])).prompt
    assert session.finish(b"Hello") == [ChatDelta(content="Hello")]
    with pytest.raises(ClosedError):
        chat.apply(ChatRequest([USER]), vocab)


def test_template_and_arguments_of_the_command_line_are_used(tiny_models: dict[str, Path]) -> None:
    source = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    flags = ["-m", str(tiny_models["tiny-bpe"]), "-c", "64", "-np", "1", "--no-warmup", "-lv", "0"]
    flags += ["--jinja", "--chat-template", source, "--chat-template-kwargs", '{"shout": true}']
    with Params.parse(["llamasrv", *flags]) as params, Model.load(params) as model:
        chat = ChatTemplates.from_params(model, params)
        assert chat.source == source
        assert chat.was_explicit
        assert chat.example.endswith("!")


def test_beginning_and_end_tokens_come_from_the_model(model: Model) -> None:
    chat = ChatTemplates("{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}", model=model)
    vocab = model.vocab
    expected = f"|Ping it twice.|{vocab.piece(vocab.eos).decode()}"
    prompt = chat.apply(ChatRequest([USER])).prompt
    assert prompt.endswith(expected)
    given = ChatTemplates("{{ bos_token }}|{{ eos_token }}", bos="<a>", eos="<b>")
    assert given.apply(ChatRequest([USER])).prompt == "<a>|<b>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if %}", "Unexpected token"),
        ("{{ messages[ }}", "Unexpected token"),
        ("{% nonsense %}", "Unknown statement"),
        ("{{ nothing() }}", "line 1, column 11"),
        ("{% for m in messages %}{{ raise_exception('not like this') }}{% endfor %}", "not like this"),
        ("{{ 'a' | nosuchfilter }}", "nosuchfilter"),
    ],
)
def test_template_that_does_not_work_is_refused_with_the_engines_text(source: str, text: str) -> None:
    with pytest.raises(NativeError, match=text):
        ChatTemplates(source)


def test_neither_model_nor_template_is_an_error() -> None:
    with pytest.raises(NativeError, match="neither a model nor a chat template"):
        ChatTemplates()


def test_without_jinja_only_known_templates_work() -> None:
    chat = ChatTemplates("chatml", use_jinja=False)
    assert chat.apply(ChatRequest([USER])).prompt.endswith("<|im_start|>assistant\n")
    with pytest.raises(NativeError, match="this custom template is not supported, try using --jinja"):
        ChatTemplates("{{ messages }}", use_jinja=False)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "{{ " + "[" * 100_000 + " }}",
        "{{ " + "{'a':" * 100_000 + "1" + "}" * 100_000 + " }}",
        "{% if true %}" * 100_000 + "{% endif %}" * 100_000,
        "{%- for x in y -%}" * 100_000,
        "{% if true %}" + "{% elif true %}" * 100_000 + "{% endif %}",
        "{{ " + "not " * 100_000 + "1 }}",
        "{{ 'a'" + "~'a'" * 100_000 + " }}",
        "{{ a" + ".a" * 100_000 + " }}",
        "{{ 'a'" + "|trim" * 100_000 + " }}",
        "{{ f(" + "(1+" * 150 + "1+" * 100_000 + " }}",
    ],
)
def test_deep_template_is_refused_before_the_engine_sees_it(source: str) -> None:
    with pytest.raises(ValueError, match="limit"):
        ChatTemplates(source)


@each_template
def test_no_template_comes_near_the_limits(name: str) -> None:
    source = chat_templates.source(name)
    check_template(source)
    check_template("{% if true %}" * (MAX_BLOCKS // 2) + source + "{% endif %}" * (MAX_BLOCKS // 2))


def test_limits_count_what_is_nested_and_nothing_else() -> None:
    check_template("{{ '" + "(" * 5000 + "' }}" + "(" * 5000 + "{# " + "(" * 5000 + " #}")
    check_template("{{ [" + "1," * 5000 + "1] }}" + "{% if a %}{% endif %}" * 5000)
    check_template("{{ {'a': {'b': 1}} }}" * 1000)
    check_template("{{ " + "[" * (MAX_BRACKETS - 1) + "]" * (MAX_BRACKETS - 1) + " }}")
    check_template("{{ 1" + "+1" * (MAX_CHAIN // 2 - 1) + " }}")
    with pytest.raises(ValueError, match="blocks"):
        check_template("{% if a %}" * (MAX_BLOCKS + 1))


# requests


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"content": "x"}], "Failed to parse messages: Missing 'role' in message"),
        ([{"role": "user"}], "Expected 'content' or 'tool_calls'"),
        (["x"], "Expected 'message' to be an object"),
        ([{"role": "user", "content": 5}], "Invalid 'content' type"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "Unsupported content part type"),
        ([{"role": "assistant", "tool_calls": [{"type": "function"}]}], "Missing tool call function"),
    ],
)
def test_malformed_messages_are_refused(messages: list[Any], text: str) -> None:
    with pytest.raises(NativeError, match=text):
        ChatTemplates("chatml").apply(ChatRequest(messages))


def test_malformed_tools_and_choices_are_refused() -> None:
    chat = ChatTemplates("chatml")
    with pytest.raises(NativeError, match="Failed to parse tools: Missing tool function"):
        chat.apply(ChatRequest([USER], tools=[{"type": "function"}]))
    with pytest.raises(NativeError, match="Invalid tool_choice: perhaps"):
        chat.apply(ChatRequest([USER], tool_choice="perhaps"))
    with pytest.raises(NativeError, match="Unknown reasoning format: loud"):
        chat.apply(ChatRequest([USER], reasoning_format="loud"))
    with pytest.raises(NativeError, match="Invalid continue_final_message"):
        chat.apply(ChatRequest([USER], continue_final_message="x"))


def test_deep_request_is_refused() -> None:
    chat = ChatTemplates("chatml")
    deep: Any = 1
    for _ in range(MAX_DEPTH + 20):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        chat.apply(ChatRequest([USER], template_kwargs={"x": deep}))
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        chat.apply(ChatRequest([USER], template_kwargs={"x": deep}))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_json_within_messages_is_refused(opening: str) -> None:
    text = opening * 100_000
    chat = ChatTemplates("chatml")
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    with pytest.raises(ValueError, match=r"messages\[1\]: arguments is nested too deeply"):
        chat.apply(ChatRequest([USER, {"role": "assistant", "tool_calls": [call]}]))
    for content in (text, [{"type": "text", "text": text[:1000]}, {"type": "text", "text": text}]):
        with pytest.raises(ValueError, match=r"messages\[0\]: content is nested too deeply"):
            chat.apply(ChatRequest([{"role": "tool", "content": content}]))


def test_text_with_many_brackets_is_no_nesting() -> None:
    chat = ChatTemplates("chatml")
    text = "{[" * 5000
    assert text in chat.apply(ChatRequest([{"role": "user", "content": text}])).prompt
    assert text in chat.apply(ChatRequest([{"role": "tool", "content": "see " + text}])).prompt
    arguments = json.dumps({"code": text})
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    chat.apply(ChatRequest([{"role": "assistant", "content": None, "tool_calls": [call]}]))


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        ChatTemplates("chatml").apply(ChatRequest([{"role": "user", "content": "\ud800"}]))


def test_nul_and_all_planes_pass_through() -> None:
    text = "a\0b é 漢 😀"
    assert text in ChatTemplates("chatml").apply(ChatRequest([{"role": "user", "content": text}])).prompt


def test_final_message_is_continued() -> None:
    history = [USER, {"role": "assistant", "content": "One, t"}]
    chat = ChatTemplates("chatml")
    go_on = ChatRequest(history, continue_final_message=True, add_generation_prompt=False)
    session = chat.apply(go_on)
    assert session.prompt.endswith("<|im_start|>assistant\nOne, t")
    assert session.finish(b"wo") == [ChatDelta(content="wo")]
    assert session.message.content == "One, two"
    go_on.echo = True
    assert chat.apply(go_on).finish(b"wo") == [ChatDelta(content="One, two")]


def test_pure_content_is_not_parsed() -> None:
    chat = ChatTemplates("chatml")
    session = chat.apply(ChatRequest([USER], force_pure_content=True, reasoning_format="auto"))
    session.finish(b"<think>x</think>y")
    assert session.message == ChatMessage("<think>x</think>y")


def test_demanding_calls_of_a_template_that_knows_none_gives_no_grammar() -> None:
    session = ChatTemplates("chatml").apply(ChatRequest([USER], tools=[PING], tool_choice="required"))
    assert session.grammar == ""
    assert session.grammar_of_calls == ""
    assert "ping" not in session.prompt


# sessions


@pytest.fixture
def calling() -> ChatSession:
    """A session with tools in the style <tool_call>{...}</tool_call>."""
    if not ALL:
        unavailable(f"the source of llama.cpp is not at hand: {chat_templates.FOLDER}")
    request = ChatRequest([USER], tools=[PING], parallel_tool_calls=True)
    return templates("Qwen-Qwen2.5-7B-Instruct").apply(request)


CALL = b'<tool_call>\n{"name": "ping", "arguments": {"host": "b", "count": 1}}\n</tool_call>'


def test_content_streams_as_it_comes() -> None:
    session = ChatTemplates("chatml").apply(ChatRequest([USER]))
    assert session.feed(b"Hel") == [ChatDelta(content="Hel")]
    assert session.feed(b"") == []
    assert session.feed(b"lo") == [ChatDelta(content="lo")]
    assert session.finish() == []
    assert session.message == ChatMessage("Hello")


def test_finished_session_takes_no_more() -> None:
    session = ChatTemplates("chatml").apply(ChatRequest([USER]))
    session.finish(b"x")
    for end in (session.feed, session.finish):
        with pytest.raises(ChatFormatError, match="finished"):
            end(b"y")


def test_characters_and_broken_bytes_across_pieces() -> None:
    session = ChatTemplates("chatml").apply(ChatRequest([USER]))
    deltas = [delta for byte in "né".encode() for delta in session.feed(bytes([byte]))]
    deltas += session.feed(b"\xff")
    deltas += session.finish(b"\xf0\x9f")
    assert add_up(deltas).content == "né\ufffd\ufffd" == session.message.content


def test_broken_bytes_within_a_call_are_replaced(calling: ChatSession) -> None:
    calling.finish(CALL.replace(b'"b"', b'"\xff"'))
    assert json.loads(calling.message.tool_calls[0].arguments)["host"] == "\ufffd"


def test_calls_get_ids_of_their_own(calling: ChatSession) -> None:
    twin = calling.clone()
    for session in (calling, twin):
        session.finish(CALL + b"\n" + CALL)
    ids = [call.id for session in (calling, twin) for call in session.message.tool_calls]
    assert len(ids) == len(set(ids)) == 4
    assert all(len(id) == 32 and id.isalnum() for id in ids)


def test_clone_goes_its_own_way(calling: ChatSession) -> None:
    calling.feed("é".encode()[:1])
    twin = calling.clone()
    assert calling.finish("é".encode()[1:]) == [ChatDelta(content="é")]
    assert twin.finish("è".encode()[1:]) == [ChatDelta(content="è")]
    assert (twin.prompt, twin.grammar, twin.format) == (calling.prompt, calling.grammar, calling.format)


def test_text_against_the_format_is_an_error(calling: ChatSession) -> None:
    with pytest.raises(ChatFormatError, match="does not match the expected peg-native format"):
        calling.finish(b'<tool_call>\n{"name": "pong"}')


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_endless_nesting_in_a_call_is_an_error(calling: ChatSession, opening: str) -> None:
    calling.feed(b'<tool_call>\n{"name": "ping", "arguments": {"host": ')
    with pytest.raises(ChatFormatError, match="nested too deeply"):
        for _ in range(1000):
            calling.feed(opening.encode() * 100)


def test_endless_nesting_to_go_on_with_is_refused() -> None:
    history = [USER, {"role": "assistant", "content": "[" * 100_000}]
    go_on = ChatRequest(history, tools=[PING], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(NativeError, match="nested too deeply"):
        ChatTemplates("chatml").apply(go_on)


def test_brackets_in_prose_are_no_nesting() -> None:
    session = ChatTemplates("chatml").apply(ChatRequest([USER]))
    session.finish(b"[" * 100_000)
    assert len(session.message.content) == 100_000


def test_tokens_of_triggers_and_delimiters_need_a_vocabulary(model: Model) -> None:
    if not ALL:
        unavailable(f"the source of llama.cpp is not at hand: {chat_templates.FOLDER}")
    chat = templates("Qwen-Qwen2.5-7B-Instruct")
    request = ChatRequest([USER], tools=[PING])
    bare, session = chat.apply(request), chat.apply(request, model.vocab)
    assert all(item.tokens == () for item in bare.message_delimiters)
    assert bare.message_spans([1, 2, 3]) == []
    for item in session.message_delimiters:
        assert item.tokens == tuple(model.vocab.tokenize(item.text, False, True))
    spans = session.message_spans(model.vocab.tokenize(session.prompt, True, True))
    assert [span.role for span in spans] == [Role.USER, Role.ASSISTANT]


def test_templates_serve_many_threads() -> None:
    chat = ChatTemplates("chatml")

    def run(number: int) -> str:
        content = f"number {number}"
        session = chat.apply(ChatRequest([{"role": "user", "content": content}], tools=[PING]))
        session.finish(content.encode())
        assert content in session.prompt
        return session.message.content

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(200))) == [f"number {number}" for number in range(200)]


def test_closed_objects_say_so() -> None:
    with ChatTemplates("chatml") as chat:
        session = chat.apply(ChatRequest([USER]))
    with pytest.raises(ClosedError):
        chat.apply(ChatRequest([USER]))
    with session:
        session.feed(b"x")
    with pytest.raises(ClosedError):
        session.feed(b"y")
