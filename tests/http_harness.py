"""An HTTP server over a scripted engine, and clients that see the bytes on the wire."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from flask import Response, request

from llamasrv.api import sse
from llamasrv.api.errors import ApiError
from llamasrv.engine.meta import ServerMeta
from llamasrv.engine.metrics import ServerMetrics
from llamasrv.engine.queue import ServerQueue
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.response import ServerResponse
from llamasrv.engine.result import FinalResult, MetricsResult, PartialResult, Result, SlotsResult
from llamasrv.engine.task import Task, TaskType
from llamasrv.http import waiting
from llamasrv.http.app import create_app, short_requests
from llamasrv.http.config import HttpConfig
from llamasrv.http.errors import error_response, json_response, stopping
from llamasrv.http.route import Route
from llamasrv.http.server import HttpServer
from llamasrv.http.sse import Client, stream_response
from llamasrv.http.state import ServerState

#: How long a test waits for what must happen, seconds.
PATIENCE = 60.0


class ScriptedContext:
    """The outside of a ServerContext over the real queue and mailboxes.

    Tasks land in ``tasks``; the test answers them with :meth:`send`. ``cancelled`` gets the ids of CANCEL tasks.
    ``on_task``, if set, is called for each task instead of putting it into ``tasks``.
    """

    def __init__(self) -> None:
        self.queue = ServerQueue()
        self.response = ServerResponse()
        self.tasks: queue.Queue[Task] = queue.Queue()
        self.cancelled: queue.Queue[int] = queue.Queue()
        self.on_task: Callable[[Task], None] = self.tasks.put
        #: As many tasks as may be open before requests are refused; None: any number.
        self.limit: int | None = None
        self.params: dict[str, Any] = {}
        self.meta = ServerMeta(
            build_info="b0-test",
            model_name="tiny",
            model_aliases=("tiny",),
            model_tags=(),
            model_path="tiny.gguf",
            model_ftype="F32",
            model_n_params=1,
            model_size=4,
            vocab_type=1,
            n_vocab=512,
            n_ctx_train=128,
            n_embd=8,
            slot_n_ctx=128,
            pooling_type=0,
            bos_token="<s>",
            eos_token="</s>",
            chat_template="",
            chat_template_tool_use="",
        )
        self.vocab: Any = None
        self.queue.on_new_task(self._on_new_task)
        self._loop = threading.Thread(target=self.queue.start_loop, daemon=True)

    def start(self) -> None:
        self._loop.start()

    def _on_new_task(self, task: Task, is_yielding: bool) -> bool:
        if task.type is TaskType.CANCEL:
            self.cancelled.put(task.id_target)
        else:
            self.on_task(task)
        return True

    def next_task(self) -> Task:
        return self.tasks.get(timeout=PATIENCE)

    def send(self, result: Result) -> None:
        self.response.send(result)

    def part(self, task: Task, text: str) -> None:
        self.send(PartialResult(id=task.id, index=task.index, content=text.encode()))

    def begin(self, task: Task) -> None:
        self.send(PartialResult(id=task.id, index=task.index, is_begin=True))

    def end(self, task: Task, text: str = "") -> None:
        self.send(FinalResult(id=task.id, index=task.index, content=text.encode(), params=task.params))

    def reader(self) -> ResponseReader:
        return ResponseReader(self.queue, self.response, limit=self.limit)

    def retry_after_s(self) -> int:
        return 7

    def metrics_snapshot(self, reset_bucket: bool = False) -> MetricsResult:
        return MetricsResult(id=-1, metrics=ServerMetrics())

    def slots_snapshot(self) -> SlotsResult:
        return SlotsResult(id=-1, slots=[], n_idle_slots=0)

    def terminate(self) -> None:
        self.queue.terminate()
        self.response.terminate()


class PlainFormat:
    """A dialect for tests: the text itself as JSON string."""

    def frame(self, result: Result) -> bytes:
        if isinstance(result, PartialResult) and result.is_begin:
            return b""
        text = getattr(result, "content", b"").decode()
        return sse.frame(text)

    def error(self, error: ApiError) -> bytes:
        return sse.frame(error.body())

    def end(self) -> bytes:
        return b"data: [END]\n\n"


def plain_routes(state: ServerState) -> list[Route]:
    """POST /run {"stream", "ping"} posts one task, POST /echo counts bytes, GET /fail raises."""

    def run() -> Response:
        body = request.get_json()
        client = Client(request.environ)
        reader = state.reader()
        reader.post_task(Task(id=reader.new_id(), type=TaskType.COMPLETION))
        if body.get("stream"):
            return stream_response(reader, body.get("format") or PlainFormat(), client, body.get("ping", 0))
        with reader:
            results = reader.wait_for_all(client.is_gone)
        if results is None:
            return error_response(stopping())
        if not isinstance(results, list):
            return error_response(ApiError.from_result(results))
        return json_response([getattr(result, "content", b"").decode() for result in results])

    def echo() -> Response:
        return json_response({"size": len(request.get_data())})

    def fail() -> Response:
        raise RuntimeError("it broke")

    return [
        Route("GET", "/health", lambda: json_response({"status": "ok"}), is_short=True),
        Route("GET", "/v1/models", lambda: json_response({"data": []}), is_short=True),
        Route("POST", "/run", run),
        Route("POST", "/echo", echo),
        Route("GET", "/fail", fail),
    ]


@dataclass
class Harness:
    """A running server."""

    context: ScriptedContext
    state: ServerState
    server: HttpServer
    connections: list[http.client.HTTPConnection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = self.server.ports[0]

    def connect(self, timeout: float = PATIENCE) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        self.connections.append(connection)
        return connection

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        own = connection or self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        own.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        response = own.getresponse()
        return response, response.read()

    def raw(self, data: bytes, timeout: float = PATIENCE) -> socket.socket:
        """A connection on which ``data`` was sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        sock.sendall(data)
        return sock

    def post_raw(self, path: str, body: Any, version: str = "1.1", headers: str = "") -> socket.socket:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
        return self.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def stop(self) -> None:
        self.state.is_stopping = True
        self.context.terminate()
        for connection in self.connections:
            connection.close()
        self.server.shutdown(5.0)


RouteMaker = Callable[[ServerState], list[Route]]


@contextlib.contextmanager
def serve(
    config: HttpConfig | None = None, routes: RouteMaker = plain_routes, is_ready: bool = True
) -> Iterator[Harness]:
    context = ScriptedContext()
    context.start()
    state = ServerState(context, config or HttpConfig(port=0), is_ready=is_ready)
    made = routes(state)
    server = HttpServer(create_app(state, made), state.config, short_requests(state.config.api_prefix, made))
    server.bind()
    server.start()
    harness = Harness(context, state, server)
    try:
        # what a test answers is what is shown, however busy the machine is
        with mock.patch.object(waiting, "LOOK_WAIT_S", 30.0):
            yield harness
    finally:
        harness.stop()


def read_until(sock: socket.socket, mark: bytes, timeout: float = PATIENCE) -> bytes:
    """Bytes up to and including ``mark``, or to the end of the connection."""
    sock.settimeout(timeout)
    data = b""
    while mark not in data:
        more = sock.recv(1)
        if not more:
            break
        data += more
    return data


def read_all(sock: socket.socket, timeout: float = PATIENCE) -> bytes:
    sock.settimeout(timeout)
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def wait_for(condition: Callable[[], bool], timeout: float = PATIENCE) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()
