"""One connection, and the answer to one request on it: what differs from waitress's own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from http.client import responses
from typing import Any

from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.task import ErrorTask, WSGITask
from waitress.utilities import build_http_date

from llamasrv.http.access import log_access
from llamasrv.http.errors import JSON_TYPE, http_error_json
from llamasrv.http.requests import ID_HEADER, RequestRecord, request_id
from llamasrv.http.tls import RECORD_BYTES, TlsSocket

RECV_BYTES = 65536
#: How long a connection closed before its request was read stays open for reading, so that the answer is not lost.
LINGER_S = 5.0
#: How long a request's headers may take, seconds.
HEADERS_S = 60.0
#: Key of the WSGI environment: a callable that sends the response headers now, before the first body byte.
FLUSH_HEADERS = "llamasrv.flush_headers"
#: Key of the WSGI environment: a callable that tells whether the client has gone.
CLIENT_GONE = "waitress.client_disconnected"
#: Key of the WSGI environment: a callable that takes what is to be called, once, when the client has gone.
ON_GONE = "llamasrv.on_gone"
#: Key of the WSGI environment: a list of what is to be called with the status, and whether the client left before the
#: end, when the response has been handed over or given up.
AT_END = "llamasrv.at_end"


def _header_block(task: Any) -> bytes:
    """Status line and headers. A response without a length is chunked and the connection goes on, as in HTTP/1.1."""
    length: str | None = None
    code = task.status[:3]
    lines = [f"HTTP/{task.version} {code} {responses.get(int(code), '')}", f"Server: {task.channel.adj.ident}"]
    for name, value in task.response_headers:
        if name.lower() == "content-length":
            length = value
            if not task.has_body:
                continue
        if name.lower() != "connection":
            lines.append(f"{name}: {value}")
    if length is None and task.content_length is not None and task.has_body:
        length = str(task.content_length)
        lines.append(f"Content-Length: {length}")
    lines.append(f"Date: {build_http_date(task.start_time)}")

    connection = task.request.headers.get("CONNECTION", "").lower()
    if task.version == "1.0":
        if connection != "keep-alive" or (length is None and task.has_body):
            task.close_on_finish = True
        elif not task.close_on_finish:
            lines.append("Connection: keep-alive")
    else:
        if "close" in (token.strip() for token in connection.split(",")):
            task.close_on_finish = True
        if length is None and task.has_body:
            lines.append("Transfer-Encoding: chunked")
            task.chunked_response = True
    if task.channel.server.is_draining or task.channel.peer_ended:
        task.close_on_finish = True
    if task.close_on_finish:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class HttpTask(WSGITask):
    """Runs the WSGI application for one request."""

    channel: Any
    request: Any

    #: The client went before the response was complete. One that goes right after its last byte did not leave.
    client_left = False

    def build_response_header(self) -> bytes:
        return _header_block(self)

    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        # waitress drops extra leading slashes; "//health" is no route
        environ["PATH_INFO"] = self.request.path
        environ[FLUSH_HEADERS] = self._flush_headers
        environ[CLIENT_GONE] = self._client_gone
        environ[ON_GONE] = self.channel.on_gone
        environ.setdefault(AT_END, [])
        return environ

    def execute(self) -> None:
        status = 500
        try:
            super().execute()
            status = int(self.status[:3])
        except BaseException as exc:
            self.client_left |= isinstance(exc, ClientDisconnected)
            if self.wrote_header:
                status = int(self.status[:3])
            raise
        finally:
            for call in self.get_environment()[AT_END]:
                call(status, self.client_left)

    def _client_gone(self) -> bool:
        self.client_left |= self.channel.check_client_disconnected()
        return self.client_left

    def _flush_headers(self) -> None:
        self.write(b"")

    def write(self, data: bytes) -> None:
        # the way of every streamed chunk, free of what only other responses need
        if self.chunked_response and data:
            self.channel.write_soon(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            super().write(data)


class JsonErrorTask(ErrorTask):
    """Answers what is no valid HTTP request, or a failure of the application itself."""

    channel: Any
    request: Any
    response_headers: list[tuple[str, str]]

    def build_response_header(self) -> bytes:
        return _header_block(self)

    def execute(self) -> None:
        error = self.request.error
        record = self._record()
        body = http_error_json(error.code, error.body)
        self.status = f"{error.code} {error.reason}"
        self.response_headers += [("Content-Type", JSON_TYPE), (ID_HEADER, record.id)]
        self.content_length = len(body)
        self.close_on_finish = True
        self.channel.linger = True
        self.write(body)
        if error.code != 500:  # a failure of the application has its line already
            log_access(record, error.code, False)

    def _record(self) -> RequestRecord:
        """What is known of the request; where its first line could not be read, that is little."""
        request = self.request
        host, port = self.channel.addr
        return RequestRecord(
            id=request_id(request.headers.get("X_REQUEST_ID", "")),
            method=getattr(request, "command", None) or "-",
            path=getattr(request, "path", None) or "-",
            caller=f"{host}:{port}" if port else str(host),
        )


class RequestParser(HTTPRequestParser):
    """Refuses two things that waitress lets through.

    A request with two lengths: whoever stands before this server may go by the other one. And an address that cannot be
    taken apart, like ``http://[``, which would end the connection without an answer.
    """

    def parse_header(self, header_plus: bytes) -> None:
        try:
            super().parse_header(header_plus)
        except ValueError:
            raise ParsingError("Bad URI") from None
        if self.chunked and "CONTENT_LENGTH" in self.headers:
            raise ParsingError("Content-Length beside Transfer-Encoding")
        if "TRANSFER_ENCODING" in self.headers:  # of HTTP/1.0, which has no such thing
            raise ParsingError("Transfer-Encoding in HTTP/1.0")


class ApiChannel(HTTPChannel):
    """A connection whose chunks leave from the worker's thread, at once."""

    server: Any
    socket: Any

    parser_class = RequestParser
    task_class = HttpTask
    error_task_class = JsonErrorTask

    #: Close only after the peer had a chance to read the answer to a request that was not read to its end.
    linger = False
    #: The peer has sent its last byte: it has gone, or only shut its sending side and still reads.
    peer_ended = False
    #: The thread at work may wait for a slow reader. Those of short answers are too few for that.
    may_wait = True
    _call_when_gone: Callable[[], None] | None = None
    _linger_until = 0.0
    _request_began = 0.0

    def check_client_disconnected(self) -> bool:  # type: ignore[override]  # the stub is wrong
        return self.peer_ended or not self.connected

    def on_gone(self, call: Callable[[], None]) -> None:
        """Have the I/O thread do this if the client goes during the request under way; at once if it has gone."""
        self._call_when_gone = call
        if self.check_client_disconnected():
            call()

    def service(self) -> None:
        super().service()
        self._call_when_gone = None
        if (self.peer_ended or self.server.is_draining) and not self.requests:
            self.close_when_flushed = True
            self.server.pull_trigger()

    def write_soon(self, data: Any) -> int:
        """Send, or queue what the socket does not take. Blocks while too much is queued.

        Raises :class:`ClientDisconnected` when the connection is gone.
        """
        if not self.total_outbufs_len and type(data) is bytes:
            with self.outbuf_lock:
                if not self.connected:
                    raise ClientDisconnected
                if not self.total_outbufs_len:
                    size = len(data)
                    try:
                        sent = self.socket.send(data)
                    except BlockingIOError:
                        sent = 0
                    except OSError:
                        self.will_close = True
                        self.server.pull_trigger()
                        raise ClientDisconnected from None
                    if sent == size:
                        self.last_activity = time.time()
                        return size
                    data = data[sent:]
        super().write_soon(data)
        return len(data)

    def _flush_outbufs_below_high_watermark(self) -> None:
        if self.may_wait:
            super()._flush_outbufs_below_high_watermark()  # type: ignore[misc]  # missing in the stub

    # -- the I/O thread

    def readable(self) -> bool:
        return not self.peer_ended and bool(super().readable())

    def handle_read(self) -> None:
        while True:
            try:
                data = self.socket.recv(RECV_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # long work ends by itself when it sees this; a quick answer still goes out
                self.peer_ended = True
                self._tell_gone()
                if not self.requests:  # in this order: service() looks at them in the other one
                    self.handle_close()
                return
            if self._linger_until:
                return
            self.last_activity = time.time()
            self.received(data)
            if not self._pending():
                return

    def handle_close(self) -> None:
        super().handle_close()
        self._tell_gone()

    def _tell_gone(self) -> None:
        call = self._call_when_gone
        if call is not None:
            call()

    def handle_write(self) -> None:
        if self.linger and self.close_when_flushed and not self.total_outbufs_len and not self.will_close:
            self.close_when_flushed = False
            self._linger_until = time.time() + LINGER_S
            try:
                self.socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.will_close = True
            return
        super().handle_write()

    def received(self, data: bytes) -> bool:
        if self.request is None:
            self._request_began = time.time()
        return bool(super().received(data))

    def is_overdue(self, now: float, keep_alive: float, timeout_read: float, timeout_write: float) -> bool:
        """Whether the peer has been silent for too long: unread output, a request half sent, or nothing to do."""
        if self._linger_until:
            return now > self._linger_until
        silence = now - self.last_activity
        if self.total_outbufs_len:
            return silence > timeout_write
        if self.requests:
            return False
        if self.request is None:
            return silence > keep_alive
        return silence > timeout_read or (not self.request.headers_finished and now - self._request_began > HEADERS_S)

    def _pending(self) -> bool:
        return False


class TlsChannel(ApiChannel):
    """The same over TLS."""

    socket: TlsSocket

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a repeated send must not offer less than the first, see TlsSocket.send()
        self.sendbuf_len = max(self.sendbuf_len, RECORD_BYTES)

    def handle_read(self) -> None:
        if self.socket.handshaken or self._handshake():
            super().handle_read()

    def handle_write(self) -> None:
        if self.socket.handshaken or self.will_close:
            super().handle_write()
        else:
            self._handshake()

    def writable(self) -> Any:
        return super().writable() or (self.connected and self.socket.want_write)

    def _handshake(self) -> bool:
        try:
            return self.socket.do_handshake()
        except OSError:  # no TLS, or none that we accept
            self.handle_close()
            return False

    def _pending(self) -> bool:
        return self.connected and self.socket.pending() > 0
