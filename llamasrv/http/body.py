"""The JSON body of a request."""

from __future__ import annotations

from typing import Any

from flask import request

from llamasrv.api.jsonio import parse_object
from llamasrv.api.timeout import read_timeout
from llamasrv.http.requests import RECORD, RequestRecord


def request_object() -> dict[str, Any]:
    """The object that the current request carries; its limit of time is in force from now on. Raises ApiError (400)."""
    data = parse_object(request.get_data())
    timeout_s = read_timeout(data)
    record = request.environ.get(RECORD)
    if isinstance(record, RequestRecord):
        record.timeout_s = timeout_s
        record.is_stream = data.get("stream") is True
    return data
