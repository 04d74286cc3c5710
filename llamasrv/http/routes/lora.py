"""Adapters and their scales."""

from __future__ import annotations

from flask import Response, request

from llamasrv.api.context import ApiContext
from llamasrv.api.jsonio import parse
from llamasrv.api.lora import lora_json, parse_lora
from llamasrv.engine.result import GetLoraResult
from llamasrv.engine.task import Task, TaskType
from llamasrv.http.errors import json_response
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def get_adapters() -> Response:
        reader = state.reader()
        task = Task(id=reader.new_id(), type=TaskType.GET_LORA)
        [result] = results_of(reader, [task], Client(request.environ).is_gone)
        assert isinstance(result, GetLoraResult)
        return json_response(lora_json(result))

    def set_adapters() -> Response:
        scales = parse_lora(parse(request.get_data()))
        reader = state.reader()
        task = Task(id=reader.new_id(), type=TaskType.SET_LORA, set_lora=scales)
        results_of(reader, [task], Client(request.environ).is_gone)
        return json_response({"success": True})

    return [
        Route("GET", "/lora-adapters", get_adapters, needs_model=True),
        Route("POST", "/lora-adapters", set_adapters, needs_model=True),
    ]
