"""Typed questions to decision models."""

from __future__ import annotations

from typing import cast

from flask import Response, request

from llamasrv.api.context import ApiContext
from llamasrv.api.decision.tasks import build_decision_tasks, decisions_json
from llamasrv.engine.result import DecisionResult
from llamasrv.http.body import request_object
from llamasrv.http.errors import json_response
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def decide() -> Response:
        data = request_object()
        reader = state.reader()
        asked, tasks = build_decision_tasks(context, data, reader)
        results = results_of(reader, tasks, Client(request.environ).is_gone)
        return json_response(decisions_json(context, asked, cast("list[DecisionResult]", results)))

    return [Route("POST", "/v1/systemone", decide, needs_model=True)]
