"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from flask import has_request_context, request

from llamasrv.api.protocols import Server
from llamasrv.engine.queue import ServerQueue
from llamasrv.engine.reader import ResponseReader
from llamasrv.engine.result import MetricsResult, SlotsResult
from llamasrv.http.config import HttpConfig
from llamasrv.http.requests import RECORD, RequestRecord, RequestTable
from llamasrv.stream.sessions import StreamSessions


class Context(Server, Protocol):
    """The part of the engine's ServerContext that requests use."""

    @property
    def queue(self) -> ServerQueue: ...
    def reader(self) -> ResponseReader: ...
    def metrics_snapshot(self, reset_bucket: bool = False) -> MetricsResult: ...
    def slots_snapshot(self) -> SlotsResult: ...
    def retry_after_s(self) -> int: ...


@dataclass(slots=True)
class ServerState:
    """``is_ready`` becomes true once the model is loaded, ``is_stopping`` once the server was told to end."""

    context: Context
    config: HttpConfig = field(default_factory=HttpConfig)
    is_ready: bool = False
    is_stopping: bool = False
    streams: StreamSessions = field(default_factory=StreamSessions)
    requests: RequestTable = field(default_factory=RequestTable)

    def reader(self) -> ResponseReader:
        """A reader for the current request, which ends when that is cancelled or has taken too long."""
        reader = self.context.reader()
        record = request.environ.get(RECORD) if has_request_context() else None
        if isinstance(record, RequestRecord):
            record.attach(reader)
        return reader
