"""Streams that outlive their connection: what writes them, and the routes under which they are read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flask import Response, request

from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.jsonio import parse_object
from llamasrv.engine.log import srv_dbg, srv_trc
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import ErrorType
from llamasrv.engine.task import Task
from llamasrv.http.errors import error_response, json_response
from llamasrv.http.route import Route
from llamasrv.http.sse import Client, EventStream, StreamFormat, body_response, stream_response
from llamasrv.http.state import ServerState
from llamasrv.stream.session import OffsetLostError, StreamSession
from llamasrv.stream.sessions import StreamSessions

#: Key of the WSGI environment for the header X-Conversation-Id.
CONVERSATION = "HTTP_X_CONVERSATION_ID"
#: Header of a replay: where in the stream its first byte lies.
OFFSET_HEADER = "X-Stream-Offset"


def attach(
    state: ServerState,
    environ: dict[str, Any],
    reader: ResponseReader,
    tasks: Sequence[Task],
    fmt: StreamFormat,
    client: Client,
) -> Response:
    """Post the tasks of a request and answer with a stream; a request that names its conversation can be resumed.

    Takes over the reader.
    """
    ping_s = tasks[0].params.sse_ping_interval
    # as WSGI has it, header bytes come as Latin-1
    name = environ.get(CONVERSATION, "").encode("latin-1").decode("utf-8", "replace")
    if not name:
        reader.post_tasks(list(tasks))
        return stream_response(reader, fmt, client, ping_s)

    # before the conversation's former stream is ended for nothing
    reader.reserve(list(tasks))
    session = state.streams.create_or_replace(name)
    srv_trc("stream", "conv_id=%s", name)
    try:
        reader.post_tasks(list(tasks))
        response = stream_response(reader, fmt, _Detached(client, session), ping_s)
    except BaseException:
        state.streams.evict(session)
        raise
    source: object = response.response
    if isinstance(source, EventStream):
        response.response = ResumableStream(source, session)
        return response
    # it failed before it began: nothing to come back to
    state.streams.evict(session)
    return error_response(invalid_request("the request was cancelled")) if session.is_cancelled else response


class _Detached(Client):
    """A client whose going does not end the work; only a cancelled session does."""

    __slots__ = ()

    def __init__(self, client: Client, session: StreamSession) -> None:
        def flush_headers() -> None:
            try:
                client.flush_headers()
            except Exception as exc:
                srv_dbg("stream", "the client has gone before the first byte: %r", exc)

        self.is_gone = lambda: session.is_cancelled
        self.flush_headers = flush_headers
        self.on_gone = client.on_gone


class ResumableStream:
    """Body of a response whose chunks are kept in a session as well.

    When the connection drops, the worker that was sending goes on without it to the end.
    """

    def __init__(self, source: EventStream, session: StreamSession) -> None:
        self._source = source
        self._session = session
        self._chunks = self._kept(iter(source))

    def _kept(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        session = self._session
        for chunk in chunks:
            session.append(chunk)
            if session.is_cancelled:
                return
            yield chunk

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        """Called by the server when the response is over, however it ended."""
        try:
            for _ in self._chunks:
                pass
        finally:
            self._source.close()
            self._session.finalize()


class Replay:
    """Body of a response that reads a session."""

    def __init__(self, session: StreamSession, offset: int, client: Client) -> None:
        self._session = session
        self._offset = offset
        self._client = client

    def __iter__(self) -> Iterator[bytes]:
        client, session = self._client, self._session
        client.on_gone(session.wake)
        client.flush_headers()
        offset = self._offset
        while True:
            try:
                data = session.read(offset, client.is_gone)
            except OffsetLostError as exc:
                srv_dbg("stream", "a reader was too slow: %s", exc)
                return
            if not data:
                return
            offset += len(data)
            yield data


def routes(state: ServerState) -> list[Route]:
    streams: StreamSessions = state.streams

    def conversation() -> str:
        name = request.args.get("conv_id", "")
        if not name:
            raise invalid_request("Missing conversation id in path")
        return name

    def replay() -> Response:
        session = streams.get(conversation())
        if session is None:
            raise ApiError(ErrorType.NOT_FOUND, "Stream not found or expired")
        text = request.args.get("from", "") or "0"
        if not (text.isascii() and text.isdigit()):
            raise invalid_request("Invalid 'from' offset")
        try:
            offset = session.frame_start(int(text[:20]))
        except OffsetLostError:
            raise invalid_request("Stream offset lost, please restart") from None
        return body_response(Replay(session, offset, Client(request.environ)), {OFFSET_HEADER: str(offset)})

    def lookup() -> Response:
        ids = parse_object(request.get_data()).get("conversation_ids")
        wanted = [name for name in ids if isinstance(name, str) and name] if isinstance(ids, list) else []
        return json_response(
            [
                {
                    "conversation_id": session.conversation_id,
                    "is_done": session.is_done,
                    "total_bytes": session.total_bytes,
                    "started_at": session.started_at,
                    "completed_at": session.completed_at,
                }
                for session in streams.find(wanted)
            ]
        )

    def cancel() -> Response:
        streams.cancel(conversation())
        return Response(status=204, content_type="application/json")

    return [
        Route("GET", "/v1/stream", replay),
        Route("POST", "/v1/streams/lookup", lookup, is_short=True),
        Route("DELETE", "/v1/stream", cancel, is_short=True),
    ]
