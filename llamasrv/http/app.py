"""The WSGI application: what happens to every request before and after its route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flask import Flask, Response, request

from llamasrv.engine.log import srv_wrn
from llamasrv.engine.response import QueueFullError
from llamasrv.http.access import log_access
from llamasrv.http.auth import PUBLIC_PATHS, KeyCheck
from llamasrv.http.channel import AT_END
from llamasrv.http.cors import origin_headers, preflight_headers
from llamasrv.http.errors import (
    bad_key,
    error_response,
    exception_response,
    loading,
    no_route,
    queue_full_response,
    stopping,
)
from llamasrv.http.requests import ID_HEADER, RECORD
from llamasrv.http.route import Route, matcher
from llamasrv.http.state import ServerState

#: Asked for again and again by whoever watches the server, beside what is answered from memory.
WATCHED = ("/slots", "/v1/requests")
#: Pages, as opposed to API paths: reachable while the model loads.
PAGES = PUBLIC_PATHS - {"/health", "/v1/health"}


def create_app(state: ServerState, routes: Sequence[Route]) -> Flask:
    """The application with these routes."""
    app = Flask("llamasrv", static_folder=None)
    # a path is what is registered, letter by letter
    app.url_map.merge_slashes = False
    app.url_map.strict_slashes = True
    for route in routes:
        app.add_url_rule(
            state.config.api_prefix + route.path,
            f"{route.method} {route.path}",
            _awake(state, route.handler) if route.needs_model else route.handler,
            methods=[route.method],
            provide_automatic_options=False,
        )
    is_short = matcher(state.config.api_prefix, routes, lambda route: route.is_short)
    app.before_request(_record(state, is_short))
    app.before_request(_gate(state, matcher(state.config.api_prefix, routes, lambda route: route.is_public)))
    app.after_request(_finish(state))
    app.register_error_handler(Exception, exception_response)
    app.register_error_handler(QueueFullError, lambda exc: queue_full_response(state.context.retry_after_s()))
    return app


def _awake(state: ServerState, handler: Callable[..., Response]) -> Callable[..., Response]:
    def handle(**arguments: str) -> Response:
        with state.context.queue.awake():
            if state.is_stopping:
                raise stopping()
            return handler(**arguments)

    return handle


def short_requests(prefix: str, routes: Sequence[Route]) -> Callable[[str, str], bool]:
    """A test for requests that are answered from memory, for :class:`~llamasrv.http.server.HttpServer`."""
    is_short = matcher(prefix, routes, lambda route: route.is_short)
    return lambda method, path: method == "OPTIONS" or is_short(method, path)


def _record(state: ServerState, is_short: Callable[[str, str], bool]) -> Callable[[], None]:
    """Note each request until it has ended, and log it then."""
    watched = {state.config.api_prefix + path for path in WATCHED}

    def record() -> None:
        environ = request.environ
        at_end = environ.get(AT_END)
        if at_end is None:
            return
        entry = state.requests.begin(environ)

        def end(status: int, client_left: bool) -> None:
            state.requests.end(entry)
            is_watching = entry.method == "GET" and (entry.path in watched or is_short(entry.method, entry.path))
            is_quiet = status < 400 and (is_watching or entry.method == "OPTIONS")
            log_access(entry, status, client_left, is_quiet)

        at_end.append(end)

    return record


def _gate(state: ServerState, is_public: Callable[[str, str], bool]) -> Callable[[], Response | None]:
    check = KeyCheck(state.config)
    pages = {state.config.api_prefix + path for path in PAGES}

    def gate() -> Response | None:
        environ = request.environ
        if environ["REQUEST_METHOD"] == "OPTIONS":
            # a browser sends no key with its preflight
            return Response(status=200, headers=preflight_headers(state.config), content_type="text/html")
        if state.is_stopping:
            return error_response(stopping())
        is_page = is_public(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if not state.is_ready and not is_page and environ["PATH_INFO"] not in pages:
            return error_response(loading())
        if not is_page and not check.allows(environ):
            srv_wrn("http", "unauthorized: Invalid API Key")
            return error_response(bad_key())
        if environ["PATH_INFO"].startswith("//"):
            # the router would strip it
            return error_response(no_route())
        return None

    return gate


def _finish(state: ServerState) -> Callable[[Response], Response]:
    def finish(response: Response) -> Response:
        environ: dict[str, Any] = request.environ
        for name, value in origin_headers(state.config, environ.get("HTTP_ORIGIN", "")):
            response.headers.add(name, value)
        entry = environ.get(RECORD)
        if entry is not None:
            response.headers[ID_HEADER] = entry.id
            if environ["PATH_INFO"].startswith(state.config.api_prefix + "/v1/messages"):
                response.headers["Request-Id"] = entry.id  # where Anthropic's clients look
        return response

    return finish
