"""Regular expressions of JSON schemas, in the words that libllama's schema converter knows.

The converter takes only anchored patterns without shorthand classes; for the others it silently allows any string.
What is rewritten here matches the same strings, or fewer where a string would need escapes in JSON.
"""

from __future__ import annotations

#: Characters that need an escape in a JSON string, as part of a class.
_ESCAPED = r'"\\\x00-\x1F'
_PLAIN = f"[^{_ESCAPED}]"
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " "}
#: Escapes that the converter knows by itself.
_KNOWN = frozenset('^$.[]()|{}*+?\\trnxuU"')
_KNOWN_IN_CLASS = frozenset('[]\\-trnxuU"')


def rewrite(pattern: str) -> str:
    """``pattern`` anchored and without shorthand classes; what has no such form stays and is refused later."""
    starts = pattern.startswith("^")
    ends = pattern.endswith("$") and not _is_escaped(pattern, len(pattern) - 1)
    body = _expand(pattern[1 if starts else 0 : len(pattern) - ends])
    if starts and ends:
        return f"^{body}$"
    before, after = ("" if starts else f"{_PLAIN}*"), ("" if ends else f"{_PLAIN}*")
    return f"^{before}({body}){after}$" if body else f"^{before or after}$"


def _is_escaped(text: str, position: int) -> bool:
    n_slashes = 0
    while position > n_slashes and text[position - n_slashes - 1] == "\\":
        n_slashes += 1
    return n_slashes % 2 == 1


def _expand(text: str) -> str:
    out: list[str] = []
    in_class = False
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char == "\\" and position < len(text):
            out.append(_escape(text[position], in_class))
            position += 1
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if text.startswith("^", position):
                char, position = f"[^{_ESCAPED}", position + 1
        elif char == ".":
            char = _PLAIN
        out.append(char)
    return "".join(out)


def _escape(char: str, in_class: bool) -> str:
    """What stands for a backslash and ``char``."""
    if char in _CLASSES:
        return _CLASSES[char] if in_class else f"[{_CLASSES[char]}]"
    if not in_class and char.lower() in _CLASSES:
        return f"[^{_CLASSES[char.lower()]}{_ESCAPED}]"
    known = _KNOWN_IN_CLASS if in_class else _KNOWN
    if char in known or char.isalnum() or char == "^":
        return "\\" + char
    return char
