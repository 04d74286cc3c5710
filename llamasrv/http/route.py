"""A route: method, path and what answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flask import Response


@dataclass(frozen=True, slots=True)
class Route:
    """``path`` is without the prefix.

    ``is_short``: answered from memory, never waits for the engine. ``needs_model``: wakes a sleeping engine and keeps
    it awake while the handler runs; a posted request does so until its last result is read.
    """

    method: str
    path: str
    handler: Callable[..., Response]
    is_short: bool = False
    needs_model: bool = False
