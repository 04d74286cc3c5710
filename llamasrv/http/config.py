"""Settings of the HTTP server, taken from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamasrv.http.vertex import Vertex

#: Largest request body accepted, bytes.
MAX_BODY_BYTES = 100 * 1024 * 1024
#: More slots than that do not raise the number of worker threads that always exist; others come when needed.
MAX_BASE_WORKERS = 256


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Fields have the names and meaning of the original's parameters; times in seconds."""

    hostnames: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    reuse_port: bool = False
    api_prefix: str = ""
    api_keys: tuple[str, ...] = ()
    n_parallel: int = 1
    n_threads_http: int = -1
    timeout_read: int = 3600
    timeout_write: int = 3600
    ssl_file_key: str = ""
    ssl_file_cert: str = ""
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = False
    sse_ping_interval: int = 30
    slot_save_path: str = ""
    ui: bool = True
    public_path: str = ""
    max_body_bytes: int = MAX_BODY_BYTES
    vertex: Vertex | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> HttpConfig:
        """From ``Params.to_dict()``."""
        known = {name: params[name] for name in cls.__dataclass_fields__ if name in params}
        if "hostnames" in known:
            known["hostnames"] = tuple(known["hostnames"])
        if "api_keys" in known:
            # a key file with CRLF line ends must not yield keys that nobody can send
            keys = tuple(key for key in (key.rstrip("\r") for key in known["api_keys"]) if key)
            if known["api_keys"] and not keys:
                raise ValueError("the API keys are all empty")  # rather than a server that is open to all
            known["api_keys"] = keys
        if known.get("api_prefix"):
            prefix = str(known["api_prefix"]).strip("/")
            known["api_prefix"] = f"/{prefix}" if prefix else ""
        return cls(**known)

    @property
    def n_workers(self) -> int:
        """Worker threads that always exist: what --threads-http says, else enough for all slots and monitoring."""
        if self.n_threads_http > 0:
            return self.n_threads_http
        return max(min(self.n_parallel, MAX_BASE_WORKERS) + 4, (os.cpu_count() or 1) - 1)

    @property
    def is_tls(self) -> bool:
        return bool(self.ssl_file_key and self.ssl_file_cert)
