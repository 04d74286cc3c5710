"""Answers to chat requests as they grow: deltas, the whole message, several choices."""

from __future__ import annotations

import pytest

from llamasrv.api.chat_state import ChatState, ChatStates
from llamasrv.binding import ChatDelta, ChatFormatError, ChatRequest, ChatSession, ChatTemplates
from llamasrv.engine.result import FinalResult, PartialResult

TOOL = {
    "type": "function",
    "function": {
        "name": "ping",
        "parameters": {"type": "object", "properties": {"host": {"type": "string"}}, "required": ["host"]},
    },
}
#: A template whose calls are JSON within a tag.
SOURCE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% for t in tools %}{{ t | tojson }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def session(source: str = "chatml", **request: object) -> ChatSession:
    templates = ChatTemplates(source)
    return templates.apply(ChatRequest([{"role": "user", "content": "hi"}], **request))  # type: ignore[arg-type]


def part(text: str, index: int = 0) -> PartialResult:
    return PartialResult(id=1, index=index, content=text.encode())


def end(text: str = "", index: int = 0) -> FinalResult:
    return FinalResult(id=1, index=index, content=text.encode())


def test_pieces_become_deltas_and_the_message() -> None:
    state = ChatState(session())
    assert state.update(PartialResult(id=1, is_begin=True)) == []
    assert state.update(part("Hel")) == [ChatDelta(content="Hel")]
    assert state.update(part("lo")) == [ChatDelta(content="lo")]
    assert state.message.content == "Hello"
    assert not state.is_finished
    assert state.finish(end()) == []
    assert state.message.content == "Hello"
    assert state.is_finished


def test_an_answer_in_one_piece() -> None:
    state = ChatState(session())
    state.finish(end("Hello"))
    assert state.message.content == "Hello"


def test_an_empty_answer_is_an_empty_content() -> None:
    state = ChatState(session())
    assert state.finish(end()) == []
    assert state.message.content == ""


def test_choices_do_not_mix_and_the_session_is_left_alone() -> None:
    origin = session()
    states = ChatStates(origin)
    assert states[1].update(part("one", 1)) == [ChatDelta(content="one")]
    assert states[0].update(part("zero")) == [ChatDelta(content="zero")]
    assert states[1] is states[1]
    assert [state.message.content for state in states] == ["zero", "one"]
    assert origin.message.content == ""


def test_tool_calls_keep_their_ids() -> None:
    states = ChatStates(session(SOURCE, tools=[TOOL]))
    text = '<tool_call>\n{"name": "ping", "arguments": {"host": "local"}}\n</tool_call>'
    deltas = [delta for char in text for delta in states[0].update(part(char))]
    deltas += states[0].finish(end())
    ids = [delta.id for delta in deltas if delta.id]
    [call] = states[0].message.tool_calls
    assert ids == [call.id]
    assert [delta.name for delta in deltas if delta.name] == ["ping"]
    assert "".join(delta.arguments for delta in deltas) == call.arguments == '{"host": "local"}'


def test_a_text_outside_the_format_is_an_error() -> None:
    state = ChatState(session(SOURCE, tools=[TOOL], tool_choice="required"))
    with pytest.raises(ChatFormatError, match="does not match the expected peg-native format"):
        state.finish(end("<tool_call>\nno JSON\n</tool_call>"))
