"""Results of completions in the native dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from llamasrv.api.context import ApiContext
from llamasrv.api.jsonio import to_text
from llamasrv.api.probs import probabilities
from llamasrv.api.settings import generation_settings
from llamasrv.api.sse import frame
from llamasrv.api.timings import timings
from llamasrv.engine.result import FinalResult, PartialResult, PromptProgress


def completion_response(context: ApiContext, results: Sequence[FinalResult]) -> Any:
    """JSON value for a request that is not streamed: an object, or a list of them for several results."""
    out = [final_json(context, result) for result in results]
    return out[0] if len(out) == 1 else out


def partial_frame(result: PartialResult) -> bytes:
    """Event for a piece of a stream; empty if the result has nothing to show."""
    if result.is_begin:
        return b""
    # runs per token and client
    return b"data: " + orjson.dumps(partial_json(result)) + b"\n\n"


def final_frame(context: ApiContext, result: FinalResult) -> bytes:
    """Last event of a completion in a stream."""
    return frame(final_json(context, result))


def partial_json(result: PartialResult) -> dict[str, Any]:
    out: dict[str, Any] = {
        "index": result.index,
        "content": to_text(result.content),
        "tokens": result.tokens,
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": result.n_decoded,
        "tokens_evaluated": result.n_prompt_tokens,
    }
    if result.stats is not None and result.stats.is_set:
        out["timings"] = timings(result.stats)
    if result.progress is not None:
        out["prompt_progress"] = progress_json(result.progress)
    if result.prob is not None and result.prob.top:
        out["completion_probabilities"] = probabilities([result.prob], result.post_sampling_probs)
    return out


def final_json(context: ApiContext, result: FinalResult) -> dict[str, Any]:
    """The whole object, or what ``response_fields`` asks for."""
    params = result.params
    out: dict[str, Any] = {
        "index": result.index,
        "content": to_text(result.content),
        "tokens": result.tokens,
        "id_slot": result.id_slot,
        "stop": True,
        "model": context.meta.model_name,
        "tokens_predicted": result.n_decoded,
        "tokens_evaluated": result.n_prompt_tokens,
        "generation_settings": generation_settings(params),
        "prompt": to_text(context.vocab.text(result.prompt, True)),
        "has_new_line": result.has_new_line,
        "truncated": result.truncated,
        "stop_type": result.stop.value,
        "stopping_word": result.stopping_word,
        "tokens_cached": result.n_tokens_cached,
        "timings": timings(result.stats),
    }
    if not params.stream and result.probs:
        out["completion_probabilities"] = probabilities(result.probs, params.post_sampling_probs)
    return pick_fields(out, params.response_fields) if params.response_fields else out


def progress_json(progress: PromptProgress) -> dict[str, int]:
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": progress.time_ms,
    }


def pick_fields(value: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """``{path: member}`` for each of ``paths`` that exists; ``a/b`` is member b of member a."""
    out: dict[str, Any] = {}
    for path in paths:
        found: Any = value
        for key in path.split("/"):
            if not isinstance(found, dict) or key not in found:
                break
            found = found[key]
        else:
            out[path] = found
    return out
