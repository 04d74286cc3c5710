"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

from llamasrv.http.config import HttpConfig

#: Paths that need no key, below the prefix or not. The page's files are public routes.
PUBLIC_PATHS = frozenset({"/", "/health", "/v1/health"})
#: Paths that need no key for reading.
PUBLIC_GET_PATHS = frozenset({"/models", "/v1/models"})
BEARER = "Bearer "


class KeyCheck:
    """Decides whether a request may pass. Without configured keys every request may."""

    def __init__(self, config: HttpConfig, public_paths: frozenset[str] = PUBLIC_PATHS) -> None:
        self._keys = [key.encode() for key in config.api_keys]
        prefix = config.api_prefix
        self._public = public_paths | {prefix + path for path in public_paths}
        self._public_get = PUBLIC_GET_PATHS | {prefix + path for path in PUBLIC_GET_PATHS}

    def allows(self, environ: Mapping[str, Any]) -> bool:
        """``environ``: the WSGI environment of the request."""
        if not self._keys:
            return True
        path = environ["PATH_INFO"]
        if path in self._public:
            return True
        if path in self._public_get and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return True
        given = str(environ.get("HTTP_AUTHORIZATION") or environ.get("HTTP_X_API_KEY") or "")
        # WSGI hands header bytes over as latin-1
        secret = given.removeprefix(BEARER).encode("latin-1", "replace")
        # all keys are compared, so that the time says nothing about which one came close
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(secret, key)
        return found
