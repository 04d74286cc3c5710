"""JSON in and out: bodies of strangers, and text of models that may be broken UTF-8."""

from __future__ import annotations

import re
from typing import Any

import orjson

from llamasrv.api.errors import ApiError, invalid_request

#: Brackets within brackets in a request. Template engines, schema converters and serializers behind this recurse.
MAX_DEPTH = 200

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def parse(body: bytes) -> Any:
    """The JSON value in ``body``.

    As in the original a UTF-8 byte order mark is skipped and the last of equal keys wins. Integers beyond 64 bits come
    as float, which the fields then refuse. Raises :class:`ApiError` for whatever is not JSON in UTF-8, and for a value
    nested deeper than ``MAX_DEPTH``.
    """
    if body.startswith(_UTF8_BOM):
        body = body[len(_UTF8_BOM) :]
    elif body.startswith(_UTF16_BOMS):
        raise invalid_request("parse error: the request body must be UTF-8, not UTF-16")
    if not body:
        raise invalid_request("parse error: the request body is empty")
    if _is_too_deep(body):
        raise invalid_request(f"parse error: the request body is nested too deeply (limit {MAX_DEPTH})")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _syntax_error(error) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Like :func:`parse`, for requests, whose top level is an object."""
    value = parse(body)
    if not isinstance(value, dict):
        raise invalid_request(f"the request body must be a JSON object, but is {type_name(value)}")
    return value


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8; infinities and NaN become null, as in the original."""
    return orjson.dumps(value)


def to_text(data: bytes) -> str:
    """Text of a model's bytes, U+FFFD where they are not UTF-8."""
    return data.decode("utf-8", "replace")


def type_name(value: Any) -> str:
    """JSON's name for the type of ``value``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _is_too_deep(body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for byte in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        else:
            depth -= 1
    return False


def _syntax_error(error: orjson.JSONDecodeError) -> ApiError:
    return invalid_request(f"parse error at line {error.lineno}, column {error.colno}: {error.msg}")
