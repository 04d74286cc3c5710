"""POST /completion, llama-server's own dialect."""

from __future__ import annotations

from typing import cast

from flask import Response, request

from llamasrv.api import sse
from llamasrv.api.completion import build_completion_tasks
from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.api.format_native import completion_response, final_frame, partial_frame
from llamasrv.api.jsonio import parse_object
from llamasrv.engine.result import ErrorResult, FinalResult, PartialResult, Result
from llamasrv.http.errors import error_response, json_response, stopping
from llamasrv.http.route import Route
from llamasrv.http.sse import Client, stream_response
from llamasrv.http.state import ServerState


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
    def completion() -> Response:
        data = parse_object(request.get_data())
        client = Client(request.environ)
        reader = state.context.reader()
        tasks = build_completion_tasks(context, data, reader)
        params = tasks[0].params
        reader.post_tasks(tasks)
        if params.stream:
            return stream_response(reader, NativeStream(context), client, params.sse_ping_interval)
        with reader:
            results = reader.wait_for_all(client.is_gone)
        if results is None:
            return error_response(stopping())
        if isinstance(results, ErrorResult):
            return error_response(ApiError.from_result(results))
        return json_response(completion_response(context, cast("list[FinalResult]", results)))

    return [Route("POST", path, completion, needs_model=True) for path in ("/completion", "/completions")]
