"""OpenAI's API: POST /v1/completions."""

from __future__ import annotations

from typing import cast

from flask import Response, request

from llamasrv.api.completion import build_completion_tasks
from llamasrv.api.context import ApiContext
from llamasrv.api.openai.common import Request
from llamasrv.api.openai.completions import CompletionStream, completion_response
from llamasrv.api.openai.echo import Echo, with_echo
from llamasrv.engine.result import FinalResult
from llamasrv.http.body import request_object
from llamasrv.http.errors import json_response
from llamasrv.http.resume import attach
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def completions() -> Response:
        data, wants_echo = with_echo(request_object())
        client = Client(request.environ)
        reader = state.reader()
        tasks = build_completion_tasks(context, data, reader)
        echo = Echo(context.vocab, data, tasks) if wants_echo else None
        about = Request(context, tasks)
        if tasks[0].params.stream:
            return attach(state, request.environ, reader, tasks, CompletionStream(about, echo), client)
        results = results_of(reader, tasks, client.is_gone)
        return json_response(completion_response(about, cast("list[FinalResult]", results), echo))

    return [Route("POST", "/v1/completions", completions, needs_model=True)]
