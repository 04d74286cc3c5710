"""What is known without asking the engine: health, properties, models."""

from __future__ import annotations

from flask import Response

from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.api.models import models_json
from llamasrv.api.props import props_json
from llamasrv.engine.result import ErrorType
from llamasrv.http.errors import json_response
from llamasrv.http.route import Route
from llamasrv.http.state import ServerState


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def health() -> Response:
        # that the model is loaded was checked before
        return json_response({"status": "ok"})

    def get_props() -> Response:
        return json_response(props_json(context.meta, context.params, state.context.queue.is_sleeping()))

    def post_props() -> Response:
        if not state.config.endpoint_props:
            message = "This server does not support changing global properties. Start it with `--props`"
            raise ApiError(ErrorType.NOT_SUPPORTED, message)
        # no property can be changed yet, in the original neither
        return json_response({"success": True})

    def disabled() -> Response:
        # read by the web page: with this status it does not ask again
        return json_response({"error": {"message": "this feature is disabled", "type": "feature_disabled"}}, 403)

    def models() -> Response:
        return json_response(models_json(context.meta))

    return [
        Route("GET", "/health", health, is_short=True),
        Route("GET", "/v1/health", health, is_short=True),
        Route("GET", "/props", get_props, is_short=True),
        Route("POST", "/props", post_props),
        Route("GET", "/models", models, is_short=True),
        Route("GET", "/v1/models", models, is_short=True),
        *(
            Route(method, path, disabled, is_short=method == "GET")
            for path in ("/tools", "/cors-proxy")
            for method in ("GET", "POST")
        ),
    ]
