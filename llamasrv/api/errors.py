"""Failures as the client sees them: ``{"error": {"code", "message", "type", ...}}``."""

from __future__ import annotations

from typing import Any

from llamasrv.engine.result import ErrorResult, ErrorType


class ApiError(Exception):
    """A request that cannot be served.

    ``extra`` are further members of the error object, for example ``n_prompt_tokens`` and ``n_ctx``.
    """

    def __init__(self, type: ErrorType, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.extra = extra

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.type.status

    def body(self) -> dict[str, Any]:
        """The whole response."""
        return error_body(self.type, self.message, **self.extra)

    @classmethod
    def from_result(cls, result: ErrorResult) -> ApiError:
        if result.type is ErrorType.EXCEED_CONTEXT_SIZE:
            return cls(result.type, result.message, n_prompt_tokens=result.n_prompt_tokens, n_ctx=result.n_ctx)
        return cls(result.type, result.message)


def invalid_request(message: str) -> ApiError:
    """An :class:`ApiError` with status 400."""
    return ApiError(ErrorType.INVALID_REQUEST, message)


def error_body(type: ErrorType, message: str, **extra: Any) -> dict[str, Any]:
    """``{"error": {"code": HTTP status, "message", "type", **extra}}``."""
    return {"error": {"code": type.status, "message": message, "type": type.label, **extra}}
