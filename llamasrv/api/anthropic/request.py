"""From a request of the Messages API to one of the chat API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamasrv.api.chat_messages import quote
from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.fields import INT32_MAX
from llamasrv.api.jsonio import dumps, type_name
from llamasrv.api.openapi_schema import (
    BOOLEAN,
    NUMBER,
    OBJECT,
    STRING,
    STRINGS,
    Member,
    array,
    checked,
    either,
    enum,
    integer,
    nullable,
    object_of,
)

#: Length of an answer where the request names none, in tokens.
_MAX_TOKENS = 4096
#: Tokens for reasoning where it is asked for without a number.
_THINKING_BUDGET = 10_000
#: Members that mean the same in both APIs.
_SAME = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
#: A stamp in the system prompt of one client that differs in every request: no prefix would ever be found again.
_STAMP = re.compile(r"(x-anthropic-billing-header:.*?cch=).{5}(?=;)", re.DOTALL)


_TEXT_BLOCK = object_of({"type": enum("text"), "text": STRING}, ["type", "text"])
_THINKING = object_of({"type": enum("thinking"), "thinking": STRING}, ["type", "thinking"])
_TOOL_USE = object_of({"type": enum("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}, ["type", "id", "name"])
_TOOL_RESULT = object_of(
    {"type": enum("tool_result"), "tool_use_id": STRING, "content": nullable(either(STRING, array(_TEXT_BLOCK)))},
    ["type", "tool_use_id"],
)
_SOURCED = checked(object_of({"type": enum("image", "document"), "source": OBJECT}, ["type", "source"]))
_MESSAGE = object_of(
    {
        "role": checked(enum("user", "assistant")),
        "content": either(STRING, array(either(_TEXT_BLOCK, _THINKING, _TOOL_USE, _TOOL_RESULT, _SOURCED))),
    },
    ["role", "content"],
)
_TOOL = object_of(
    {
        "name": {"type": "string", "minLength": 1},
        "description": nullable(STRING),
        "input_schema": checked(nullable(OBJECT)),
    },
    ["name"],
)
_CHOICE = checked(
    object_of(
        {"type": enum("auto", "any", "tool", "none"), "name": STRING, "disable_parallel_tool_use": BOOLEAN}, ["type"]
    )
)
_FORMAT = checked(object_of({"type": enum("json_schema"), "schema": OBJECT}, ["type", "schema"]))
#: Members of a request. The answer to one that counts tokens needs no ``max_tokens``.
MEMBERS = (
    Member("messages", array(_MESSAGE), "The conversation.", True),
    Member("system", either(STRING, array(_TEXT_BLOCK)), "System prompt."),
    Member("max_tokens", integer(-1, INT32_MAX), f"Most tokens of the answer ({_MAX_TOKENS})."),
    Member("stop_sequences", STRINGS, "Texts at which the answer ends."),
    Member("stream", BOOLEAN, "Sends the answer as events."),
    Member("temperature", NUMBER, "Randomness of the choice."),
    Member("top_p", NUMBER, "Keeps the most likely tokens up to this sum of probabilities."),
    Member("top_k", integer(), "Keeps the k most likely tokens."),
    Member("tools", array(_TOOL), "Functions that the model may call."),
    Member("tool_choice", _CHOICE, "Whether a tool is called, and which."),
    Member(
        "thinking",
        object_of({"type": enum("enabled", "disabled", "adaptive"), "budget_tokens": integer(-1, INT32_MAX)}),
        "Reasoning on or off, and its most tokens.",
    ),
    Member("output_config", object_of({"format": _FORMAT, "effort": STRING}), "Schema of the answer; effort."),
    Member("output_format", _FORMAT, "Schema of the answer, older name."),
    Member("chat_template_kwargs", checked(OBJECT), "Variables of the template."),
)


def read_anthropic_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request. What is alike in both APIs is left for that to check. Raises ApiError (400)."""
    messages = body.get("messages")
    if messages is None:
        raise invalid_request("'messages' is required")
    if not isinstance(messages, list):
        raise invalid_request("'messages' must be an array")
    out: list[dict[str, Any]] = []
    if body.get("system") is not None:
        out.append({"role": "system", "content": _system(body["system"])})
    for index, message in enumerate(messages):
        out += _read_message(message, f"messages[{index}]")

    chat: dict[str, Any] = {"messages": out}
    chat.update((name, body[name]) for name in _SAME if name in body)
    chat["max_tokens"] = _MAX_TOKENS if body.get("max_tokens") is None else body["max_tokens"]
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    if body.get("tools") is not None:
        chat["tools"] = _read_tools(body["tools"])
    _read_choice(_object(body, "tool_choice"), chat)
    _read_thinking(_object(body, "thinking"), chat)
    _read_output(_object(body, "output_config"), body.get("output_format"), chat)
    return chat


def _system(value: Any) -> str:
    if isinstance(value, str):
        return _without_stamp(value)
    if not isinstance(value, list):
        raise invalid_request("'system' must be a string or an array of text blocks")
    texts = []
    for index, block in enumerate(value):
        where = f"system[{index}]"
        if _kind(block, where) != "text":
            raise _unsupported(block, where)
        texts.append(_without_stamp(_text(block, "text", where)))
    return "".join(texts)


