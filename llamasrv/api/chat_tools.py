"""The tools of a chat request and whether they have to be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamasrv.api import json_schema
from llamasrv.api.chat_messages import quote
from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.openapi_schema import OBJECT, STRING, checked, either, enum, nullable, object_of

_FUNCTION = object_of(
    {
        "name": {"type": "string", "minLength": 1},
        "description": nullable(STRING),
        "parameters": checked(nullable(OBJECT)),
    },
    ["name"],
)
#: Tools of a request; each has a part in the grammar.
MAX_TOOLS = 1024
#: Schema of a tool; ``parameters`` is a JSON schema itself.
TOOL = object_of({"type": enum("function"), "function": _FUNCTION}, ["type", "function"])
#: Schema of ``tool_choice``. The tool has to be among the tools.
TOOL_CHOICE = checked(either(enum("auto", "none", "required"), OBJECT))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools``: those that may be called; ``choice``: "auto", "none" or "required"."""

    tools: list[dict[str, Any]]
    choice: str = "auto"

    @property
    def is_demanded(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice == "required"

    @property
    def is_possible(self) -> bool:
        """Whether the answer may be a call."""
        return bool(self.tools) and self.choice != "none"


def read_tools(body: Mapping[str, Any], use_jinja: bool) -> ToolUse:
    """The fields ``tools`` and ``tool_choice``. Raises ApiError (400).

    A named tool, or a list of allowed ones, is what remains of the tools.
    """
    tools = body.get("tools")
    choice = body.get("tool_choice")
    choice = "auto" if choice is None else choice
    if not use_jinja:
        if isinstance(tools, list) and tools:
            raise invalid_request("tools param requires --jinja flag")
        if choice != "auto":
            raise invalid_request("tool_choice param requires --jinja flag")
    return _choose(_read_list(tools), choice)


def _read_list(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _wrong(f"Expected 'tools' to be an array, got {quote(tools)}")
    if len(tools) > MAX_TOOLS:
        raise _wrong(f"there are too many ({len(tools)}, limit {MAX_TOOLS})")
    return [_read_tool(index, tool) for index, tool in enumerate(tools)]


def _read_tool(index: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or "type" not in tool:
        raise _wrong(f"Missing tool type: {quote(tool)}")
    if tool["type"] != "function":
        raise _wrong(f"Unsupported tool type: {quote(tool)}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"Missing tool function: {quote(tool)}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(f"tools[{index}]: 'function.name' must be a string that is not empty")
    out = {key: value for key, value in function.items() if value is not None}
    if not isinstance(out.get("description", ""), str):
        raise _wrong(f"tools[{index}]: 'function.description' must be string")
    if not isinstance(out.get("parameters", {}), dict):
        raise _wrong(f"tools[{index}]: 'function.parameters' must be object")
    try:
        json_schema.check(out.get("parameters"))
    except json_schema.SchemaError as error:
        raise _wrong(f"tools[{index}]: {error}") from None
    return {**tool, "function": out}


def _choose(tools: list[dict[str, Any]], choice: Any) -> ToolUse:
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise invalid_request(f"Invalid tool_choice: {choice}")
        use = ToolUse(tools, choice)
    elif isinstance(choice, dict) and choice.get("type") == "function":
        use = ToolUse(_named(tools, [choice]), "required")
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        # the chat API wraps what the responses API gives directly
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise invalid_request(f"Invalid tool_choice: {quote(choice)}")
        use = _choose(_named(tools, allowed["tools"]), allowed.get("mode", "auto"))
    else:
        raise invalid_request(f"Invalid tool_choice: {quote(choice)}")
    if use.is_demanded and not use.tools:
        raise invalid_request("Invalid tool_choice: there is no tool to call")
    return use


def _named(tools: list[dict[str, Any]], references: list[Any]) -> list[dict[str, Any]]:
    """The tools that ``{"type": "function", "function": {"name"}}`` or ``{"type": "function", "name"}`` refer to."""
    names = set()
    for reference in references:
        function = reference.get("function", reference) if isinstance(reference, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise invalid_request(f"Invalid tool_choice: {quote(reference)}")
        if all(tool["function"]["name"] != name for tool in tools):
            raise invalid_request(f"Invalid tool_choice: there is no tool named {quote(name)}")
        names.add(name)
    return [tool for tool in tools if tool["function"]["name"] in names]


def _wrong(text: str) -> ApiError:
    return invalid_request(f"Failed to parse tools: {text}")
