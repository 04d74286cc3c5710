"""The manual of the API, for programs and for people. It shows no secret and needs neither key nor model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from flask import Response, request

from llamasrv.api.context import ApiContext
from llamasrv.api.defaults import request_defaults
from llamasrv.api.openapi import document, operations_of
from llamasrv.api.openapi_page import page
from llamasrv.api.openapi_requests import Facts
from llamasrv.api.openapi_schema import Schema
from llamasrv.engine.log import srv_wrn
from llamasrv.http.errors import json_response
from llamasrv.http.route import Route
from llamasrv.http.state import ServerState


def routes(state: ServerState, context: ApiContext, others: Sequence[Route]) -> list[Route]:
    """The manual of the routes ``others`` and of itself."""
    #: What the last document was made of, and it.
    made: list[tuple[Any, Schema]] = []

    def current() -> Schema:
        source: Any = context.params if state.is_ready else None
        if not made or made[-1][0] is not source:
            made[:] = [(source, _document(state, _facts(state, context), [*others, *own]))]
        return made[-1][1]

    def openapi() -> Response:
        return json_response(current())

    def docs() -> Response:
        return Response(page(current(), request.host_url.rstrip("/")), content_type="text/html; charset=utf-8")

    own = [
        Route("GET", "/openapi.json", openapi, is_short=True, is_public=True),
        Route("GET", "/docs", docs, is_short=True, is_public=True),
    ]
    return own


def _facts(state: ServerState, context: ApiContext) -> Facts:
    if not state.is_ready:
        return Facts(n_slots=state.config.n_parallel)
    return Facts(context.n_slots, context.meta.n_vocab, context.meta.n_embd_out, request_defaults(context.params))


def _document(state: ServerState, facts: Facts, routes: Sequence[Route]) -> Schema:
    config = state.config
    vertex = (config.vertex.predict_path, config.vertex.health_path) if config.vertex is not None else None
    operations, missing = operations_of([(route.method, route.path) for route in routes], vertex)
    for method, path in missing:
        srv_wrn("docs", "no description of %s %s", method, path)
    return document(operations, facts, version(), config.api_prefix, bool(config.api_keys))


def version() -> str:
    try:
        return metadata.version("llamasrv")
    except metadata.PackageNotFoundError:
        return "0"
