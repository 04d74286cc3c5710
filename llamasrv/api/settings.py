"""Settings of a request as responses show them: ``generation_settings`` and ``params``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from llamasrv.api.fields import Echo
from llamasrv.api.schema import FIELDS
from llamasrv.engine.task import TaskParams

Entry = tuple[str, Callable[[TaskParams], Any], Callable[[Any], Any] | None]


def _reasoning_in_content(params: TaskParams) -> bool:
    return params.stream and params.reasoning_format == "deepseek-legacy"


#: Members that are no field of a request.
_DERIVED: tuple[Entry, ...] = (
    ("max_tokens", attrgetter("n_predict"), None),
    ("chat_format", attrgetter("chat_format"), None),
    ("reasoning_in_content", _reasoning_in_content, None),
    ("generation_prompt", attrgetter("sampling.generation_prompt"), None),
    ("speculative.types", attrgetter("speculative_types"), None),
)


def _entries(*echoes: Echo) -> tuple[Entry, ...]:
    fields = ((field.name, attrgetter(field.target), field.render) for field in FIELDS if field.echo in echoes)
    return (*fields, *_DERIVED)


_FULL = _entries(Echo.ALWAYS, Echo.FULL)
_SHORT = _entries(Echo.ALWAYS)


def generation_settings(params: TaskParams, short: bool = False) -> dict[str, Any]:
    """JSON of ``params``. ``short``: without stop strings, grammar, biases and the like, as in /slots and /props."""
    return {name: render(get(params)) if render else get(params) for name, get, render in (_SHORT if short else _FULL)}
