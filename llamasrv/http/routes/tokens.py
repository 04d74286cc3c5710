"""Text to tokens and back."""

from __future__ import annotations

from flask import Response, request

from llamasrv.api.context import ApiContext
from llamasrv.api.jsonio import parse_object
from llamasrv.api.tokenize import detokenize_json, tokenize_json
from llamasrv.http.errors import json_response
from llamasrv.http.route import Route
from llamasrv.http.state import ServerState


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def tokenize() -> Response:
        return json_response(tokenize_json(context.vocab, parse_object(request.get_data())))

    def detokenize() -> Response:
        return json_response(detokenize_json(context.vocab, parse_object(request.get_data())))

    return [
        Route("POST", "/tokenize", tokenize, needs_model=True),
        Route("POST", "/detokenize", detokenize, needs_model=True),
    ]
