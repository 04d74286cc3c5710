"""GET /v1/requests: the requests under way, without a word of their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llamasrv.engine.result import SlotSnapshot

#: Being read and tokenized; waiting for a slot; in one; the rest of its answer being sent.
STATUSES = (RECEIVED, QUEUED, RUNNING, ENDING) = ("received", "queued", "running", "ending")


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request; ``created`` in seconds of the Unix clock, ``elapsed_ms`` since then."""

    id: str
    method: str
    path: str
    caller: str
    created: float
    elapsed_ms: float
    is_stream: bool
    timeout_s: float
    task_ids: Sequence[int]
    #: Nothing more is awaited from the engine.
    is_answered: bool = False


def requests_json(requests: Sequence[RequestView], slots: Sequence[SlotSnapshot]) -> dict[str, Any]:
    """The answer; ``slots``: what the slots do at this moment."""
    at_work = {slot.id_task: slot for slot in slots if slot.is_processing}
    return {"object": "list", "data": [_request(request, at_work) for request in requests]}


def _request(request: RequestView, at_work: dict[int, SlotSnapshot]) -> dict[str, Any]:
    slots = [at_work[id_task] for id_task in request.task_ids if id_task in at_work]
    return {
        "id": request.id,
        "object": "request",
        "status": _status(request, slots),
        "method": request.method,
        "path": request.path,
        "caller": request.caller,
        "created": int(request.created),
        "elapsed_ms": round(request.elapsed_ms, 3),
        "stream": request.is_stream,
        "timeout_s": request.timeout_s or None,
        "id_slots": [slot.id for slot in slots],
        "n_prompt_tokens_processed": sum(slot.n_prompt_tokens_processed for slot in slots),
        "n_prompt_tokens_cache": sum(slot.n_prompt_tokens_cache for slot in slots),
        "n_decoded": sum(slot.n_decoded for slot in slots),
    }


def _status(request: RequestView, slots: Sequence[SlotSnapshot]) -> str:
    if not request.task_ids:
        return RECEIVED
    if request.is_answered:
        return ENDING
    return RUNNING if slots else QUEUED
