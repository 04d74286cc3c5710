"""A route: method, path and what answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flask import Response


@dataclass(frozen=True, slots=True)
class Route:
    """``path`` is without the prefix.

    ``is_short``: answered from memory, never waits for the engine. ``needs_model``: wakes a sleeping engine and keeps
    it awake while the handler runs; a posted request does so until its last result is read. ``is_public``: answered
    without a key and while the model loads.
    """

    method: str
    path: str
    handler: Callable[..., Response]
    is_short: bool = False
    needs_model: bool = False
    is_public: bool = False


#: The route of everything below the prefix that has no route of its own.
CATCH_ALL = "/<path:name>"


def matcher(prefix: str, routes: Sequence[Route], is_wanted: Callable[[Route], bool]) -> Callable[[str, str], bool]:
    """A test of a request's method and path: whether the route that answers it is one of the wanted."""
    exact = {(route.method, prefix + route.path): is_wanted(route) for route in routes}
    others = any(route.path == CATCH_ALL and is_wanted(route) for route in routes)

    def matches(method: str, path: str) -> bool:
        found = exact.get(("GET" if method == "HEAD" else method, path))
        if found is None:
            return others and method in ("GET", "HEAD") and path.startswith(f"{prefix}/")
        return found

    return matches
