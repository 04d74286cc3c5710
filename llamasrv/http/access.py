"""One line of the log for each request that was answered."""

from __future__ import annotations

import time

from llamasrv.api.jsonio import dumps
from llamasrv.engine import log
from llamasrv.engine.log import DEBUG, INFO, srv_dbg, srv_inf
from llamasrv.http.requests import RequestRecord


def log_access(record: RequestRecord, status: int, client_left: bool, is_quiet: bool = False) -> None:
    """Write the line, or with --log-jsonl an object of type "access". No text of prompts or answers, no keys.

    ``is_quiet``: at the debug level.
    """
    level = DEBUG if is_quiet else INFO
    if not log.active(level):
        return
    ms = (time.monotonic() - record.began) * 1e3
    usage = record.usage
    if log.wants_events():
        fields = {
            "time": record.created,
            "method": record.method,
            "path": record.path,
            "status": status,
            "ms": round(ms, 3),
            "n_prompt_tokens": usage.n_prompt,
            "n_prompt_tokens_cache": usage.n_cached,
            "n_decoded": usage.n_generated,
            "request_id": record.id,
            "caller": record.caller,
            "client_left": client_left,
        }
        log.event("access", dumps(fields))
        return
    (srv_dbg if is_quiet else srv_inf)(
        "access",
        "%s %s %d, %.1f ms, tokens: %d prompt (%d cached) + %d, id %s, from %s%s",
        record.method,
        _printable(record.path),
        status,
        ms,
        usage.n_prompt,
        usage.n_cached,
        usage.n_generated,
        record.id,
        record.caller,
        ", client left" if client_left else "",
    )


def _printable(path: str) -> str:
    """A path comes decoded: nobody shall begin a new line of the log with it."""
    return path if path.isascii() and path.isprintable() else path.encode("unicode_escape").decode("ascii")
