"""Cross-origin rules of --cors-origins, --cors-methods, --cors-headers and --cors-credentials."""

from __future__ import annotations

import re

from llamasrv.engine.log import srv_wrn
from llamasrv.http.config import HttpConfig

_LOCAL_ORIGIN = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


def is_local_origin(origin: str) -> bool:
    return _LOCAL_ORIGIN.fullmatch(origin) is not None


def origin_headers(config: HttpConfig, origin: str) -> list[tuple[str, str]]:
    """Headers that every response carries. ``origin``: the request's Origin header or "".

    A wildcard never stands beside allowed credentials: with both configured the caller's origin is echoed, as the
    manual of --cors-credentials says.
    """
    rule = config.cors_origins.strip()
    if rule == "*" and not config.cors_credentials:
        return [("Access-Control-Allow-Origin", "*")]
    if rule == "*":
        allowed = bool(origin)
    elif rule == "localhost":
        allowed = is_local_origin(origin)
        if origin and not allowed:
            srv_wrn("cors", "(CORS) skip non-localhost origin: %s", origin)
    elif "," in rule:
        # a list is no valid header value: name the one that asks, if it is in the list
        allowed = origin in (entry.strip() for entry in rule.split(","))
    else:
        return [("Access-Control-Allow-Origin", rule)]
    varies = [("Vary", "Origin")]
    return [("Access-Control-Allow-Origin", origin), *varies] if allowed else varies


def preflight_headers(config: HttpConfig) -> list[tuple[str, str]]:
    """What OPTIONS answers in addition."""
    return [
        ("Access-Control-Allow-Credentials", "true" if config.cors_credentials else "false"),
        ("Access-Control-Allow-Methods", config.cors_methods),
        ("Access-Control-Allow-Headers", config.cors_headers),
    ]
