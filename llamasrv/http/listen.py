"""Listening sockets: TCP over IPv4 and IPv6, and unix sockets."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from llamasrv.http.config import HttpConfig

BACKLOG = 1024


class BindError(RuntimeError):
    """A listening socket could not be made; the text names the host, the port and the system's reason."""


@dataclass(slots=True)
class Listener:
    """A socket that listens. ``address`` is what people are told, such as ``http://127.0.0.1:8080``."""

    sock: socket.socket
    address: str
    #: Path, device and inode of a unix socket's file.
    unix_path: str = ""
    unix_inode: tuple[int, int] = (0, 0)

    @property
    def port(self) -> int:
        """TCP port; 0 for a unix socket."""
        return 0 if self.unix_path else int(self.sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self.sock.close()
        self.remove_file()

    def remove_file(self) -> None:
        """Remove a unix socket's file unless it is no longer ours."""
        if self.unix_path:
            with contextlib.suppress(OSError):
                info = os.lstat(self.unix_path)
                if (info.st_dev, info.st_ino) == self.unix_inode:
                    os.unlink(self.unix_path)
            self.unix_path = ""


def is_unix(host: str) -> bool:
    return host.endswith(".sock")


def open_listeners(config: HttpConfig) -> list[Listener]:
    """One listener per host, all or none. Raises :class:`BindError`."""
    n_tcp = sum(not is_unix(host) for host in config.hostnames)
    if config.port == 0 and n_tcp > 1:
        raise BindError("--port 0 is not supported with multiple TCP addresses")
    scheme = "https" if config.is_tls else "http"
    listeners: list[Listener] = []
    try:
        for host in config.hostnames:
            try:
                if is_unix(host):
                    listeners.append(_open_unix(host))
                else:
                    # with several addresses [::] must not claim 0.0.0.0 too
                    sock = _open_tcp(host, config.port, config.reuse_port, v6only=n_tcp > 1)
                    shown = f"[{host}]" if ":" in host else host
                    listeners.append(Listener(sock, f"{scheme}://{shown}:{sock.getsockname()[1]}"))
            except (OSError, UnicodeError) as exc:
                reason = (isinstance(exc, OSError) and exc.strerror) or str(exc)
                raise BindError(
                    f"couldn't bind HTTP server socket, hostname: {host}, port: {config.port}: {reason}"
                ) from exc
    except BindError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _open_tcp(host: str, port: int, reuse_port: bool, v6only: bool) -> socket.socket:
    """The first address of ``host`` that can be bound. Raises OSError or UnicodeError."""
    if not 0 <= port <= 65535:  # getaddrinfo() would take it modulo 65536
        raise OSError(errno.EINVAL, "the port must be between 0 and 65535")
    families = {socket.AF_INET, socket.AF_INET6}
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failure: OSError = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, kind, proto, _, address in found:
        if family not in families:
            continue
        try:
            sock = socket.socket(family, kind, proto)
        except OSError as exc:
            failure = exc
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(v6only))
            sock.bind(address)
            sock.listen(BACKLOG)
            return sock
        except OSError as exc:
            failure = exc
            sock.close()
    raise failure


def _open_unix(path: str) -> Listener:
    """Listen on a path, replacing a socket that nobody listens on any more. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # bind and listen under the lock: to the probe of another server a socket not yet listening looks dead
        with _folder_lock(path):
            _remove_dead_socket(path)
            sock.bind(path)
            info = os.lstat(path)
            sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, f"unix://{path}", path, (info.st_dev, info.st_ino))


@contextlib.contextmanager
def _folder_lock(path: str) -> Iterator[None]:
    """Keep two servers from replacing the same dead socket at the same time."""
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_dead_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except (BlockingIOError, TimeoutError):  # its backlog is full: somebody is there
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
