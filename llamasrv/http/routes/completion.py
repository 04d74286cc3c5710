"""POST /completion and /infill, llama-server's own dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from flask import Response, request

from llamasrv.api import sse
from llamasrv.api.completion import build_completion_tasks
from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.api.format_native import completion_response, final_frame, partial_frame
from llamasrv.api.infill import infill_prompt
from llamasrv.engine.result import FinalResult, PartialResult, Result
from llamasrv.engine.task import TaskType
from llamasrv.http.body import request_object
from llamasrv.http.errors import json_response
from llamasrv.http.resume import attach
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


class NativeStream:
    """Frames of the native dialect. The stream just ends after the last result."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def frame(self, result: Result) -> bytes:
        if isinstance(result, PartialResult):
            return partial_frame(result)
        return final_frame(self._context, cast(FinalResult, result))

    def error(self, error: ApiError) -> bytes:
        return sse.frame(error.body())

    def end(self) -> bytes:
        return b""


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def complete(data: Mapping[str, Any], type_: TaskType) -> Response:
        client = Client(request.environ)
        reader = state.reader()
        tasks = build_completion_tasks(context, data, reader, type_)
        params = tasks[0].params
        if params.stream:
            return attach(state, request.environ, reader, tasks, NativeStream(context), client)
        results = results_of(reader, tasks, client.is_gone)
        return json_response(completion_response(context, cast("list[FinalResult]", results)))

    def completion() -> Response:
        return complete(request_object(), TaskType.COMPLETION)

    def infill() -> Response:
        data = request_object()
        return complete({**data, "prompt": infill_prompt(context, data)}, TaskType.INFILL)

    return [
        *(Route("POST", path, completion, needs_model=True) for path in ("/completion", "/completions")),
        Route("POST", "/infill", infill, needs_model=True),
    ]
