"""HTTP/1.1 on a socket of one's own: every byte of an answer is looked at, and a client may leave at any moment."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Header that names a request, and its answer.
NAME = "X-Request-Id"
#: Largest head of an answer, and largest line of an event.
LINE_LIMIT = 1 << 24


class LostError(Exception):
    """There was no complete answer; the text says how far it came."""


class WrongError(Exception):
    """There was a complete answer, but not the right one."""


class TwiceError(WrongError):
    """More came than one answer."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(slots=True)
class Reply:
    """A complete answer. ``began``: when its first byte was there, seconds of the monotonic clock."""

    status: int
    headers: dict[str, str]
    body: bytes
    began: float

    def json(self) -> Any:
        """Raises WrongError if the body is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError as exc:
            raise WrongError(f"status {self.status} with a body that is no JSON: {self.body[:200]!r}") from exc


def request_head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def request_bytes(
    method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None, keep: bool = False
) -> bytes:
    """A whole request. ``body``: bytes as they are, None for none, anything else as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Host": "localhost", **(headers or {})}
    if body is not None:
        sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **sent}
    if not keep:
        sent["Connection"] = "close"
    return request_head(method, path, sent) + data


_numbers = itertools.count()


def new_name() -> str:
    """A name for a request that no other has."""
    return f"soak-{next(_numbers)}"


@dataclass(slots=True)
class Connection:
    """One connection of a client. Whatever breaks off is a LostError.

    ``names``: of the requests that wait for their answer. An answer that has another name is a WrongError.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    names: collections.deque[str] = field(default_factory=collections.deque)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    began: float = 0.0

    @classmethod
    async def open(cls, address: Address) -> Connection:
        try:
            return cls(*await asyncio.open_connection(address.host, address.port, limit=LINE_LIMIT))
        except OSError as exc:
            raise LostError(f"no connection: {exc}") from exc

    async def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None, keep: bool = False
    ) -> None:
        """Send a whole request under a name of its own."""
        named = {NAME: new_name(), **(headers or {})}
        self.names.append(named[NAME])
        await self.send(request_bytes(method, path, body, named, keep))

    async def send(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError as exc:
            raise LostError(f"while sending: {exc!r}") from exc

    async def head(self) -> int:
        """Read status and headers of the next answer; returns the status."""
        try:
            first = await self.reader.readexactly(1)
            self.began = time.monotonic()
            text = (first + await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (OSError, EOFError, asyncio.LimitOverrunError) as exc:
            raise LostError(f"before the end of the headers: {exc!r}") from exc
        line, *rest = text.split("\r\n")
        parts = line.split(" ", 2)
        if not parts[0].startswith("HTTP/1.") or len(parts) < 2 or not parts[1].isdigit():
            raise WrongError(f"no status line: {line[:200]!r}")
        self.status = int(parts[1])
        pairs = (each.partition(":") for each in rest if each)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        wanted = self.names.popleft() if self.names else ""
        if wanted != self.headers.get(NAME.lower(), wanted) and wanted:
            raise WrongError(f"the answer to {self.headers[NAME.lower()]} instead of that to {wanted}")
        return self.status

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Ends only at its declared end."""
        try:
            if "chunked" in self.headers.get("transfer-encoding", ""):
                while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readuntil(b"\r\n")
            elif "content-length" in self.headers:
                if size := int(self.headers["content-length"]):
                    yield await self.reader.readexactly(size)
            elif self.status not in (204, 304):
                while piece := await self.reader.read(65536):
                    yield piece
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as exc:
            raise LostError(f"status {self.status}, then the body broke off: {exc!r}") from exc

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def reply(self) -> Reply:
        await self.head()
        return await self.rest()

    async def rest(self) -> Reply:
        """The answer whose head has been read."""
        return Reply(self.status, self.headers, await self.body(), self.began)

    async def events(self) -> AsyncIterator[str]:
        """The ``data:`` of every event of the body, without comments. Raises WrongError if the last one is cut off."""
        rest = b""
        async for piece in self.pieces():
            *blocks, rest = (rest + piece).split(b"\n\n")
            for block in blocks:
                for line in block.split(b"\n"):
                    if line.startswith(b"data: "):
                        yield line[6:].decode()
        if rest.strip():
            raise WrongError(f"the stream ends within an event: {rest[-200:]!r}")

    async def end(self) -> None:
        """The server must close now, without one more byte. Raises TwiceError."""
        try:
            surplus = await self.reader.read(4096)
        except OSError:
            surplus = b""  # a reset instead of an end
        if surplus:
            raise TwiceError(f"after the answer came {surplus[:200]!r}")

    def close(self) -> None:
        self.writer.close()

    def hang_up(self) -> None:
        """Reset the connection at once."""
        self.writer.transport.abort()


async def ask(
    address: Address, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """One request on a connection of its own, its whole answer, and nothing behind it."""
    connection = await Connection.open(address)
    try:
        await connection.ask(method, path, body, headers)
        reply = await connection.reply()
        await connection.end()
        return reply
    finally:
        connection.close()
