"""The requests under way: who is served, who waits, and an end to one of them."""

from __future__ import annotations

import time

from flask import Response, request

from llamasrv.api.errors import ApiError
from llamasrv.api.requests import RequestView, requests_json
from llamasrv.engine.result import ErrorType, SlotSnapshot
from llamasrv.http.errors import json_response
from llamasrv.http.requests import RequestRecord
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import slots_of


def routes(state: ServerState) -> list[Route]:
    queue = state.context.queue

    def slots() -> list[SlotSnapshot]:
        if queue.is_sleeping():
            return []  # nobody is served, and nobody shall wake the model to say so
        is_gone = Client(request.environ).is_gone
        # it may fall asleep in between
        return slots_of(state, lambda: is_gone() or queue.is_sleeping()).slots

    def list_requests() -> Response:
        # before the slots: who is in a slot is in the list
        views = [_view(record) for record in state.requests.all() if record.method == "POST"]
        return json_response(requests_json(views, slots()))

    def cancel(id_request: str) -> Response:
        found = [record for record in state.requests.find(id_request) if record.method == "POST"]
        if not found:
            raise ApiError(ErrorType.NOT_FOUND, "No request with this id is under way")
        for record in found:
            record.cancel()
        return json_response({"id": id_request, "object": "request", "cancelled": True})

    return [
        Route("GET", "/v1/requests", list_requests),
        Route("DELETE", "/v1/requests/<id_request>", cancel),
    ]


def _view(record: RequestRecord) -> RequestView:
    return RequestView(
        id=record.id,
        method=record.method,
        path=record.path,
        caller=record.caller,
        created=record.created,
        elapsed_ms=(time.monotonic() - record.began) * 1e3,
        is_stream=record.is_stream,
        timeout_s=record.timeout_s,
        task_ids=record.task_ids,
        is_answered=record.is_answered,
    )
