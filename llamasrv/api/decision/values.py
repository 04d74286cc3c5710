"""JSON values on their way into a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_SPECIAL = re.compile(r"<\|([A-Za-z0-9_]+)\|>")
#: What is left of a special token's text: looks alike, but is none.
_HARMLESS = r"<¦\1¦>"
_BLANKS = " \t\n\r"


def map_strings(value: Any, change: Callable[[str], str], keys: bool = False) -> Any:
    """``value`` with every string in it changed; the keys of objects too if ``keys``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change, keys) for item in value]
    if isinstance(value, dict):
        return {change(key) if keys else key: map_strings(item, change, keys) for key, item in value.items()}
    return value


def sort_keys(value: Any) -> Any:
    """``value`` with the keys of all objects in order."""
    if isinstance(value, list):
        return [sort_keys(item) for item in value]
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    return value


def escape_special(text: str) -> str:
    """``text`` in which no special token can be read."""
    return _SPECIAL.sub(_HARMLESS, text)


def as_outline(value: Any, depth: int = 0) -> str:
    """A value as plain text: objects as labelled lines, lists as dashes, two blanks per level."""
    pad = "  " * depth
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(f"{pad}- {as_outline(item, depth + 1).lstrip(_BLANKS)}" for item in value)
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            nested = isinstance(item, dict | list)
            text = as_outline(item, depth + 1 if nested else 0)
            lines.append(f"{pad}{key}:\n{text}" if nested else f"{pad}{key}: {text}")
        return "\n".join(lines)
    # numbers, True and False
    return str(value)
