"""Content arrays of OpenAI's dialect: ``[{"type": "text", "text": ...}, ...]``."""

from __future__ import annotations

from typing import Any

from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.jsonio import type_name
from llamasrv.engine.result import ErrorType

_MEDIA = {"image_url": "image", "input_audio": "audio", "input_video": "video", "video_url": "video"}


class MediaError(ApiError):
    """The request holds a picture or sound that this model cannot take."""

    def __init__(self, kind: str) -> None:
        hint = "hint: if this is unexpected, you may need to provide the mmproj"
        super().__init__(ErrorType.INVALID_REQUEST, f"{kind} input is not supported - {hint}")


def content_text(content: Any) -> str:
    """The text parts of a content array, joined. Raises ApiError for anything else, MediaError for media."""
    if not isinstance(content, list):
        raise invalid_request('"content" must be an array')
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise invalid_request(f"content[] must be an object, but is {type_name(part)}")
        kind = part.get("type")
        if isinstance(kind, str) and kind in _MEDIA:
            raise MediaError(_MEDIA[kind])
        if kind != "text":
            raise invalid_request("unsupported content[].type")
        text = part.get("text")
        texts.append(text if isinstance(text, str) else "")
    return "".join(texts)
