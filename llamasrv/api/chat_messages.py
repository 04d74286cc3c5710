"""The messages of a chat request, checked and cleaned before a template sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from llamasrv.api.content import content_text
from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.jsonio import dumps, type_name
from llamasrv.api.openapi_schema import OBJECT, STRING, array, checked, either, enum, nullable, object_of

#: Members of a message that are text; null is the same as absent.
_TEXTS = ("reasoning_content", "name", "tool_call_id")
#: Messages of a request, and parts of all of them: the template engine takes a millisecond for a few.
MAX_MESSAGES = 10_000
#: Characters of a value that are quoted in an error.
_MAX_QUOTE = 500


_TEXT_PART = object_of({"type": enum("text"), "text": STRING}, ["type", "text"])
_MEDIA_PART = object_of({"type": enum("image_url", "input_audio", "input_video", "video_url")}, ["type"])
CONTENT = either(STRING, {"type": "null"}, array(_TEXT_PART), checked(array(either(_TEXT_PART, _MEDIA_PART))))
_CALL = object_of(
    {
        "type": enum("function"),
        "id": nullable(STRING),
        "function": object_of({"name": STRING, "arguments": checked(either(STRING, OBJECT))}, ["name"]),
    },
    ["type", "function"],
)
#: Schema of a message. Which roles there are and how they follow each other is up to the template.
MESSAGE = object_of(
    {
        "role": STRING,
        "content": CONTENT,
        "tool_calls": nullable(array(_CALL)),
        **{name: nullable(STRING) for name in _TEXTS},
    },
    ["role", "content"],
)


def read_messages(body: Mapping[str, Any], object_arguments: bool) -> list[dict[str, Any]]:
    """The field ``messages``, with text parts only.

    ``object_arguments``: the template takes the arguments of tool calls apart, so they have to be JSON. Raises ApiError
    (400), which names the message where it is one of them.
    """
    if "messages" not in body:
        raise invalid_request("'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise invalid_request("Expected 'messages' to be an array")
    if sum(map(_n_parts, messages)) > MAX_MESSAGES:
        raise invalid_request(f"there are too many messages, parts and tool calls (limit {MAX_MESSAGES})")
    for message in messages:
        _check_content(message)
    return [_read_message(index, message, object_arguments) for index, message in enumerate(messages)]


def quote(value: Any) -> str:
    """JSON of a value for an error, shortened."""
    text = dumps(value).decode()
    return text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + "..."


def _n_parts(message: Any) -> int:
    """Members of the lists in a message, or 1."""
    if not isinstance(message, dict):
        return 1
    return max([1, *(len(value) for value in message.values() if isinstance(value, list))])


def _check_content(message: Any) -> None:
    """Nothing but text, known before anything is fetched or parsed."""
    members = message if isinstance(message, dict) else {}
    if members.get("role") != "assistant":
        if "content" not in members:
            raise invalid_request("All non-assistant messages must contain 'content'")
    elif "content" not in members:
        if "tool_calls" not in members:
            raise invalid_request("Assistant message must contain either 'content' or 'tool_calls'!")
        return
    content = members["content"]
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid_request("Expected 'content' to be a string or an array")
    content_text(content)


def _read_message(index: int, message: dict[str, Any], object_arguments: bool) -> dict[str, Any]:
    out = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "role" not in out:
        raise _wrong(f"Missing 'role' in message: {quote(message)}")
    if not isinstance(out["role"], str):
        raise _wrong(f"messages[{index}]: 'role' must be string, but is {type_name(out['role'])}")
    for name in _TEXTS:
        if name in out and not isinstance(out[name], str):
            raise _wrong(f"messages[{index}]: '{name}' must be string, but is {type_name(out[name])}")
    for place, part in enumerate(out["content"] if isinstance(out.get("content"), list) else ()):
        if not isinstance(part.get("text"), str):
            raise _wrong(f"messages[{index}].content[{place}]: 'text' must be string")
    if "tool_calls" in out:
        if not isinstance(out["tool_calls"], list):
            raise _wrong(f"messages[{index}]: 'tool_calls' must be array, but is {type_name(out['tool_calls'])}")
        out["tool_calls"] = [
            _read_call(f"messages[{index}].tool_calls[{place}]", call, object_arguments)
            for place, call in enumerate(out["tool_calls"])
        ]
    elif "content" not in out:
        out["content"] = None  # there were tool calls, but null
    return out


def _read_call(where: str, call: Any, object_arguments: bool) -> dict[str, Any]:
    if not isinstance(call, dict) or "type" not in call:
        raise _wrong(f"Missing tool call type: {quote(call)}")
    if call["type"] != "function":
        raise _wrong(f"Unsupported tool call type: {quote(call)}")
    function = call.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"Missing tool call function: {quote(call)}")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"Missing tool call name: {quote(call)}")
    out: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        if not isinstance(call["id"], str):
            raise _wrong(f"{where}: 'id' must be string, but is {type_name(call['id'])}")
        out["id"] = call["id"]
    arguments = function.get("arguments", "")
    if object_arguments:
        arguments = _read_arguments(where, arguments)
    out["function"] = {"name": function["name"], "arguments": arguments}
    return out


def _read_arguments(where: str, arguments: Any) -> Any:
    """JSON text of arguments that a template takes apart. None at all are an empty object."""
    if arguments is None or arguments == "":
        return "{}"
    if isinstance(arguments, str):
        try:
            orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise invalid_request(f"Failed to parse tool call arguments as JSON: {where}: {error}") from None
    return arguments


def _wrong(text: str) -> ApiError:
    return invalid_request(f"Failed to parse messages: {text}")