def _without_stamp(text: str) -> str:
    match = _STAMP.match(text)
    return f"{match[1]}fffff{text[match.end() :]}" if match else text


def _read_message(message: Any, where: str) -> list[dict[str, Any]]:
    """Messages of the chat API for one of this API: results of tools are messages of their own there."""
    if not isinstance(message, dict):
        raise invalid_request(f"{where} must be an object, but is {type_name(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise invalid_request(f"{where}: 'role' must be a string")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if content is None and role == "assistant":
        return []
    if not isinstance(content, list):
        raise invalid_request(f"{where}: 'content' must be a string or an array of blocks")

    out: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None
    for place, block in enumerate(content):
        at = f"{where}.content[{place}]"
        if _kind(block, at) == "tool_result":
            out.append(_tool_result(block, at))
            current = None
            continue
        if current is None:
            current = {"role": role, "content": []}
            out.append(current)
        _add_block(current, block, at)
    return [_plain(made) for made in out if made["role"] == "tool" or len(made) > 2 or made["content"]]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return message if message["content"] else {**message, "content": ""}


def _add_block(message: dict[str, Any], block: dict[str, Any], where: str) -> None:
    kind = block["type"]
    if kind == "thinking":
        message["reasoning_content"] = message.get("reasoning_content", "") + _text(block, "thinking", where)
    elif kind == "tool_use":
        call = {
            "id": _text(block, "id", where),
            "type": "function",
            "function": {"name": _text(block, "name", where), "arguments": dumps(block.get("input") or {}).decode()},
        }
        message.setdefault("tool_calls", []).append(call)
    elif kind != "redacted_thinking":  # nobody but its author can read that
        message["content"].append(_part(block, where))


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    """A text or an image as part of a message."""
    kind = block["type"]
    if kind == "text":
        return {"type": "text", "text": _text(block, "text", where)}
    source = block.get("source")
    if not isinstance(source, dict):
        raise _unsupported(block, where)
    if kind == "document" and source.get("type") == "text":
        return {"type": "text", "text": _text(source, "data", f"{where}.source")}
    if kind == "image" and source.get("type") == "base64":
        data = _text(source, "data", f"{where}.source")
        url = f"data:{source.get('media_type') or 'image/jpeg'};base64,{data}"
    elif kind == "image" and source.get("type") == "url":
        url = _text(source, "url", f"{where}.source")
    else:
        raise _unsupported(block, where)
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        for place, inner in enumerate(content):
            _kind(inner, f"{where}.content[{place}]")
        parts = [_part(inner, f"{where}.content[{place}]") for place, inner in enumerate(content)]
        is_text = all(part["type"] == "text" for part in parts)
        # plain text is what every template knows
        content = "".join(part["text"] for part in parts) if is_text else parts
    elif not isinstance(content, str):
        raise invalid_request(f"{where}: 'content' must be a string or an array of blocks")
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": content}


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid_request("'tools' must be an array of objects")
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    description, schema = tool.get("description"), tool.get("input_schema")
    return {
        "name": tool.get("name"),
        "description": "" if description is None else description,
        "parameters": {} if schema is None else schema,
    }


def _read_choice(choice: dict[str, Any], chat: dict[str, Any]) -> None:
    if not choice:
        return
    kind = choice.get("type")
    if kind in ("auto", "none"):
        chat["tool_choice"] = kind
    elif kind == "any":
        chat["tool_choice"] = "required"
    elif kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        raise invalid_request(f"Invalid tool_choice: {quote(choice)}")
    if choice.get("disable_parallel_tool_use") is True:
        chat["parallel_tool_calls"] = False


def _read_thinking(thinking: dict[str, Any], chat: dict[str, Any]) -> None:
    if thinking.get("type") == "enabled":
        budget = thinking.get("budget_tokens")
        chat["thinking_budget_tokens"] = _THINKING_BUDGET if budget is None else budget
    elif thinking.get("type") == "disabled":
        given = chat.get("chat_template_kwargs")
        if given is None or isinstance(given, dict):
            chat["chat_template_kwargs"] = {"enable_thinking": False, **(given or {})}


def _read_output(config: dict[str, Any], older: Any, chat: dict[str, Any]) -> None:
    """The schema that the answer has to fit, and how hard to think about it."""
    wanted = config.get("format", older)
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    elif wanted is not None:
        raise invalid_request(f"unsupported output format: {quote(wanted)}")
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]


def _kind(block: Any, where: str) -> str:
    if not isinstance(block, dict):
        raise invalid_request(f"{where} must be an object, but is {type_name(block)}")
    kind = block.get("type")
    if not isinstance(kind, str):
        raise invalid_request(f"{where}: 'type' must be a string")
    return kind


def _unsupported(block: dict[str, Any], where: str) -> ApiError:
    source = block.get("source")
    of = f" with source {quote(source.get('type'))}" if isinstance(source, dict) else ""
    return invalid_request(f"{where}: blocks of type {quote(block['type'])}{of} are not supported here")


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_request(f"'{name}' must be an object, but is {type_name(value)}")
    return value


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid_request(f"{where}: '{name}' must be a string")
    return value
