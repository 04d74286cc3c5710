"""From a request of the Responses API to one of the chat API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamasrv.api.chat_messages import MAX_MESSAGES, quote
from llamasrv.api.chat_tools import TOOL_CHOICE
from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import INT32_MAX
from llamasrv.api.jsonio import type_name
from llamasrv.api.openapi_schema import (
    ANY,
    BOOLEAN,
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
from llamasrv.engine.log import srv_wrn

#: What only a service that keeps earlier requests can follow.
_STORED = ("previous_response_id", "conversation", "prompt", "background")
#: Members that mean something else to a completion, or nothing. There is one answer to a request.
CONSUMED = frozenset(
    {
        "input",
        "instructions",
        "reasoning",
        "text",
        "tools",
        "max_output_tokens",
        "include",
        "logprobs",
        "top_logprobs",
        "n",
        "n_cmpl",
    }
)
#: Members that the response repeats as they are.
_REPEATED = ("instructions", "max_output_tokens", "metadata", "reasoning", "text", "user")
_INCLUDE_LOGPROBS = "message.output_text.logprobs"
_INPUT_ROLES = ("user", "system", "developer")


_INPUT_TEXT = object_of({"type": enum("input_text"), "text": STRING}, ["type", "text"])
_OUTPUT_TEXT = object_of({"type": enum("output_text", "input_text"), "text": STRING}, ["type", "text"])
_ITEMS = (
    object_of(
        {"type": enum("message"), "role": checked(enum(*_INPUT_ROLES)), "content": either(STRING, array(_INPUT_TEXT))},
        ["role", "content"],
    ),
    object_of(
        {"type": enum("message"), "role": enum("assistant"), "content": either(STRING, array(_OUTPUT_TEXT))},
        ["role", "content"],
    ),
    object_of(
        {"type": enum("function_call"), "call_id": STRING, "name": STRING, "arguments": checked(STRING)},
        ["type", "call_id", "name", "arguments"],
    ),
    object_of(
        {
            "type": enum("function_call_output"),
            "call_id": STRING,
            "output": either(STRING, array(_INPUT_TEXT)),
        },
        ["type", "call_id", "output"],
    ),
    object_of({"type": enum("reasoning")}, ["type"]),
)
_FORMAT = checked(object_of({"type": enum("text", "json_object", "json_schema"), "name": STRING, "schema": OBJECT}))
_TOOL = object_of(
    {
        "type": enum("function"),
        "name": {"type": "string", "minLength": 1},
        "description": nullable(STRING),
        "parameters": checked(nullable(OBJECT)),
    },
    ["type", "name"],
)
#: Members of a request beside the fields of a completion.
MEMBERS = (
    Member(
        "input", either(STRING, array(either(*_ITEMS), maxItems=MAX_MESSAGES)), "Text, or what was said so far.", True
    ),
    Member("instructions", STRING, "System prompt."),
    Member("max_output_tokens", integer(-1, INT32_MAX), "Most tokens of the answer."),
    Member("tools", array(_TOOL), "Functions that the model may call; tools of other types are passed over."),
    Member("tool_choice", TOOL_CHOICE, "Whether a tool is called, which, or which of them are allowed."),
    Member("parallel_tool_calls", BOOLEAN, "Whether one answer may have several calls."),
    Member("reasoning", object_of({"effort": STRING}), "`effort`: how hard to think; `none`: not at all."),
    Member("text", object_of({"format": _FORMAT}), "Form of the answer."),
    Member("include", STRINGS, f"`{_INCLUDE_LOGPROBS}`: log-probabilities."),
    Member("top_logprobs", integer(0, INT32_MAX), "Likely tokens at each place."),
    Member("metadata", ANY, "Repeated in the answer."),
    Member("user", ANY, "Repeated in the answer."),
)


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """``chat``: the request in the chat API; ``repeated``: members of the response that say what was asked for.

    ``n_top``: how many likely tokens to tell at each place of the text, None: no probabilities at all.
    """

    chat: dict[str, Any]
    repeated: dict[str, Any]
    n_top: int | None = None


def read_responses_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """Convert a request. What is alike in both APIs is left for the chat request to check. Raises ApiError (400)."""
    if body.get("input") is None:
        raise invalid_request("'input' is required")
    for name in _STORED:
        if body.get(name):
            raise invalid_request(f"'{name}' is not supported")

    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions is not None:
        messages.append({"role": "system", "content": _text(instructions, "instructions")})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        if len(given) > MAX_MESSAGES:
            raise invalid_request(f"'input' has too many items ({len(given)}, limit {MAX_MESSAGES})")
        for index, item in enumerate(given):
            _add_item(messages, item, f"input[{index}]")
    else:
        raise invalid_request("'input' must be a string or array of objects")

    chat = {name: value for name, value in body.items() if name not in CONSUMED}
    chat["messages"] = messages
    tools = _read_tools(body.get("tools"))
    if tools:
        chat["tools"] = [{"type": "function", "function": _without_type(tool)} for tool in tools]
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    effort = _object(body, "reasoning").get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    wanted = _object(body, "text").get("format")
    if wanted is not None:
        chat["response_format"] = _response_format(wanted)
    return ResponsesRequest(chat, _repeated(body, tools), _read_logprobs(body, chat))


def _read_logprobs(body: Mapping[str, Any], chat: dict[str, Any]) -> int | None:
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise invalid_request(f"'include' must be an array, but is {type_name(include)}")
    n_top = body.get("top_logprobs")
    if _INCLUDE_LOGPROBS not in (include or ()):
        return None  # the number alone asks for nothing
    n_top = 0 if n_top is None else n_top
    if isinstance(n_top, bool) or not isinstance(n_top, int) or not 0 <= n_top <= INT32_MAX:
        raise invalid_request("'top_logprobs' must be an integer that is not negative")
    # without likely ones there are no probabilities at all
    chat["logprobs"], chat["top_logprobs"] = True, max(1, n_top)
    return n_top


def _repeated(body: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    choice = body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    return {
        **{name: body.get(name) for name in _REPEATED},
        "parallel_tool_calls": parallel if isinstance(parallel, bool) else True,
        "tool_choice": "auto" if choice is None else choice,
        "tools": [{"parameters": None, **tool} for tool in tools],
    }


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise invalid_request(f"{where} must be an object, but is {type_name(item)}")
    role, kind = item.get("role"), item.get("type")
    if role in _INPUT_ROLES and kind in (None, "message"):
        parts = [_input_part(part, where) for part in _parts(item, "content", where)]
        messages.append({"role": role, "content": parts})
    elif role == "assistant" and kind in (None, "message"):
        message = _assistant(messages)
        parts = [_output_part(part, where) for part in _parts(item, "content", where)]
        message["content"] = [*message.get("content", ()), *parts]
    elif kind == "function_call":
        _add_call(_assistant(messages), item, where)
    elif kind == "function_call_output":
        messages.append(_call_output(item, where))
    elif kind == "reasoning":
        _add_reasoning(messages, item, where)
    else:
        raise invalid_request(f"Cannot determine type of 'item': {where}: {quote(item)}")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that the last items belong to; a new one unless it is the last."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(item: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """The parts of a text or a list of parts."""
    value = item.get(name)
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise invalid_request(f"{where}.{name} must be a string or an array of objects")
    return value


def _input_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "input_text":
        return {"type": "text", "text": _text(part.get("text"), f"{where}: 'text' of 'Input text'")}
    if kind == "input_image":
        if part.get("image_url") is None:
            raise invalid_request(f"{where}: 'image_url' is required")
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_file":
        raise invalid_request(f"{where}: 'input_file' is not supported")
    raise invalid_request(f"{where}: 'type' must be one of 'input_text', 'input_image', or 'input_file'")


def _output_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("output_text", "input_text"):
        return {"type": "text", "text": _text(part.get("text"), f"{where}: 'text' of 'Output text'")}
    if kind == "refusal":
        return {"type": "text", "text": _text(part.get("refusal"), f"{where}: 'refusal' of 'Refusal'")}
    raise invalid_request(f"{where}: 'type' must be one of 'output_text' or 'refusal'")


def _add_call(message: dict[str, Any], item: Mapping[str, Any], where: str) -> None:
    function = {name: _text(item.get(name), f"{where}.{name}") for name in ("arguments", "name")}
    call = {"type": "function", "id": _text(item.get("call_id"), f"{where}.call_id"), "function": function}
    message["tool_calls"] = [*message.get("tool_calls", ()), call]


def _call_output(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    call_id = _text(item.get("call_id"), f"{where}.call_id")
    output = item.get("output")
    content: Any = output
    if not isinstance(output, str):
        content = [_input_part(part, f"{where}.output") for part in _parts(item, "output", where)]
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _add_reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Reasoning as it was, else its summary; encrypted reasoning of another service says nothing."""
    for name in ("content", "summary"):
        if item.get(name):
            texts = [_text(part.get("text"), f"{where}.{name}[].text") for part in _parts(item, name, where)]
            message = _assistant(messages)
            message.setdefault("content", [])
            before = message.get("reasoning_content")
            message["reasoning_content"] = "\n".join([*([before] if before else ()), *texts])
            return


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    """The functions among the tools; the service itself would run the others."""
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid_request("'tools' must be an array of objects")
    functions = []
    for tool in tools:
        if tool.get("type") == "function":
            functions.append({"strict": True, **tool})
        else:
            srv_wrn("responses", "unsupported tool type %s skipped", quote(tool.get("type")))
    return functions


def _without_type(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}


def _response_format(wanted: Any) -> Any:
    """``text.format`` as a ``response_format``, which wraps the schema."""
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": _without_type(wanted)}
    return wanted


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid_request(f"'{name}' must be an object, but is {type_name(value)}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise invalid_request(f"{what} must be a string, but is {type_name(value)}")
    return value
