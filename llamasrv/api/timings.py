"""Times of a request, member ``timings``."""

from __future__ import annotations

from typing import Any

from llamasrv.engine.stats import SlotStats


def timings(stats: SlotStats) -> dict[str, Any]:
    """Counts in tokens, times in milliseconds, rates per second."""
    out: dict[str, Any] = {
        "cache_n": stats.n_prompt_cached,
        "prompt_n": stats.n_prompt_processed,
        "prompt_ms": stats.t_prompt_ms,
        "prompt_per_token_ms": stats.t_prompt_per_token_ms,
        "prompt_per_second": stats.n_prompt_tps,
        "predicted_n": stats.n_gen,
        "predicted_ms": stats.t_gen_ms,
        "predicted_per_token_ms": stats.t_gen_per_token_ms,
        "predicted_per_second": stats.n_gen_tps,
    }
    if stats.n_draft_tokens > 0:
        out["draft_n"] = stats.n_draft_tokens
        out["draft_n_accepted"] = stats.n_draft_accepted
    return out
