"""A server under test as a subprocess: ours (``python -m llamasrv``) or any other with the same flags and routes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

OURS = (sys.executable, "-m", "llamasrv")
ROOT = Path(__file__).resolve().parent.parent


def patched(code: str) -> tuple[str, ...]:
    """Command of our server in which ``code`` has changed something."""
    return sys.executable, "-c", f"{code}\nimport sys\nfrom llamasrv.cli.main import main\nsys.exit(main(sys.argv[1:]))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(slots=True)
class Stream:
    """An open SSE response. Iterating yields the JSON of each ``data:`` frame; ``[DONE]`` ends it.

    Raw frames, comments too, are kept in ``lines``. Closing early hangs up.
    """

    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    sock: socket.socket
    lines: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        return self.response.status

    def __iter__(self) -> Iterator[Any]:
        for raw in self.response:
            line = raw.decode().rstrip("\r\n")
            if not line:
                continue
            self.lines.append(line)
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[len("data: ") :])

    def read(self) -> bytes:
        """The rest of the body as it is."""
        return self.response.read()

    def hang_up(self) -> None:
        """Close at the TCP level at once, whatever is still to come."""
        with contextlib.suppress(OSError):  # closed already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self.connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.response.close()
        self.connection.close()


class ServerError(AssertionError):
    """The server did not start or did not end as it should; the text has the tail of its log."""


class ServerProcess:
    """Starts on entering (or :meth:`start`), waits for /health, is killed on leaving if it still runs."""

    def __init__(
        self,
        *flags: str | os.PathLike[str] | float,
        command: Sequence[str] = OURS,
        env: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> None:
        self.flags = [str(flag) for flag in flags]
        self.command = list(command)
        self.timeout = timeout
        self.health_path = "/health"
        self.port = 0
        # settings of the caller's shell must not leak into the server under test
        self.env = {
            key: value for key, value in os.environ.items() if not key.startswith(("LLAMA_ARG_", "LLAMA_SERVER_"))
        }
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.env.update(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process

    @property
    def is_ours(self) -> bool:
        return tuple(self.command) == OURS

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        # pread: the child writes through the same open file, its position must stay
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def start(self, wait: bool = True) -> ServerProcess:
        self.port = free_port()
        command = [*self.command, "--host", "127.0.0.1", "--port", str(self.port), *self.flags]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=self.env)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with code {self.process.returncode}\n{self.log[-4000:]}")
            try:
                if self.get(self.health_path, timeout=2.0).status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.02)
        raise ServerError(f"the server was not ready within {self.timeout} s\n{self.log[-4000:]}")

    def stop(self, timeout: float = 60.0) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"the server did not end within {timeout} s of SIGTERM\n{self.log[-4000:]}") from None

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ServerProcess:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._process is not None and kind is None:
                code = self.stop()
                if self.is_ours and code != 0:
                    raise ServerError(f"the server ended with code {code}\n{self.log[-4000:]}")
        finally:
            self.kill()
            self._log.close()

    def _request(self, method: str, path: str, body: Any, headers: Mapping[str, str] | None, timeout: float) -> Stream:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        sent = dict(headers or {})
        data: bytes | None
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        connection.request(method, path, data, sent)
        sock: socket.socket = connection.sock
        return Stream(connection, connection.getresponse(), sock)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Response:
        """``body``: bytes go out as they are, anything else as JSON; None: no body."""
        with self._request(method, path, body, headers, timeout) as stream:
            headers = {name.lower(): value for name, value in stream.response.getheaders()}
            return Response(stream.status, headers, stream.read())

    def get(self, path: str, headers: Mapping[str, str] | None = None, timeout: float = 60.0) -> Response:
        return self.request("GET", path, None, headers, timeout)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None, timeout: float = 60.0) -> Response:
        return self.request("POST", path, body, headers, timeout)

    def stream(self, path: str, body: Any, headers: Mapping[str, str] | None = None, timeout: float = 60.0) -> Stream:
        return self._request("POST", path, body, headers, timeout)

    def memory_kb(self) -> int:
        """Resident memory of the process, in KiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise ServerError("no VmRSS in /proc")
