"""The HTTP server: listeners, the I/O thread and the workers, over waitress."""

from __future__ import annotations

import logging
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.server import BaseWSGIServer

from llamasrv.engine.log import DEBUG, INFO, active, srv_dbg, srv_err, srv_trc, srv_wrn
from llamasrv.http.channel import ApiChannel, TlsChannel
from llamasrv.http.config import HttpConfig
from llamasrv.http.listen import Listener, open_listeners
from llamasrv.http.tls import TlsSocket, make_context
from llamasrv.http.workers import Job, Lanes

if TYPE_CHECKING:
    import ssl

    from _typeshed.wsgi import WSGIApplication

#: Seconds a connection without any request stays open.
KEEP_ALIVE_S = 120
#: Connections at most, if the system allows as many open files.
MAX_CONNECTIONS = 8192
#: Open files kept for everything that is no connection.
RESERVED_FILES = 256
#: Bytes of output queued for a slow reader before its worker waits for it.
HIGH_WATERMARK = 1 << 20
#: Connections accepted before the others are looked at again.
MAX_ACCEPTS = 128
#: Requests read ahead on one connection; above zero, so that a client that hangs up is noticed.
LOOKAHEAD = 4


class WaitressLog(logging.Handler):
    """Passes waitress's own log records on as lines of the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1]:
            text = f"{text}: {record.exc_info[1]!r}"
        if record.levelno >= logging.ERROR:
            srv_err("http", "%s", text)
        elif record.levelno >= logging.WARNING:
            srv_wrn("http", "%s", text)
        else:
            srv_dbg("http", "%s", text)


class ApiListener(BaseWSGIServer):
    """One listening socket inside the I/O loop."""

    socket: Any
    trigger: Any
    active_channels: Any
    _map: dict[int, Any]

    def __init__(self, owner: HttpServer, listener: Listener, socket_map: dict[int, Any], adj: Adjustments) -> None:
        self.owner = owner
        self.is_unix = listener.sock.family == socket.AF_UNIX
        self.channel_class = TlsChannel if owner.tls is not None else ApiChannel
        super().__init__(
            owner.app,
            map=socket_map,
            _sock=listener.sock,
            dispatcher=cast(Any, owner.lanes),
            adj=adj,
            sockinfo=(listener.sock.family, listener.sock.type, listener.sock.proto, None),
            bind_socket=False,
        )

    @property
    def is_draining(self) -> bool:
        """Whether the server is about to end, so that every connection ends after its answer."""
        return self.owner.is_draining

    def getsockname(self) -> tuple[str, str]:
        if self.is_unix:
            return "localhost", "0"
        host, port = self.socket.getsockname()[:2]
        return str(host), str(port)

    def set_socket_options(self, conn: Any) -> None:
        if not self.is_unix:
            conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fix_addr(self, addr: Any) -> Any:
        return ("localhost", None) if self.is_unix else addr

    def handle_accept(self) -> None:
        # not one per look at all connections: a crowd would keep everybody waiting who comes after it
        for _ in range(MAX_ACCEPTS):
            n_known = len(self._map)
            super().handle_accept()
            if len(self._map) == n_known:
                return

    def accept(self) -> Any:
        pair = super().accept()
        if pair is None or self.owner.tls is None:
            return pair
        conn, addr = pair
        return TlsSocket(conn, self.owner.tls), addr

    def maintenance(self, now: float) -> None:
        config = self.owner.config
        keep_alive = min(KEEP_ALIVE_S, config.timeout_read)
        for channel in list(self.active_channels.values()):
            if channel.is_overdue(now, keep_alive, config.timeout_read, config.timeout_write):
                # at once: a socket that takes nothing never becomes writable, which `will_close` would wait for
                channel.handle_close()


def connection_limit() -> int:
    """How many connections may be open at once. Raises the soft limit of open files towards the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (ValueError, OSError) as exc:
            srv_wrn("http", "cannot raise the limit of open files above %d: %s", soft, exc)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, soft - RESERVED_FILES))


