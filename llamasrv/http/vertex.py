"""Settings of a container on Google's Vertex AI, which come as environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vertex:
    """``predict_path``: the one route of predictions. ``health_path``: another path of /health; empty: none."""

    predict_path: str = "/predict"
    health_path: str = ""
    port: int = 8080

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Vertex | None:
        """None unless AIP_MODE is PREDICTION. Raises ValueError for a port that is none."""
        if env.get("AIP_MODE") != "PREDICTION":
            return None
        port = env.get("AIP_HTTP_PORT") or "8080"
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"AIP_HTTP_PORT={port} is no port")
        return cls(
            predict_path=_path(env.get("AIP_PREDICT_ROUTE") or "/predict"),
            health_path=_path(env.get("AIP_HEALTH_ROUTE", "")),
            port=int(port),
        )


def _path(text: str) -> str:
    return text if text.startswith("/") or not text else f"/{text}"
