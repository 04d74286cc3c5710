"""Anthropic's Messages API."""

from __future__ import annotations

from typing import cast

from flask import Response, request

from llamasrv.api.anthropic.format import message_json
from llamasrv.api.anthropic.request import read_anthropic_request
from llamasrv.api.anthropic.stream import AnthropicStream
from llamasrv.api.chat_params import ChatPlan, parse_chat
from llamasrv.api.chat_state import ChatState
from llamasrv.api.chat_tasks import build_chat_task
from llamasrv.api.content import MediaError
from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.engine.result import ErrorType, FinalResult
from llamasrv.http.body import request_object
from llamasrv.http.errors import json_response
from llamasrv.http.resume import attach
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def read() -> ChatPlan:
        chat = read_anthropic_request(request_object())
        try:
            return parse_chat(chat, context.chat, context.vocab, context.schema.grammars)
        except MediaError as error:
            # clients of this API know the original's status
            raise ApiError(ErrorType.SERVER, error.message) from None

    def create() -> Response:
        plan = read()
        client = Client(request.environ)
        reader = state.reader()
        task = build_chat_task(context, plan, reader)
        answer, model, asked = ChatState(plan.answer), context.meta.model_name, plan.data.get("stop")
        words = [asked] if isinstance(asked, str) else asked or []
        if task.params.stream:
            form = AnthropicStream(answer, task.cmpl_id, model, words)
            return attach(state, request.environ, reader, [task], form, client)
        [result] = results_of(reader, [task], client.is_gone)
        return json_response(message_json(answer, cast(FinalResult, result), task.cmpl_id, model, words))

    def count() -> Response:
        return json_response({"input_tokens": len(context.vocab.tokenize(read().prompt, True, True))})

    return [
        Route("POST", "/v1/messages", create, needs_model=True),
        Route("POST", "/v1/messages/count_tokens", count, needs_model=True),
    ]
