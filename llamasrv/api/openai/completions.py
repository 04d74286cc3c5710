"""POST /v1/completions: results as OpenAI's ``text_completion`` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from llamasrv.api import sse
from llamasrv.api.errors import ApiError
from llamasrv.api.jsonio import to_text
from llamasrv.api.openai.common import Request, final_logprobs, finish_reason, partial_logprobs
from llamasrv.engine.result import FinalResult, PartialResult, Result

KIND = "text_completion"


def completion_response(request: Request, results: Sequence[FinalResult]) -> dict[str, Any]:
    """Response for a request that is not streamed, one choice per result."""
    first = results[0]
    out = request.body(
        KIND,
        [
            _choice(result.index, to_text(result.content), final_logprobs(result), finish_reason(result))
            for result in results
        ],
    )
    out["usage"] = request.usage(results)
    request.add_final_extras(out, first)
    return out


class CompletionStream:
    """Frames of a stream, one choice in each; ends with the token counts, if asked for, and ``[DONE]``."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._finals: list[FinalResult] = []

    def frame(self, result: Result) -> bytes:
        if isinstance(result, PartialResult):
            return b"" if result.is_begin else sse.frame(self._chunk(result))
        final = cast(FinalResult, result)
        self._finals.append(final)
        out = self._request.body(KIND, [_choice(final.index, "", None, finish_reason(final))])
        self._request.add_final_extras(out, final)
        return sse.frame(out)

    def error(self, error: ApiError) -> bytes:
        return sse.frame(error.body())

    def end(self) -> bytes:
        if not self._request.include_usage:
            return sse.DONE
        out = self._request.body(KIND, [])
        out["usage"] = self._request.usage(self._finals)
        return sse.frame(out) + sse.DONE

    def _chunk(self, result: PartialResult) -> dict[str, Any]:
        choice = _choice(result.index, to_text(result.content), partial_logprobs(result), None)
        out = self._request.body(KIND, [choice])
        self._request.add_partial_extras(out, result)
        return out


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
