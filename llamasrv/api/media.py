"""Media within a request: data URLs and plain base64."""

from __future__ import annotations

import base64
import binascii

from llamasrv.api.errors import invalid_request

_KINDS = ("data:image/", "data:video/", "data:audio/")


def decode_media(text: str) -> bytes:
    """The bytes of a data URL or of base64. Raises ApiError with status 400."""
    if not text.startswith("data:"):
        data = _decode(text)
        if not data:
            raise invalid_request("Invalid base64 value")
        return data
    head, comma, body = text.partition(",")
    if not comma or "," in body:
        raise invalid_request("Invalid uri-encoded base64 value")
    if not head.startswith(_KINDS):
        raise invalid_request(f"Invalid uri format: {head}")
    if not head.endswith("base64"):
        raise invalid_request("uri must be base64 encoded")
    return _decode(body)


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_request("Invalid base64 value") from None
