"""Log lines about the speed of a request."""

from __future__ import annotations

from llamasrv.engine.log import INFO, active, slt_inf
from llamasrv.engine.slot import Slot


def print_prompt_progress(slot: Slot) -> None:
    stats = slot.stats
    if active(INFO) and slot.task is not None and stats.t_prompt_ms >= 3000.0:
        slt_inf(
            slot,
            "print_timings",
            "prompt processing, n_tokens = %6d, progress = %.2f, t = %6.2f s / %.2f tokens per second",
            stats.n_prompt_processed,
            slot.prompt.n_tokens / max(1, slot.task.n_tokens),
            stats.t_prompt_ms / 1e3,
            stats.n_prompt_tps,
        )


def print_speed(slot: Slot, now: int) -> None:
    stats = slot.stats
    if stats.n_gen < 100 or now - slot.t_print_last < 3_000_000:
        return
    window = 1e6 * (stats.n_gen - slot.n_gen_printed) / (now - slot.t_print_last)
    slot.t_print_last = now
    slot.n_gen_printed = stats.n_gen
    slt_inf(
        slot,
        "print_timings",
        "n_gen = %6d, tg = %6.2f t/s, tg_3s = %6.2f t/s",
        stats.n_gen,
        stats.n_gen_tps,
        window,
    )


def print_timings(slot: Slot, n_reused: int) -> None:
    if not active(INFO):
        return
    stats = slot.stats
    for name, t_ms, n, per_token, per_second in (
        (
            "prompt eval time",
            stats.t_prompt_ms,
            stats.n_prompt_processed,
            stats.t_prompt_per_token_ms,
            stats.n_prompt_tps,
        ),
        ("       eval time", stats.t_gen_ms, stats.n_gen, stats.t_gen_per_token_ms, stats.n_gen_tps),
    ):
        slt_inf(
            slot,
            "print_timings",
            "%s = %10.2f ms / %5d tokens (%8.2f ms per token, %8.2f tokens per second)",
            name,
            t_ms,
            n,
            per_token,
            per_second,
        )
    slt_inf(
        slot,
        "print_timings",
        "      total time = %10.2f ms / %5d tokens",
        stats.t_prompt_ms + stats.t_gen_ms,
        stats.n_prompt_processed + stats.n_gen,
    )
    slt_inf(slot, "print_timings", "   graphs reused = %10d", n_reused)
    if stats.n_draft_tokens:
        mean = 1.0 + stats.n_draft_accepted / stats.n_draft_verif_steps if stats.n_draft_verif_steps else 1.0
        slt_inf(
            slot,
            "print_timings",
            "draft acceptance = %0.5f (%5d accepted / %5d generated), mean len = %5.2f",
            stats.n_draft_accepted / stats.n_draft_tokens,
            stats.n_draft_accepted,
            stats.n_draft_tokens,
            mean,
        )
