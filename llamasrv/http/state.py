"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from llamasrv.api.protocols import Server
from llamasrv.engine.queue import ServerQueue
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import MetricsResult
from llamasrv.http.config import HttpConfig
from llamasrv.stream.sessions import StreamSessions


class Context(Server, Protocol):
    """The part of the engine's ServerContext that requests use."""

    @property
    def queue(self) -> ServerQueue: ...
    def reader(self) -> ResponseReader: ...
    def metrics_snapshot(self, reset_bucket: bool = False) -> MetricsResult: ...


@dataclass(slots=True)
class ServerState:
    """``is_ready`` becomes true once the model is loaded, ``is_stopping`` once the server was told to end."""

    context: Context
    config: HttpConfig = field(default_factory=HttpConfig)
    is_ready: bool = False
    is_stopping: bool = False
    streams: StreamSessions = field(default_factory=StreamSessions)
