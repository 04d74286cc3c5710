"""Error responses. Every one is JSON, whatever went wrong."""

from __future__ import annotations

import traceback
from http import HTTPStatus

from flask import Response
from werkzeug.exceptions import HTTPException

from llamasrv.api.errors import ApiError, error_body
from llamasrv.api.jsonio import dumps
from llamasrv.engine.log import srv_dbg, srv_err, srv_wrn
from llamasrv.engine.result import SHUTTING_DOWN, ErrorType

JSON_TYPE = "application/json; charset=utf-8"

_TYPES = {
    401: ErrorType.AUTHENTICATION,
    403: ErrorType.PERMISSION,
    404: ErrorType.NOT_FOUND,
    405: ErrorType.NOT_FOUND,
    408: ErrorType.TIMEOUT,
    501: ErrorType.NOT_SUPPORTED,
    503: ErrorType.UNAVAILABLE,
}


def loading() -> ApiError:
    return ApiError(ErrorType.UNAVAILABLE, "Loading model")


def stopping() -> ApiError:
    return ApiError(ErrorType.UNAVAILABLE, SHUTTING_DOWN)


def no_route() -> ApiError:
    return ApiError(ErrorType.NOT_FOUND, "File Not Found")


def bad_key() -> ApiError:
    return ApiError(ErrorType.AUTHENTICATION, "Invalid API Key")


def queue_full_response(retry_after_s: int) -> Response:
    response = error_response(ApiError(ErrorType.UNAVAILABLE, "The queue is full, try again later"))
    response.headers["Retry-After"] = str(retry_after_s)
    return response


def http_error_json(status: int, message: str) -> bytes:
    """Body for an error of the HTTP layer; ``code`` is the very status, also where no error type stands for it."""
    type_ = _TYPES.get(status, ErrorType.SERVER if status >= 500 else ErrorType.INVALID_REQUEST)
    body = error_body(type_, message)
    body["error"]["code"] = status
    return dumps(body)


def json_response(value: object, status: int = 200) -> Response:
    return Response(dumps(value), status, content_type=JSON_TYPE)


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status)


def exception_response(exc: Exception) -> Response:
    """Answer for an exception that left a route."""
    if isinstance(exc, ApiError):
        response = error_response(exc)
    elif isinstance(exc, HTTPException):
        status = exc.code or 500
        if status in (404, 405):  # as in the original a path is known with its method or not at all
            return error_response(no_route())
        message = exc.description or HTTPStatus(status).phrase
        response = Response(http_error_json(status, message), status, content_type=JSON_TYPE)
    else:
        srv_err("http", "exception in a request: %r", exc)
        srv_dbg("http", "%s", "".join(traceback.format_exception(exc)))
        response = error_response(ApiError(ErrorType.SERVER, str(exc) or type(exc).__name__))
    # what is wrong with a request may quote it: text of prompts stays out of the log that people keep
    (srv_dbg if response.status_code < 500 else srv_wrn)("http", "got exception: %s", response.get_data(as_text=True))
    return response
