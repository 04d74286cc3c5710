"""Refuses chat templates on whose nesting the native template engine, which recurses, would overflow its stack."""

from __future__ import annotations

import re

#: Brackets within brackets of one expression.
MAX_BRACKETS = 200
#: Blocks (if, for, macro, ...) within blocks; every elif counts as a block within the one before.
MAX_BLOCKS = 200
#: Tokens in a row without a comma between them, brackets around them included: each may be one more level of operators.
MAX_CHAIN = 2000

_OPEN = re.compile(r"\{[{%#]")
_TOKEN = re.compile(r"""[-+]?%\}|[-+]?\}\}|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+|[^\s\w]""", re.DOTALL)
_BEGIN = frozenset({"if", "for", "macro", "call", "filter", "generation"})
_END = frozenset(f"end{word}" for word in _BEGIN)


def check_template(source: str) -> None:
    """Raises ValueError if ``source`` is nested more deeply than any template in use."""
    blocks: list[int] = []
    pos = 0
    while match := _OPEN.search(source, pos):
        if match.group() == "{#":
            end = source.find("#}", match.end())
            if end < 0:
                return
            pos = end + 2
            continue
        pos, word = _check_expression(source, match.end())
        if match.group() == "{%":
            _follow(blocks, word)


def _follow(blocks: list[int], word: str) -> None:
    """Keep count of the open blocks at a statement that begins with ``word``."""
    if word in _BEGIN:
        blocks.append(1)
    elif word == "elif" and blocks:
        blocks[-1] += 1
    elif word in _END and blocks:
        blocks.pop()
    if len(blocks) > MAX_BLOCKS or sum(blocks) > MAX_BLOCKS:
        raise ValueError(f"the chat template is nested too deeply (limit {MAX_BLOCKS} blocks)")


def _check_expression(source: str, pos: int) -> tuple[int, str]:
    """Where the expression or statement that goes on at ``pos`` ends, and its first word."""
    first = ""
    n_curly = 0
    chains = [0]  # per open bracket
    while match := _TOKEN.search(source, pos):
        token, pos = match.group(), match.end()
        if token.endswith("}}") and token[0] in "-+}" and n_curly > 0:
            # the brace of an object, not the end
            token, pos = "}", match.start() + len(token) - 1
        elif token.endswith(("%}", "}}")) and token[0] not in "'\"":
            break
        first = first or token.strip("-+")
        if token in ("(", "[", "{"):
            n_curly += token == "{"
            chains.append(0)
        elif token in (")", "]", "}"):
            n_curly -= token == "}"
            if len(chains) > 1:
                chains.pop()
        chains[-1] = 0 if token == "," else chains[-1] + 1
        if len(chains) > MAX_BRACKETS:
            raise ValueError(f"the chat template is nested too deeply (limit {MAX_BRACKETS} brackets)")
        if chains[-1] > MAX_CHAIN or sum(chains) > MAX_CHAIN:
            raise ValueError(f"an expression of the chat template is too long (limit {MAX_CHAIN} operators in a row)")
    else:
        pos = len(source)
    return pos, first
