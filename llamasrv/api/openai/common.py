"""What the answers of OpenAI's completion APIs have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llamasrv.api.context import ApiContext
from llamasrv.api.format_native import final_json, partial_json, progress_json
from llamasrv.api.probs import probabilities
from llamasrv.api.timings import timings
from llamasrv.engine.result import FinalResult, PartialResult, StopType
from llamasrv.engine.task import Task


class Request:
    """What the objects of one answer share: ``id``, ``created``, ``model``, ``system_fingerprint``, counts.

    ``tasks``: those of the request, one per prompt.
    """

    __slots__ = ("_context", "_tail", "include_usage", "n_results", "verbose")

    def __init__(self, context: ApiContext, tasks: Sequence[Task]) -> None:
        meta, params = context.meta, tasks[0].params
        self._context = context
        self._tail = {
            "created": int(time.time()),
            "model": meta.model_name,
            "system_fingerprint": meta.build_info,
            "id": tasks[0].cmpl_id,
        }
        self.include_usage = params.include_usage
        self.verbose = params.verbose
        self.n_results = sum(1 + len(task.child_tasks) for task in tasks)

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response or chunk; ``kind``: its member ``object``."""
        return {"choices": choices, "object": kind, **self._tail}

    def usage(self, results: Sequence[FinalResult]) -> dict[str, Any]:
        """Counts of tokens over all results. Answers to the same prompt count it once: that of its first result."""
        n_completion = sum(result.n_decoded for result in results)
        n_prompt = n_cached = 0
        seen: set[int] = set()
        for result in sorted(results, key=lambda result: result.index):
            if id(result.prompt) not in seen:
                seen.add(id(result.prompt))
                n_prompt += result.n_prompt_tokens
                n_cached += result.n_prompt_tokens_cache
        return {
            "completion_tokens": n_completion,
            "prompt_tokens": n_prompt,
            "total_tokens": n_completion + n_prompt,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }

    def add_final_extras(self, out: dict[str, Any], result: FinalResult) -> None:
        """Times, and with ``verbose`` the result in the native dialect."""
        self.add_verbose(out, result)
        if result.stats.is_set:
            out["timings"] = timings(result.stats)

    def add_verbose(self, out: dict[str, Any], result: FinalResult | PartialResult) -> None:
        if not self.verbose:
            return
        if isinstance(result, FinalResult):
            out["__verbose"] = final_json(self._context, result)
        else:
            out["__verbose"] = partial_json(result)

    def add_partial_extras(self, out: dict[str, Any], result: PartialResult) -> None:
        """Times and progress as far as the request wants them, and with ``verbose`` the native result."""
        self.add_verbose(out, result)
        add_progress(out, result)


def add_progress(out: dict[str, Any], result: PartialResult) -> None:
    if result.stats is not None and result.stats.is_set:
        out["timings"] = timings(result.stats)
    if result.progress is not None:
        out["prompt_progress"] = progress_json(result.progress)


def finish_reason(result: FinalResult) -> str:
    """Why the text ends."""
    return "stop" if result.stop in (StopType.WORD, StopType.EOS) else "length"


def final_logprobs(result: FinalResult) -> dict[str, Any] | None:
    """Member ``logprobs`` of a choice in one piece; None: null."""
    if result.params.stream or not result.probs:
        return None
    return {"content": probabilities(result.probs, result.params.post_sampling_probs)}


def partial_logprobs(result: PartialResult) -> dict[str, Any] | None:
    """Member ``logprobs`` of a choice in a chunk; None: null."""
    if result.prob is None or not result.prob.top:
        return None
    return {"content": probabilities([result.prob], result.post_sampling_probs)}
