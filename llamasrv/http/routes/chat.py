"""OpenAI's chat API, its control and counting, and the rendering of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from flask import Response, request

from llamasrv.api.chat_control import control_json, control_task
from llamasrv.api.chat_params import ChatPlan, parse_chat
from llamasrv.api.chat_state import ChatStates
from llamasrv.api.chat_tasks import build_chat_task
from llamasrv.api.context import ApiContext
from llamasrv.api.jsonio import parse_object
from llamasrv.api.openai.chat import chat_json
from llamasrv.api.openai.chat_stream import ChatStream
from llamasrv.api.openai.common import Request
from llamasrv.engine.result import ControlResult, FinalResult
from llamasrv.http.body import request_object
from llamasrv.http.errors import json_response
from llamasrv.http.resume import attach
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def plan_of(data: Mapping[str, Any]) -> ChatPlan:
        return parse_chat(data, context.chat, context.vocab, context.schema.grammars)

    def chat() -> Response:
        plan = plan_of(request_object())
        client = Client(request.environ)
        reader = state.reader()
        task = build_chat_task(context, plan, reader)
        about, states = Request(context, [task]), ChatStates(plan.answer)
        if task.params.stream:
            return attach(state, request.environ, reader, [task], ChatStream(about, states), client)
        results = results_of(reader, [task], client.is_gone)
        return json_response(chat_json(about, states, cast("list[FinalResult]", results)))

    def control() -> Response:
        data = parse_object(request.get_data())
        reader = state.reader()
        [result] = results_of(reader, [control_task(data, reader)], Client(request.environ).is_gone)
        return json_response(control_json(cast(ControlResult, result)))

    def input_tokens() -> Response:
        plan = plan_of(request_object())
        n_tokens = len(context.vocab.tokenize(plan.prompt, True, True))
        return json_response({"input_tokens": n_tokens, "object": "response.input_tokens"})

    def apply_template() -> Response:
        return json_response({"prompt": plan_of(request_object()).prompt})

    chats = ("/chat/completions", "/v1/chat/completions")
    return [
        *(Route("POST", path, chat, needs_model=True) for path in chats),
        *(Route("POST", f"{path}/input_tokens", input_tokens, needs_model=True) for path in chats),
        Route("POST", "/v1/chat/completions/control", control, needs_model=True),
        Route("POST", "/apply-template", apply_template, needs_model=True),
    ]
