"""Names that nobody can guess."""

from __future__ import annotations

import functools
import os
import secrets
import string

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase


def random_string() -> str:
    """32 letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(32))


def new_completion_id() -> str:
    return "chatcmpl-" + random_string()


@functools.cache
def media_marker() -> str:
    """What stands for an image or a sound in a prompt, one for the life of the process.

    LLAMA_MEDIA_MARKER pins it.
    """
    return os.environ.get("LLAMA_MEDIA_MARKER") or f"<__media_{random_string()}__>"
