"""Frames of an event stream."""

from __future__ import annotations

from typing import Any

from llamasrv.api.jsonio import dumps

#: A comment that shows proxies and clients that the connection lives.
PING = b":\n\n"
#: End of a stream in the OpenAI dialect; the native one just ends.
DONE = b"data: [DONE]\n\n"


def frame(value: Any) -> bytes:
    """``data: <JSON>`` and an empty line."""
    return b"data: " + dumps(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """Like :func:`frame`, with the name of the event before it."""
    return b"event: " + name.encode() + b"\n" + frame(value)
