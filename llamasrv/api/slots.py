"""GET /slots."""

from __future__ import annotations

from typing import Any

from llamasrv.api.context import ApiContext
from llamasrv.api.jsonio import to_text
from llamasrv.api.settings import generation_settings
from llamasrv.engine.result import SlotSnapshot, SlotsResult


def slots_json(context: ApiContext, result: SlotsResult) -> list[dict[str, Any]]:
    return [slot_json(context, slot) for slot in result.slots]


def slot_json(context: ApiContext, slot: SlotSnapshot) -> dict[str, Any]:
    """One slot; settings in their full form only where the engine gives the prompt too."""
    out: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": slot.speculative,
        "is_processing": slot.is_processing,
    }
    if slot.params is None:
        return out
    out["id_task"] = slot.id_task
    out["n_prompt_tokens"] = slot.n_prompt_tokens
    out["n_prompt_tokens_processed"] = slot.n_prompt_tokens_processed
    out["n_prompt_tokens_cache"] = slot.n_prompt_tokens_cache
    out["params"] = generation_settings(slot.params, short=slot.prompt is None)
    out["next_token"] = [
        {
            "has_next_token": slot.has_next_token,
            "has_new_line": slot.has_new_line,
            "n_remain": slot.n_remain,
            "n_decoded": slot.n_decoded,
        }
    ]
    if slot.prompt is not None:
        out["prompt"] = to_text(context.vocab.text(slot.prompt, True))
        out["generated"] = to_text(slot.generated or b"")
    return out