class HttpServer:
    """Serves a WSGI application.

    :meth:`bind` claims the addresses, :meth:`start` begins to answer, :meth:`stop_accepting` and :meth:`shutdown`
    end it. ``is_short(method, path)`` names the requests that are answered from memory and therefore must be
    answered even when every worker is busy.
    """

    def __init__(self, app: WSGIApplication, config: HttpConfig, is_short: Callable[[str, str], bool]) -> None:
        self.app = app
        self.config = config
        self.tls: ssl.SSLContext | None = None
        self.is_draining = False
        self._is_short = is_short
        self._listeners: list[Listener] = []
        self._servers: list[ApiListener] = []
        self._map: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._ended = False
        self._lock = threading.Lock()

    @property
    def addresses(self) -> list[str]:
        """What is listened on, for people: ``http://127.0.0.1:8080``, ``unix:///run/llama.sock``."""
        return [listener.address for listener in self._listeners]

    @property
    def ports(self) -> list[int]:
        return [listener.port for listener in self._listeners]

    def bind(self) -> None:
        """Claim all addresses. Raises BindError, or TlsConfigError."""
        self.tls = make_context(self.config)
        if self.tls is not None:
            key, cert = self.config.ssl_file_key, self.config.ssl_file_cert
            srv_trc("init", "running with SSL: key = %s, cert = %s", key, cert)
        self._listeners = open_listeners(self.config)

    def start(self) -> None:
        """Begin to accept and answer."""
        bridge = logging.getLogger("waitress")
        if not any(isinstance(handler, WaitressLog) for handler in bridge.handlers):
            bridge.addHandler(WaitressLog())
        bridge.setLevel(logging.DEBUG if active(DEBUG) else logging.WARNING if active(INFO) else logging.ERROR)
        bridge.propagate = False

        srv_trc("init", "using %d threads for HTTP server", self.config.n_workers)
        self.lanes = Lanes(self.config.n_workers, self._is_short_job)
        adj = Adjustments(
            ident="llama.cpp",
            channel_request_lookahead=LOOKAHEAD,
            asyncore_use_poll=True,
            connection_limit=connection_limit(),
            cleanup_interval=1,
            outbuf_high_watermark=HIGH_WATERMARK,
            # never into temporary files: a full disk would cut connections
            inbuf_overflow=sys.maxsize,
            outbuf_overflow=sys.maxsize,
            max_request_body_size=self.config.max_body_bytes,
            clear_untrusted_proxy_headers=False,
            log_socket_errors=active(DEBUG),
            url_scheme="https" if self.tls is not None else "http",
            backlog=1024,
        )
        self._servers = [ApiListener(self, listener, self._map, adj) for listener in self._listeners]
        self._thread = threading.Thread(target=self._loop, name="http-io", daemon=True)
        self._thread.start()

    def stop_accepting(self) -> None:
        """Refuse new connections from now on; every open one ends after the answer under way. Any thread, any time."""
        with self._lock:
            if self.is_draining:
                return
            self.is_draining = True
        self._in_loop(self._close_listeners)

    def wait_until_quiet(self, timeout: float) -> None:
        """Return once all answers are given and sent, or after ``timeout`` seconds."""
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not self._is_quiet():
            time.sleep(0.01)

    def remove_files(self) -> None:
        """Leave no unix socket behind when the process is about to end without :meth:`shutdown`."""
        for listener in self._listeners:
            listener.remove_file()

    def shutdown(self, grace_s: float) -> bool:
        """End. Requests under way get up to ``grace_s`` seconds, then their connections are cut.

        True when no worker is left at work afterwards.
        """
        self.stop_accepting()
        if self._thread is None:
            self._close_listeners()
            return True
        deadline = time.monotonic() + grace_s
        self.wait_until_quiet(grace_s)
        self._in_loop(self._end)
        self._thread.join(timeout=1.0)
        ended = self.lanes.shutdown(timeout=max(0.2, deadline - time.monotonic()))
        if ended and not self._thread.is_alive():
            # not before: a worker that pulls a closed trigger would write into whatever has its descriptor by then
            for server in self._servers:
                server.trigger.close()
        return ended

    def _is_short_job(self, job: Job) -> bool:
        channel = cast(ApiChannel, job)
        request: Any = channel.requests[0]
        # a part of a file is read piece by piece
        is_short = bool(request.error) or (
            "RANGE" not in request.headers and self._is_short(request.command, request.path)
        )
        channel.may_wait = not is_short
        return is_short

    def _is_quiet(self) -> bool:
        """Whether all answers have been given and sent."""
        channels = [channel for server in self._servers for channel in list(server.active_channels.values())]
        return not self.lanes.n_busy and not any(channel.total_outbufs_len for channel in channels)

    # -- the I/O thread

    def _in_loop(self, call: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._servers[0].trigger.pull_trigger(call)
        else:
            call()

    def _loop(self) -> None:
        while not self._ended:
            try:
                wasyncore.poll2(1.0, self._map)
            except Exception as exc:  # one bad connection must not end the service for all others
                srv_err("http", "I/O loop: %r", exc)
                time.sleep(0.05)
        for server in self._servers:
            for channel in list(server.active_channels.values()):
                try:
                    channel.handle_close()
                except Exception as exc:
                    srv_dbg("http", "closing a connection: %r", exc)

    def _close_listeners(self) -> None:
        for server in self._servers:
            # only the listening socket: the trigger still has to wake the loop
            server.accepting = False
            server.del_channel()
        for listener in self._listeners:
            listener.close()
        for server in self._servers:
            for channel in list(server.active_channels.values()):
                if not channel.requests and channel.request is None and not channel.total_outbufs_len:
                    channel.will_close = True

    def _end(self) -> None:
        self._ended = True
