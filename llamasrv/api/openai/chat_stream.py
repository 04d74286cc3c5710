"""Chunks of a streamed answer of /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from llamasrv.api import sse
from llamasrv.api.chat_state import ChatStates
from llamasrv.api.errors import ApiError
from llamasrv.api.openai.chat import chat_finish_reason, delta_json
from llamasrv.api.openai.common import Request, add_progress
from llamasrv.api.probs import probabilities
from llamasrv.api.timings import timings
from llamasrv.engine.result import FinalResult, PartialResult, Result, TokenProb

KIND = "chat.completion.chunk"


class ChatStream:
    """Frames of one stream, which may have several choices.

    A choice begins with its role and ends with its ``finish_reason``; the counts of tokens, if the request wants them,
    come last of all.
    """

    def __init__(self, request: Request, states: ChatStates) -> None:
        self._request = request
        self._states = states
        self._finals: list[FinalResult] = []
        self._begun: set[int] = set()
        #: Probabilities of tokens whose text waits for more, by choice.
        self._probs: defaultdict[int, list[TokenProb]] = defaultdict(list)

    def frame(self, result: Result) -> bytes:
        if isinstance(result, PartialResult):
            return b"" if result.is_begin else _frames(self._partial(result))
        assert isinstance(result, FinalResult)
        return _frames(self._final(result))

    def error(self, error: ApiError) -> bytes:
        return sse.frame(error.body())

    def end(self) -> bytes:
        return sse.DONE

    def _partial(self, result: PartialResult) -> list[dict[str, Any]]:
        index = result.index
        chunks = self._begin(index, again=result.progress is not None)
        chunks += [self._chunk(index, delta_json(delta)) for delta in self._states[index].update(result)]
        if result.prob is not None and result.prob.top:
            self._probs[index].append(result.prob)
        if chunks:
            last = chunks[-1]
            self._add_probs(last, index, result.post_sampling_probs)
            add_progress(last, result)
        return chunks

    def _final(self, result: FinalResult) -> list[dict[str, Any]]:
        request, index = self._request, result.index
        state = self._states[index]
        chunks = self._begin(index)
        deltas = state.finish(result)
        chunks += [self._chunk(index, delta_json(delta)) for delta in deltas]
        last = self._chunk(index, {}, chat_finish_reason(result, state.message))
        self._add_probs(last, index, result.params.post_sampling_probs)
        chunks.append(last)

        self._finals.append(result)
        if request.include_usage and len(self._finals) == request.n_results:
            last = request.body(KIND, [])
            last["usage"] = request.usage(self._finals)
            chunks.append(last)
        if result.stats.is_set:
            last["timings"] = timings(result.stats)
        request.add_verbose(chunks[0], result)
        return chunks

    def _begin(self, index: int, again: bool = False) -> list[dict[str, Any]]:
        """The chunk with the role, once; ``again``: also if it was sent before, to carry something."""
        if index in self._begun and not again:
            return []
        self._begun.add(index)
        return [self._chunk(index, {"role": "assistant", "content": None})]

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._request.body(KIND, [{"finish_reason": reason, "index": index, "delta": delta}])

    def _add_probs(self, chunk: dict[str, Any], index: int, post_sampling: bool) -> None:
        probs = self._probs.pop(index, None)
        if probs:
            chunk["choices"][0]["logprobs"] = {"content": probabilities(probs, post_sampling)}


def _frames(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(sse.frame, chunks))
