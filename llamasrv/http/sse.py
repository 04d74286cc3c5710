"""Streams: the results of one request, each sent the moment it exists."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from flask import Response

from llamasrv.api import sse
from llamasrv.api.errors import ApiError
from llamasrv.engine.log import srv_dbg, srv_err
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import ErrorResult, ErrorType, Result
from llamasrv.http.channel import CLIENT_GONE, FLUSH_HEADERS, ON_GONE
from llamasrv.http.errors import error_response, stopping


class StreamFormat(Protocol):
    """One dialect of a stream. It sees the results in order and may keep state between them."""

    def frame(self, result: Result) -> bytes:
        """What to send for a result that is no error; b"": nothing."""

    def error(self, error: ApiError) -> bytes:
        """The last frame of a stream that fails after it has begun."""

    def end(self) -> bytes:
        """What follows the last result."""


class Client:
    """The other end of a request."""

    __slots__ = ("flush_headers", "is_gone", "on_gone")

    def __init__(self, environ: dict[str, Any]) -> None:
        #: Whether the connection is closed. Cheap, any thread.
        self.is_gone: Callable[[], bool] = environ.get(CLIENT_GONE, lambda: False)
        #: Send the response headers before the first byte of the body.
        self.flush_headers: Callable[[], None] = environ.get(FLUSH_HEADERS, lambda: None)
        #: Have this called, by another thread, when the connection closes.
        self.on_gone: Callable[[Callable[[], None]], None] = environ.get(ON_GONE, lambda call: None)


class EventStream:
    """Body of a streamed response, iterated by the worker that sends it.

    ``first`` is the result already received. After ``ping_s`` seconds of silence (0 or less: never) a comment is sent.
    """

    def __init__(self, reader: ResponseReader, first: Result, fmt: StreamFormat, client: Client, ping_s: int) -> None:
        self._reader = reader
        self._first = first
        self._format = fmt
        self._client = client
        self._ping_s = float(ping_s) if ping_s > 0 else None

    def __iter__(self) -> Iterator[bytes]:
        self._client.flush_headers()
        try:
            yield from self._frames()
        except Exception as exc:
            srv_err("stream", "exception in a stream: %r", exc)
            srv_dbg("stream", "%s", "".join(traceback.format_exception(exc)))
            yield self._format.error(ApiError(ErrorType.SERVER, str(exc) or type(exc).__name__))

    def _frames(self) -> Iterator[bytes]:
        reader, fmt, is_gone, ping_s = self._reader, self._format, self._client.is_gone, self._ping_s
        frame = fmt.frame
        result: Result | None = self._first
        while True:
            if result is not None:
                if isinstance(result, ErrorResult):
                    yield fmt.error(ApiError.from_result(result))
                    return
                chunk = frame(result)
                if chunk:
                    yield chunk
            elif is_gone():
                srv_dbg("stream", "the client has gone")
                return
            elif reader.terminated:
                yield fmt.error(stopping())
                return
            else:
                yield sse.PING
            if not reader.has_next():
                break
            result = reader.next(is_gone, ping_s)
        chunk = fmt.end()
        if chunk:
            yield chunk

    def close(self) -> None:
        """Called by the server when the response is over, however it ended."""
        self._reader.stop()


def stream_response(reader: ResponseReader, fmt: StreamFormat, client: Client, ping_s: int) -> Response:
    """Answer a posted request with a stream.

    Waits for the first result: a request that fails before it is a plain error with its own status. Takes over the
    reader and stops it in the end.
    """
    try:
        first = reader.next(client.is_gone)
        if first is None:
            reader.stop()
            return error_response(stopping())  # or nobody is left to read it
        if isinstance(first, ErrorResult):
            reader.stop()
            return error_response(ApiError.from_result(first))
    except BaseException:
        reader.stop()
        raise
    body = EventStream(reader, first, fmt, client, ping_s)
    return body_response(body)


def body_response(body: Iterable[bytes], headers: Mapping[str, str] | None = None) -> Response:
    """A stream with this body and more headers."""
    merged = {"X-Accel-Buffering": "no", **(headers or {})}
    # passed through: nothing of Flask runs between two chunks
    return Response(body, 200, merged, content_type="text/event-stream", direct_passthrough=True)
