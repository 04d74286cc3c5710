"""OpenAI's Responses API."""

from __future__ import annotations

from typing import cast

from flask import Response, request

from llamasrv.api.chat_params import ChatPlan, parse_chat
from llamasrv.api.chat_state import ChatState
from llamasrv.api.chat_tasks import build_chat_task
from llamasrv.api.context import ApiContext
from llamasrv.api.responses.format import Reply, response_json
from llamasrv.api.responses.request import ResponsesRequest, read_responses_request
from llamasrv.api.responses.stream import ResponsesStream
from llamasrv.engine.result import FinalResult
from llamasrv.http.body import request_object
from llamasrv.http.errors import json_response
from llamasrv.http.resume import attach
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def read() -> tuple[ResponsesRequest, ChatPlan]:
        asked = read_responses_request(request_object())
        return asked, parse_chat(asked.chat, context.chat, context.vocab, context.schema.grammars)

    def respond() -> Response:
        asked, plan = read()
        client = Client(request.environ)
        reader = state.reader()
        task = build_chat_task(context, plan, reader)
        reply = Reply(context, asked, task.params)
        answer = ChatState(plan.answer)
        if task.params.stream:
            has_extras = task.params.timings_per_token or task.params.return_progress
            form = ResponsesStream(reply, answer, has_extras)
            return attach(state, request.environ, reader, [task], form, client)
        [result] = results_of(reader, [task], client.is_gone)
        return json_response(response_json(reply, answer, cast(FinalResult, result)))

    def count() -> Response:
        _, plan = read()
        n_tokens = len(context.vocab.tokenize(plan.prompt, True, True))
        return json_response({"input_tokens": n_tokens, "object": "response.input_tokens"})

    return [
        *(Route("POST", path, respond, needs_model=True) for path in ("/v1/responses", "/responses")),
        *(
            Route("POST", path, count, needs_model=True)
            for path in ("/v1/responses/input_tokens", "/responses/input_tokens")
        ),
    ]
