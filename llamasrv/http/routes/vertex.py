"""Vertex AI's route of predictions: several requests to other routes in one."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from flask import Flask, Response, current_app, request

from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.jsonio import dumps, parse, parse_object
from llamasrv.engine.log import srv_wrn
from llamasrv.http.channel import AT_END, FLUSH_HEADERS
from llamasrv.http.errors import exception_response, json_response
from llamasrv.http.requests import RECORD, RequestRecord
from llamasrv.http.resume import CONVERSATION
from llamasrv.http.route import Route
from llamasrv.http.state import ServerState
from llamasrv.http.vertex import Vertex

MAX_INSTANCES = 128
#: Instances of one request that are served at the same time.
_MAX_THREADS = 32
_FORMAT = "@requestFormat"


def routes(state: ServerState, vertex: Vertex, others: Sequence[Route]) -> list[Route]:
    """Predictions over the routes ``others``. Raises ValueError if the path is one of theirs."""
    if any(route.path == vertex.predict_path for route in others):
        raise ValueError(f"AIP_PREDICT_ROUTE={vertex.predict_path} conflicts with an existing llama-server route")
    targets = _targets(others)

    def predict() -> Response:
        instances = parse_object(request.get_data()).get("instances")
        if not isinstance(instances, list):
            raise invalid_request("request body must include an array field named instances")
        if len(instances) > MAX_INSTANCES:
            raise invalid_request(f"instances array exceeds maximum size of {MAX_INSTANCES}")
        app = cast(Flask, current_app._get_current_object())  # type: ignore[attr-defined]
        environ = request.environ
        prefix = state.config.api_prefix

        def answer(instance: Any) -> Any:
            try:
                target, payload = _read_instance(instance, targets)
            except ApiError as error:
                return error.body()
            return _call(app, environ, prefix, target, payload)

        if not instances:
            return json_response({"predictions": []})
        with ThreadPoolExecutor(min(len(instances), _MAX_THREADS), "predict") as pool:
            return json_response({"predictions": list(pool.map(answer, instances))})

    found = [Route("POST", vertex.predict_path, predict)]
    taken = {route.path for route in others if route.method == "GET"}
    if vertex.health_path and vertex.health_path not in taken:
        health = next(route for route in others if (route.method, route.path) == ("GET", "/health"))
        found.append(Route("GET", vertex.health_path, health.handler, is_short=True))
    return found


def format_name(path: str) -> str:
    """The name under which Vertex AI's clients call a route: /v1/chat/completions is chatCompletions."""
    path = path.partition("<")[0].removeprefix("/v1").lstrip("/").rstrip("/")
    return re.sub(r"[/_-]+(.?)", lambda match: match[1].upper(), path)


def _targets(routes: Sequence[Route]) -> dict[str, Route]:
    """Routes by path and by name. POST goes before GET, and the OpenAI path before its namesake."""
    usable = [route for route in routes if "<" not in route.path and route.method in ("GET", "POST")]
    usable.sort(key=lambda route: (route.method == "POST", route.path.startswith("/v1/")))
    by_name = {format_name(route.path): route for route in usable}
    return {**by_name, **{route.path: route for route in usable}}


def _read_instance(instance: Any, targets: dict[str, Route]) -> tuple[Route, dict[str, Any]]:
    if not isinstance(instance, dict):
        raise invalid_request("each instance must be a JSON object")
    name = instance.get(_FORMAT)
    if not isinstance(name, str):
        raise invalid_request(f"each instance must include a string {_FORMAT}")
    target = targets.get(name)
    if target is None:
        raise invalid_request(f"no handler registered for {_FORMAT}: {name}")
    payload = {key: value for key, value in instance.items() if key != _FORMAT}
    if payload.get("stream"):
        srv_wrn("predict", "a prediction is never streamed, its 'stream' is ignored")
    if "stream" in payload:
        payload["stream"] = False
    return target, payload


def _call(app: Flask, environ: dict[str, Any], prefix: str, target: Route, payload: dict[str, Any]) -> Any:
    """The JSON value that a route answers with, errors too."""
    body = dumps(payload)
    own = {name: value for name, value in environ.items() if not name.startswith(("werkzeug.", "flask."))}
    # without AT_END no record is made for it: it is a part of the prediction
    for name in (AT_END, FLUSH_HEADERS, CONVERSATION, "HTTP_TRANSFER_ENCODING"):
        own.pop(name, None)
    record = own.get(RECORD)
    if isinstance(record, RequestRecord):
        own[RECORD] = record.part()
    own.update(
        {
            "REQUEST_METHOD": target.method,
            "PATH_INFO": prefix + target.path,
            "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": "application/json",
            "wsgi.input": io.BytesIO(body),
        }
    )
    with app.request_context(own):
        try:
            response = app.full_dispatch_request()
            if response.is_streamed:
                response.close()
                raise invalid_request("predict route does not support streaming responses")
            data = response.get_data()
        except Exception as exc:
            data = exception_response(exc).get_data()
    if not data:
        return None
    try:
        return parse(data)
    except ApiError:
        return data.decode(errors="replace")
