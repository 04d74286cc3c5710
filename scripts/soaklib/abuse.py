"""Visits that leave, dawdle, or send what is no request."""

from __future__ import annotations

import asyncio
import json

from soaklib.dialects import CHAT, NATIVE
from soaklib.friendly import words
from soaklib.ledger import ANSWERED, BUSY, LEFT, REFUSED
from soaklib.visit import Kind, Visit, is_busy, json_of, refused
from soaklib.wire import Connection, LostError, WrongError, ask, request_bytes, request_head

# -- clients that leave


def _endless(visit: Visit, stream: bool) -> bytes:
    """A request that would take long if somebody waited for its end."""
    known = visit.known()
    n_cmpl = {"n_cmpl": 2} if known.dialect is NATIVE and visit.chance.random() < 0.2 else {}
    body = {**known.dialect.body(known.prompt + words(visit, 3), 500, stream), "ignore_eos": True, **n_cmpl}
    return request_bytes("POST", known.dialect.path, body)


async def _pause(visit: Visit, longest: float) -> None:
    await asyncio.sleep(visit.chance.random() * longest)


def _leave(visit: Visit, connection: Connection) -> str:
    if visit.chance.random() < 0.5:
        connection.hang_up()
    else:
        connection.close()
    return LEFT


async def leave_in_head(visit: Visit) -> str:
    """Nothing, or a part of the headers."""
    data = _endless(visit, True)
    connection = await Connection.open(visit.address)
    await connection.send(data[: visit.chance.randint(0, data.index(b"\r\n\r\n"))])
    await _pause(visit, 0.3)
    return _leave(visit, connection)


async def leave_in_body(visit: Visit) -> str:
    data = _endless(visit, True)
    connection = await Connection.open(visit.address)
    await connection.send(data[: visit.chance.randint(data.index(b"\r\n\r\n") + 4, len(data) - 1)])
    await _pause(visit, 0.3)
    return _leave(visit, connection)


async def leave_in_queue(visit: Visit) -> str:
    """Soon after the request, before anything came."""
    connection = await Connection.open(visit.address)
    await connection.send(_endless(visit, visit.chance.random() < 0.5))
    await _pause(visit, 0.5)
    return _leave(visit, connection)


async def leave_in_stream(visit: Visit) -> str:
    """After a few events."""
    connection = await Connection.open(visit.address)
    await connection.send(_endless(visit, True))
    if await connection.head() != 200:
        if is_busy(await connection.rest()):
            return BUSY
        raise WrongError(f"status {connection.status} for a stream")
    n_events = visit.chance.randint(0, 12)
    events = connection.events()
    async for _ in events:
        if not n_events:
            break
        n_events -= 1
    return _leave(visit, connection)


async def leave_in_prompt(visit: Visit) -> str:
    """While a long prompt is evaluated."""
    prompt = [visit.chance.randrange(10, 250) for _ in range(visit.scene.n_ctx * 3 // 4)]
    connection = await Connection.open(visit.address)
    await connection.ask("POST", "/completion", {"prompt": prompt, "n_predict": 1})
    await _pause(visit, 2.0)
    return _leave(visit, connection)


# -- bodies that are none


def _nested(depth: int) -> list[tuple[str, bytes]]:
    """Requests that are nested this deeply, in various places."""
    array = "[" * depth + "]" * depth
    item = '{"type":"array","items":' * depth + "{}" + "}" * depth
    messages = '"messages":[{"role":"user","content":"hi"}]'
    return [
        ("/completion", b"[" * depth),
        ("/completion", f'{{"prompt":{array}}}'.encode()),
        ("/v1/chat/completions", f'{{"messages":[{{"role":"user","content":{array}}}]}}'.encode()),
        ("/v1/messages", f'{{"max_tokens":3,"messages":[{{"role":"user","content":{array}}}]}}'.encode()),
        ("/v1/responses", f'{{"input":{array}}}'.encode()),
        ("/v1/chat/completions", f'{{{messages},"tools":{array}}}'.encode()),
        ("/completion", f'{{"prompt":"x","n_predict":3,"json_schema":{item}}}'.encode()),
        ("/completion", json.dumps({"prompt": "x", "grammar": f'root ::= {"(" * depth}"a"{")" * depth}'}).encode()),
    ]


async def nested(visit: Visit) -> str:
    path, body = visit.chance.choice(_nested(visit.chance.choice([600, 20000, 200000])))
    return refused(await ask(visit.address, "POST", path, body), 400)


MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("/completion", b""),
    ("/completion", b"{"),
    ("/completion", b'{"prompt": "x"'),
    ("/completion", b'{"prompt": "x",}'),
    ("/completion", b"\xff\xfe\x00"),
    ("/completion", b"[]"),
    ("/completion", b"{}"),
    ("/completion", b'{"prompt": {"a": 1}}'),
    ("/completion", b'{"prompt": [1, -1]}'),
    ("/completion", b'{"prompt": [1, 99999999]}'),
    ("/completion", b'{"prompt": "x", "grammar": "root ::= ("}'),
    ("/v1/chat/completions", b"{}"),
    ("/v1/chat/completions", b'{"messages": "hello"}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 7}]}'),
    ("/v1/messages", b"{}"),
    ("/v1/responses", b"{}"),
    ("/tokenize", b"\x00"),
    ("/detokenize", b'{"tokens": [99999999]}'),
)
WRONG_TYPES: tuple[tuple[str, bytes], ...] = (
    ("/completion", b'{"prompt": "x", "n_predict": "many"}'),
    ("/completion", b'{"prompt": "x", "temperature": [1]}'),
    ("/completion", b'{"prompt": "x", "stop": {"a": 1}}'),
    ("/completion", b'{"prompt": "x", "n_cmpl": 100000}'),
    ("/completion", b'{"prompt": "x", "id_slot": {}}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": {}}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "response_format": "json"}'),
)


async def malformed(visit: Visit) -> str:
    path, body = visit.chance.choice(MALFORMED)
    return refused(await ask(visit.address, "POST", path, body), 400)


async def wrong_types(visit: Visit) -> str:
    path, body = visit.chance.choice(WRONG_TYPES)
    return refused(await ask(visit.address, "POST", path, body), 400)


async def no_route(visit: Visit) -> str:
    method, path = visit.chance.choice([("GET", "/no-such"), ("POST", "/v1/no/such"), ("DELETE", "/completion")])
    return refused(await ask(visit.address, method, path), 404, 405)


async def oversized(visit: Visit) -> str:
    """A body of a terabyte is announced."""
    head = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(1 << 40)}
    connection = await Connection.open(visit.address)
    try:
        await connection.send(request_head("POST", "/completion", head) + b'{"prompt": "')
        return refused(await connection.reply(), 413, 400)
    finally:
        connection.close()


GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /completion HTTP/1.1\r\nContent-Length: minus\r\n\r\n",
    b"POST /completion HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
    b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X-Header: x\r\n" * 30_000 + b"\r\n",
)


async def garbage(visit: Visit) -> str:
    """What is no HTTP: an error, or the end of the connection."""
    connection = await Connection.open(visit.address)
    try:
        await connection.send(visit.chance.choice(GARBAGE))
        connection.writer.write_eof()
        await connection.head()
        if connection.status < 400 or connection.status >= 500:
            raise WrongError(f"status {connection.status} for what is no request")
        await connection.body()
    except (LostError, OSError):
        if connection.status:
            raise
    finally:
        connection.close()
    return REFUSED


async def slow(visit: Visit) -> str:
    """A request that comes a few bytes at a time."""
    known = visit.known(NATIVE)
    data = request_bytes("POST", NATIVE.path, known.body(False))
    connection = await Connection.open(visit.address)
    try:
        size = len(data) // 20 + 1
        for start in range(0, len(data), size):
            await connection.send(data[start : start + size])
            await asyncio.sleep(0.1)
        reply = await connection.reply()
        if is_busy(reply):
            return BUSY
        known.check(NATIVE.text(json_of(reply)))
        await connection.end()
    finally:
        connection.close()
    return ANSWERED


async def in_chunks(visit: Visit) -> str:
    """A request without a length."""
    known = visit.known(CHAT)
    head = {"Host": "x", "Content-Type": "application/json", "Transfer-Encoding": "chunked", "Connection": "close"}
    body = json.dumps(known.body(False)).encode()
    connection = await Connection.open(visit.address)
    try:
        await connection.send(request_head("POST", CHAT.path, head))
        for start in range(0, len(body), 50):
            piece = body[start : start + 50]
            await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await connection.send(b"0\r\n\r\n")
        reply = await connection.reply()
        if is_busy(reply):
            return BUSY
        known.check(CHAT.text(json_of(reply)))
        await connection.end()
    finally:
        connection.close()
    return ANSWERED


KINDS = (
    Kind("leaves in the headers", 2, leave_in_head),
    Kind("leaves in the body", 2, leave_in_body),
    Kind("leaves in the queue", 5, leave_in_queue),
    Kind("leaves in the stream", 4, leave_in_stream),
    Kind("leaves in a long prompt", 1, leave_in_prompt),
    Kind("nested deeply", 2, nested),
    Kind("malformed body", 4, malformed),
    Kind("wrong types", 2, wrong_types),
    Kind("no route", 1, no_route),
    Kind("oversized body", 1, oversized),
    Kind("no HTTP", 1, garbage),
    Kind("slow body", 2, slow),
    Kind("chunked body", 2, in_chunks),
)
