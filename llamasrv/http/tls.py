"""TLS for accepted connections. Waitress itself has none."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading

from llamasrv.http.config import HttpConfig

#: Largest TLS record. A send that has to be repeated must not shrink, so nothing longer is ever offered.
RECORD_BYTES = 16384


class TlsConfigError(RuntimeError):
    """Key and certificate cannot be used; the text says why."""


def make_context(config: HttpConfig) -> ssl.SSLContext | None:
    """The server's TLS context, or None when neither key nor certificate is given. Raises :class:`TlsConfigError`."""
    key, cert = config.ssl_file_key, config.ssl_file_cert
    if not key and not cert:
        return None
    if not key or not cert:
        # serving plain HTTP to somebody who asked for TLS would be worse than not serving
        raise TlsConfigError("--ssl-key-file and --ssl-cert-file must be given together")
    for path in (key, cert):
        try:
            with open(path, "rb"):
                pass
        except OSError as exc:
            raise TlsConfigError(f"cannot read '{path}': {exc.strerror}") from exc
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # an empty password, so that an encrypted key is an error instead of a prompt
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as exc:
        raise TlsConfigError(f"cannot use key '{key}' with certificate '{cert}': {exc}") from exc
    return context


class TlsSocket:
    """A non-blocking server side of a TLS connection with the few methods a channel needs.

    A worker sends while the I/O thread receives; OpenSSL allows one at a time, so calls take turns. None of them
    blocks: what would is a BlockingIOError, as with a plain socket.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        sock.setblocking(False)
        self._ssl = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self._lock = threading.Lock()
        self.handshaken = False
        #: Whether the handshake waits for the socket to become writable rather than readable.
        self.want_write = False

    def do_handshake(self) -> bool:
        """Go on with the handshake; True once it is complete. Raises OSError when it failed."""
        try:
            with self._lock:
                self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self.want_write = False
            return False
        except ssl.SSLWantWriteError:
            self.want_write = True
            return False
        self.want_write = False
        self.handshaken = True
        return True

    def recv(self, size: int) -> bytes:
        """Decrypted bytes, b"" at the end. Raises BlockingIOError, or OSError when the connection is broken."""
        try:
            with self._lock:
                return self._ssl.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""
        except ssl.SSLError as exc:
            raise OSError(errno.ECONNRESET, str(exc)) from exc

    def send(self, data: bytes) -> int:
        """Bytes taken, one TLS record at most. Raises as :meth:`recv`; then offer the same bytes, or more, again."""
        try:
            with self._lock:
                return self._ssl.send(data[:RECORD_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        except ssl.SSLError as exc:
            raise OSError(errno.ECONNRESET, str(exc)) from exc

    def pending(self) -> int:
        """Bytes already decrypted, of which poll() knows nothing."""
        with self._lock:
            return self._ssl.pending()

    def shutdown(self, how: int) -> None:
        """Tell the peer that no more data comes. ``how`` is SHUT_WR."""
        # not complete before the peer answers, which nobody waits for
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._ssl.unwrap()

    def close(self) -> None:
        if self.handshaken:
            self.shutdown(socket.SHUT_WR)
        with self._lock:
            self._ssl.close()

    def fileno(self) -> int:
        return self._ssl.fileno()

    def setblocking(self, flag: bool) -> None:
        self._ssl.setblocking(flag)

    def getsockopt(self, level: int, option: int) -> int:
        return self._ssl.getsockopt(level, option)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._ssl.setsockopt(level, option, value)
