"""Requests that are ended by name or by time, which not every server knows."""

from __future__ import annotations

import asyncio

from soaklib.dialects import NATIVE, parsed
from soaklib.ledger import ANSWERED, BUSY, REFUSED
from soaklib.visit import Kind, Visit, error_of, is_busy
from soaklib.wire import NAME, Connection, WrongError, ask, new_name

CANCELLED = 400
TIMED_OUT = 408


async def _end(connection: Connection, stream: bool, status: int) -> str:
    """What a request got: its whole answer, or the one error that ends it before or within its stream.

    Raises WrongError for anything else.
    """
    if await connection.head() != 200 or not stream:
        reply = await connection.rest()
        await connection.end()
        if is_busy(reply):
            return BUSY
        if reply.status == 200:
            NATIVE.text(reply.json())
            return ANSWERED
        if reply.status != status:
            raise WrongError(f"status {reply.status} instead of {status}: {reply.body[:200]!r}")
        error_of(reply)
        return REFUSED
    events = [event async for event in connection.events()]
    await connection.end()
    if '"error"' not in events[-1]:
        NATIVE.joined(events)
        return ANSWERED
    if any(event["stop"] for event in parsed(events[:-1])):
        raise WrongError("a stream with an end and an error")
    return REFUSED


async def ended_by_name(visit: Visit) -> str:
    """Somebody else ends it, while it waits or runs."""
    stream = visit.chance.random() < 0.5
    name = new_name()
    connection = await Connection.open(visit.address)
    try:
        await connection.ask("POST", NATIVE.path, {**NATIVE.body("Once", -1, stream), "ignore_eos": True}, {NAME: name})
        end = asyncio.ensure_future(_end(connection, stream, CANCELLED))
        await asyncio.sleep(visit.chance.random() * 0.5)
        # until the server has read it, or has answered already
        while not end.done():
            reply = await ask(visit.address, "DELETE", f"/v1/requests/{name}")
            if reply.status == 200:
                break
            if reply.status != 404:
                raise WrongError(f"status {reply.status}: {reply.body[:200]!r}")
            await asyncio.sleep(0.05)
        return await end
    finally:
        connection.close()


async def out_of_time(visit: Visit) -> str:
    stream = visit.chance.random() < 0.5
    body = {**NATIVE.body("Once", -1, stream), "ignore_eos": True, "timeout_s": 0.05 + visit.chance.random()}
    connection = await Connection.open(visit.address)
    try:
        await connection.ask("POST", NATIVE.path, body)
        return await _end(connection, stream, TIMED_OUT)
    finally:
        connection.close()


async def listed(visit: Visit) -> str:
    """Who is served and who waits."""
    reply = await ask(visit.address, "GET", "/v1/requests")
    if reply.status != 200 or not isinstance(reply.json()["data"], list):
        raise WrongError(f"status {reply.status}: {reply.body[:200]!r}")
    return ANSWERED


KINDS = (
    Kind("ended by name", 2, ended_by_name),
    Kind("out of time", 2, out_of_time),
    Kind("list of requests", 1, listed),
)
