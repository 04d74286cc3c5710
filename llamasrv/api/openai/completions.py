"""POST /v1/completions: results as OpenAI's ``text_completion`` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from llamasrv.api import sse
from llamasrv.api.errors import ApiError
from llamasrv.api.jsonio import to_text
from llamasrv.api.openai.common import Request, final_logprobs, finish_reason, partial_logprobs
from llamasrv.api.openai.echo import Echo, LegacyLogprobs
from llamasrv.engine.result import FinalResult, PartialResult, PromptTokenProb, Result

KIND = "text_completion"


def completion_response(request: Request, results: Sequence[FinalResult], echo: Echo | None) -> dict[str, Any]:
    """Response for a request that is not streamed, one choice per result."""
    out = request.body(KIND, [_final_choice(result, echo) for result in results])
    out["usage"] = request.usage(results)
    request.add_final_extras(out, results[0])
    return out


class CompletionStream:
    """Frames of a stream, one choice in each; ends with the token counts, if asked for, and ``[DONE]``."""

    def __init__(self, request: Request, echo: Echo | None) -> None:
        self._request = request
        self._echo = echo
        self._finals: list[FinalResult] = []
        #: Prompt of each choice that has not been given back yet.
        self._prompts = dict(enumerate(echo.prompts)) if echo is not None else {}
        self._scores: dict[int, LegacyLogprobs] = {}
        if echo is not None and echo.is_scored:
            self._scores = {index: echo.logprobs() for index in self._prompts}

    def frame(self, result: Result) -> bytes:
        if isinstance(result, PartialResult):
            if result.is_begin:
                return b""
            if result.prompt_probs is not None:
                return self._prompt(result.index, result.prompt_probs)
            before = b"" if result.progress is not None else self._prompt(result.index, None)
            return before + sse.frame(self._chunk(result))
        final = cast(FinalResult, result)
        before = self._prompt(final.index, None)
        self._finals.append(final)
        out = self._request.body(KIND, [_choice(final.index, "", None, finish_reason(final))])
        self._request.add_final_extras(out, final)
        return before + sse.frame(out)

    def error(self, error: ApiError) -> bytes:
        return sse.frame(error.body())

    def end(self) -> bytes:
        if not self._request.include_usage:
            return sse.DONE
        out = self._request.body(KIND, [])
        out["usage"] = self._request.usage(self._finals)
        return sse.frame(out) + sse.DONE

    def _prompt(self, index: int, probs: Sequence[PromptTokenProb] | None) -> bytes:
        """The chunk with the prompt, if it is wanted and has not been sent."""
        tokens = self._prompts.pop(index, None)
        if self._echo is None or tokens is None:
            return b""
        pieces = self._echo.pieces(tokens)
        logprobs: dict[str, Any] | None = None
        if probs is not None:
            self._scores[index].add_prompt(pieces, probs)
            logprobs = {"content": [], **self._scores[index].take()}
        return sse.frame(self._request.body(KIND, [_choice(index, to_text(b"".join(pieces)), logprobs, None)]))

    def _chunk(self, result: PartialResult) -> dict[str, Any]:
        logprobs = partial_logprobs(result)
        scores = self._scores.get(result.index)
        if logprobs is not None and scores is not None and result.prob is not None:
            scores.add_generated([result.prob])
            logprobs.update(scores.take())
        out = self._request.body(KIND, [_choice(result.index, to_text(result.content), logprobs, None)])
        self._request.add_partial_extras(out, result)
        return out


def _final_choice(result: FinalResult, echo: Echo | None) -> dict[str, Any]:
    content, logprobs = result.content, final_logprobs(result)
    if echo is not None:
        pieces = echo.pieces(result.prompt)
        content = b"".join(pieces) + content
        if echo.is_scored:
            scores = echo.logprobs()
            if result.prompt:
                scores.add_prompt(pieces, result.prompt_probs)
            scores.add_generated(result.probs)
            logprobs = {"content": [], **(logprobs or {}), **scores.members()}
    return _choice(result.index, to_text(content), logprobs, finish_reason(result))


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
