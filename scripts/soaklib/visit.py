"""What every visit to the server has at hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from soaklib.dialects import Dialect
from soaklib.known import Known
from soaklib.ledger import BUSY, REFUSED
from soaklib.server import Server
from soaklib.wire import Address, Reply, WrongError


@dataclass(slots=True)
class Scene:
    """What visits share. ``disk``: held by who works with slot files, since a full disk is full for all."""

    server: Server
    known: list[Known]
    n_ctx: int
    disk: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class Visit:
    """One request, or a few that belong together. ``chance`` decides everything about it; ``number`` is its own."""

    scene: Scene
    chance: random.Random
    number: int

    @property
    def address(self) -> Address:
        return self.scene.server.address

    def known(self, dialect: Dialect | None = None) -> Known:
        """One of the prompts whose answer is known."""
        return self.chance.choice([known for known in self.scene.known if dialect in (None, known.dialect)])


@dataclass(frozen=True, slots=True)
class Kind:
    """``run`` returns an outcome of ``ledger``, or raises as ``wire`` does. ``weight``: how often it comes."""

    name: str
    weight: float
    run: Callable[[Visit], Awaitable[str]]


def is_busy(reply: Reply) -> bool:
    """Whether the server says that it has too much to do, in the right form."""
    if reply.status != 503:
        return False
    error_of(reply)
    if not reply.headers.get("retry-after", "").isdigit():
        raise WrongError("status 503 without Retry-After")
    return True


def error_of(reply: Reply) -> Any:
    """The error object. Raises WrongError if it is not one of the server's own."""
    error = reply.json().get("error")
    if not isinstance(error, dict) or error.get("code") != reply.status or not error.get("message"):
        raise WrongError(f"status {reply.status} with the body {reply.body[:200]!r}")
    return error


def json_of(reply: Reply) -> Any:
    """The JSON of a success. Raises WrongError for any other status."""
    if reply.status != 200:
        raise WrongError(f"status {reply.status}: {reply.body[:200]!r}")
    return reply.json()


def refused(reply: Reply, *statuses: int) -> str:
    """The outcome of a request that must be refused with one of these. Raises WrongError."""
    if is_busy(reply):
        return BUSY
    if reply.status not in statuses:
        raise WrongError(f"status {reply.status} instead of {statuses}: {reply.body[:200]!r}")
    error_of(reply)
    return REFUSED
