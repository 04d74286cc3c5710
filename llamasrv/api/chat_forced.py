"""Tool calls from templates that know no tools, when a request demands a call.

The tools are explained in the system message, and the answer has the format of a small template of our own: a grammar
that leaves no other way, and the parser to go with it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from llamasrv.api.jsonio import dumps
from llamasrv.binding import ChatRequest, ChatSession, ChatTemplates, Vocab

#: A template from which libllama reads how calls are written: ``<tool_calls>[{"name": ..., "arguments": ...}]``.
_SOURCE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}
    {%- if message.role != 'assistant' %}<|{{ message.role }}|>{{ message.content }}<|end|>
    {%- elif not message.tool_calls %}{{ message.content }}<|end|>
    {%- else %}<tool_calls>[
        {%- for call in message.tool_calls %}
            {%- if not loop.first %}, {% endif %}
            {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}' }}
        {%- endfor %}]</tool_calls><|end|>
    {%- endif %}
{%- endfor %}"""

_INSTRUCTIONS = """You can call these functions:
{tools}

Answer with a function call and nothing else, in this form:
<tool_calls>[{{"name": "the function's name", "arguments": {{the arguments as JSON}}}}]</tool_calls>"""


def calling_session(tools: Sequence[Any], parallel: bool, vocab: Vocab | None) -> ChatSession:
    """A session that reads calls; its grammar begins with the first one. Raises NativeError or ValueError."""
    messages = [{"role": "user", "content": ""}]
    return _templates().apply(ChatRequest(messages, tools=tools, parallel_tool_calls=parallel), vocab)


def with_instructions(messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages with the tools explained in the system message."""
    listing = "\n".join(dumps(tool["function"]).decode() for tool in tools)
    text = _INSTRUCTIONS.format(tools=listing)
    if not messages or messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    first = messages[0]
    content = first["content"]
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": text}]
    else:
        content = f"{content}\n\n{text}" if content else text
    return [{**first, "content": content}, *messages[1:]]


@functools.cache
def _templates() -> ChatTemplates:
    return ChatTemplates(_SOURCE)
