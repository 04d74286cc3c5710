"""Grammars of requests: from text or JSON schema to a GBNF text that libllama is known to take."""

from __future__ import annotations

import copy
import functools
from typing import Any

from llamasrv.api import gbnf, json_schema
from llamasrv.api.jsonio import dumps
from llamasrv.api.pattern import rewrite
from llamasrv.api.protocols import GrammarTools, Vocab

#: Characters of a regular expression in a schema.
MAX_PATTERN = 4096
#: What the converter makes of a pattern that it cannot express: any string.
_ANY_STRING = "root ::= string"


class GrammarUse:
    """Checks grammars against one vocabulary and remembers the last ones that passed. Thread-safe."""

    def __init__(self, tools: GrammarTools, vocab: Vocab) -> None:
        self._tools = tools
        self._vocab = vocab
        self._checked = functools.lru_cache(maxsize=32)(self._check)
        self._convert_text = functools.lru_cache(maxsize=32)(self._convert)

    def check(self, text: str) -> None:
        """Raises ValueError, text beginning "failed to parse grammar", if libllama could not work with ``text``."""
        self._checked(text)

    def from_json_schema(self, schema: Any) -> str:
        """The GBNF text for ``schema``. Raises ValueError saying what is wrong with it."""
        return self._convert_text(dumps(self._with_usable_patterns(schema)).decode())

    def usable_schema(self, schema: Any) -> Any:
        """``schema`` as libllama enforces it, without words that it would ignore. Raises like from_json_schema."""
        own = self._with_usable_patterns(schema)
        self._convert_text(dumps(own).decode())
        return own

    def _with_usable_patterns(self, schema: Any) -> Any:
        own = copy.deepcopy(schema)
        for path, node in json_schema.check(own).items():
            node["pattern"] = self._usable_pattern(path, node["pattern"])
        return own

    def _check(self, text: str) -> None:
        if text.startswith("%llguidance"):
            raise ValueError("failed to parse grammar: llguidance is not enabled")
        try:
            gbnf.check(text)
        except gbnf.GrammarError as error:
            raise ValueError(f"failed to parse grammar: {error}") from None
        try:
            self._tools.check_grammar(self._vocab, text)
        except Exception as error:
            raise ValueError(_with_prefix("failed to parse grammar", error)) from None

    def _convert(self, schema: str) -> str:
        try:
            text = self._tools.json_schema_to_grammar(schema)
        except Exception as error:
            raise ValueError(_with_prefix("JSON schema conversion failed", error)) from None
        self._check(text)
        return text

    def _usable_pattern(self, path: str, pattern: str) -> str:
        """``pattern`` as the converter enforces it. Raises ValueError if it would be ignored."""
        if len(pattern) > MAX_PATTERN:
            raise ValueError(f"a pattern is too long (limit {MAX_PATTERN} characters) at {path}")
        usable = rewrite(pattern)
        try:
            text = self._convert_text(dumps({"type": "string", "pattern": usable}).decode())
        except ValueError as error:
            raise ValueError(f"pattern {pattern!r} at {path} cannot be used: {error}") from None
        if _ANY_STRING in text.splitlines():
            raise ValueError(f"pattern {pattern!r} at {path} is not supported")
        return usable


def native_tools() -> GrammarTools:
    """The functions of the native library, which is loaded only here: nothing else in this layer needs it."""
    from llamasrv import binding

    return binding


def _with_prefix(prefix: str, error: Exception) -> str:
    text = str(error)
    return text if text.startswith(prefix) else f"{prefix}: {text}"
