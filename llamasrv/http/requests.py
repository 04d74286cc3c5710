"""The requests under way, and the names by which their owners can find them."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from llamasrv.engine.reader import ResponseReader, Usage

#: Key of the WSGI environment: the :class:`RequestRecord`.
RECORD = "llamasrv.request"
#: Header with the id, in requests and responses.
ID_HEADER = "X-Request-Id"
#: What a client may choose as an id: it goes into log lines, headers and paths.
_ID = re.compile(r"[A-Za-z0-9._:@=+\-]{1,128}")
CANCELLED = "The request was cancelled"


def request_id(wanted: str) -> str:
    """The id that the client asks for, or a new one where it asks for none or for one that cannot be."""
    return wanted if _ID.fullmatch(wanted) else f"req_{secrets.token_hex(12)}"


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request until its response has been sent. Written by its worker, read and cancelled by any thread.

    ``began`` is of the monotonic clock, ``created`` of the Unix clock, both in seconds.
    """

    id: str
    method: str
    path: str
    caller: str
    began: float = field(default_factory=time.monotonic)
    created: float = field(default_factory=time.time)
    status: int = 0
    is_stream: bool = False
    #: Seconds that the request may take; 0: no bound.
    timeout_s: float = 0.0
    is_cancelled: bool = False
    readers: list[ResponseReader] = field(default_factory=list)
    #: The request that this one is a part of.
    whole: RequestRecord | None = None

    def part(self) -> RequestRecord:
        """For a request inside this one: it has a limit of its own, and is listed, cancelled and logged with this."""
        return replace(self, whole=self, timeout_s=0.0)  # the readers are those of both

    def attach(self, reader: ResponseReader) -> None:
        """Let the record's limit and cancellation apply to what this reader waits for."""
        self.readers.append(reader)
        if self.timeout_s > 0:
            reader.set_timeout(self.timeout_s, self.began)
        # in this order: who cancels sets the mark first and looks at the readers then
        if (self.whole or self).is_cancelled:
            reader.cancel(CANCELLED)

    def cancel(self) -> None:
        """End the request with an error as soon as it waits for the engine."""
        self.is_cancelled = True
        for reader in list(self.readers):
            reader.cancel(CANCELLED)

    @property
    def task_ids(self) -> list[int]:
        """Ids of the tasks in the engine so far."""
        return [id_task for reader in list(self.readers) for id_task in reader.ids]

    @property
    def is_answered(self) -> bool:
        """Whether it has asked the engine and got all it asked for."""
        readers = list(self.readers)
        return bool(readers) and all(reader.is_answered for reader in readers)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        total = Usage()
        for reader in list(self.readers):
            usage = reader.usage
            total.n_prompt += usage.n_prompt
            total.n_cached += usage.n_cached
            total.n_generated += usage.n_generated
        return total


class RequestTable:
    """All requests under way, in order of arrival. Thread-safe."""

    def __init__(self) -> None:
        self._records: dict[int, RequestRecord] = {}
        self._lock = threading.Lock()

    def begin(self, environ: dict[str, Any]) -> RequestRecord:
        """Record the request of a WSGI environment, which holds the record under ``RECORD`` from now on."""
        caller = environ.get("REMOTE_ADDR", "")
        port = environ.get("REMOTE_PORT", "")
        record = RequestRecord(
            id=request_id(environ.get("HTTP_X_REQUEST_ID", "")),
            method=environ["REQUEST_METHOD"],
            path=environ["PATH_INFO"],
            caller=f"{caller}:{port}" if port else caller,
        )
        environ[RECORD] = record
        with self._lock:
            self._records[id(record)] = record
        return record

    def end(self, record: RequestRecord) -> None:
        with self._lock:
            self._records.pop(id(record), None)

    def all(self) -> list[RequestRecord]:
        with self._lock:
            return list(self._records.values())

    def find(self, id_request: str) -> Iterable[RequestRecord]:
        """Those with this id; clients may give the same to several."""
        return [record for record in self.all() if record.id == id_request]
