"""What a request is about, and the media that belong to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.media import decode_media

#: Media files of one request.
MAX_FILES = 8


def parse_state(data: Mapping[str, Any]) -> tuple[Any, list[bytes]]:
    """The state without its media, and these: from ``files``, ``images`` and the parts of chat messages, in order.

    Raises ApiError with status 400.
    """
    if data.get("videos"):
        raise invalid_request('"videos" is not supported')
    files: list[bytes] = []
    for name in ("files", "images"):
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, list):
            raise invalid_request(f'"{name}" must be an array')
        for url in value:
            _add_image(files, url)
    state = data.get("state")
    wrapper = state if isinstance(state, dict) and "messages" in state else None
    messages = state if wrapper is None else wrapper["messages"]
    if not isinstance(messages, list):
        return state, files
    messages = [_without_media(message, files) for message in messages]
    return (messages if wrapper is None else {**wrapper, "messages": messages}), files


def _without_media(message: Any, files: list[bytes]) -> Any:
    """The message without its image and audio parts, which go to ``files``."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    kept = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url" and "image_url" in part:
            image = part["image_url"]
            _add_image(files, image["url"] if isinstance(image, dict) and "url" in image else image)
        elif kind == "input_audio" and "input_audio" in part:
            audio = part["input_audio"] if isinstance(part["input_audio"], dict) else {}
            _add_audio(files, audio.get("data", audio.get("url")))
        else:
            kept.append(part)
    return {**message, "content": kept}


def _add_image(files: list[bytes], url: Any) -> None:
    """Any media, which their content tells apart."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise invalid_request("images must be data URLs (data:image/...;base64,... or data:audio/...;base64,...)")
    if len(files) >= MAX_FILES:
        raise invalid_request(f"too many images, the maximum is {MAX_FILES}")
    files.append(decode_media(url))


def _add_audio(files: list[bytes], data: Any) -> None:
    if not isinstance(data, str) or data.startswith(("http", "file://")):
        raise invalid_request("audio must be base64 data")
    if len(files) >= MAX_FILES:
        raise invalid_request(f"too many media files, the maximum is {MAX_FILES}")
    files.append(decode_media(data))
