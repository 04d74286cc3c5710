"""Streams that are read in pieces, over several connections."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from soaklib.dialects import NATIVE
from soaklib.ledger import ANSWERED, BUSY
from soaklib.visit import Kind, Visit, is_busy
from soaklib.wire import Connection, WrongError


async def resumed(visit: Visit) -> str:
    """Leave a stream in its middle, come back for the rest, leave again, and so on: the pieces make the whole."""
    known = visit.known(NATIVE)
    name = f"conversation-{visit.number}"
    kept = b""
    connection = await Connection.open(visit.address)
    try:
        headers = {"X-Conversation-Id": name}
        await connection.ask("POST", NATIVE.path, known.body(True), headers)
        if await connection.head() != 200:
            if is_busy(await connection.rest()):
                return BUSY
            raise WrongError(f"status {connection.status} for a stream")
        kept = await _some(connection, visit.chance.randint(0, 300))
    finally:
        connection.hang_up()
    for _ in range(visit.chance.randint(0, 2)):
        piece, _ = await _replay(visit, name, len(kept), visit.chance.randint(0, 200))
        kept += piece
    rest, is_whole = await _replay(visit, name, len(kept), None)
    if not is_whole:
        raise WrongError("a replay did not end")
    events = [line[6:] for line in (kept + rest).decode().split("\n") if line.startswith("data: ")]
    known.check(NATIVE.joined(events))
    return ANSWERED


async def _some(connection: Connection, enough: int | None) -> bytes:
    """The body up to at least so many bytes; None: all of it."""
    out = b""
    async for piece in connection.pieces():
        out += piece
        if enough is not None and len(out) >= enough:
            break
    return out


async def _replay(visit: Visit, name: str, offset: int, enough: int | None) -> tuple[bytes, bool]:
    """What a new connection gets from there on, without what was read before; whether it is the rest."""
    connection = await Connection.open(visit.address)
    try:
        path = f"/v1/stream?conv_id={quote(name)}&from={offset}"
        await connection.ask("GET", path)
        if await connection.head() != 200:
            raise WrongError(f"status {connection.status} for a replay: {(await connection.body())[:200]!r}")
        # a replay begins at the frame that holds the byte
        known = offset - int(connection.headers.get("x-stream-offset", offset))
        data = await _some(connection, None if enough is None else known + enough)
        return data[known:], enough is None
    finally:
        connection.hang_up()


async def cancelled(visit: Visit) -> str:
    """A stream that nobody reads any more is ended by name."""
    name = f"conversation-{visit.number}"
    body = {"prompt": "Once", "n_predict": 400, "ignore_eos": True, "stream": True}
    connection = await Connection.open(visit.address)
    try:
        await connection.ask("POST", NATIVE.path, body, {"X-Conversation-Id": name})
        if await connection.head() != 200:
            return BUSY if is_busy(await connection.rest()) else _unexpected(connection.status)
    finally:
        connection.hang_up()
    await asyncio.sleep(visit.chance.random() * 0.2)
    connection = await Connection.open(visit.address)
    try:
        await connection.ask("DELETE", f"/v1/stream?conv_id={quote(name)}")
        if await connection.head() != 204:
            return _unexpected(connection.status)
        await connection.end()
    finally:
        connection.close()
    return ANSWERED


def _unexpected(status: int) -> str:
    raise WrongError(f"status {status}")


KINDS = (Kind("resumed stream", 4, resumed), Kind("cancelled stream", 2, cancelled))
