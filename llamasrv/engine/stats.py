"""Counters and times of one request in its slot."""

from __future__ import annotations

import time
from dataclasses import dataclass


def now_us() -> int:
    """Monotonic clock in microseconds."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class SlotStats:
    """Counts in tokens, times in microseconds of the monotonic clock (0: not reached).

    The phases follow each other: ``t_start`` -> ``t_prompt_last`` -> ``t_gen_last``.
    """

    n_prompt_cached: int = 0
    n_prompt_processed: int = 0
    n_gen: int = 0
    n_draft_tokens: int = 0
    n_draft_accepted: int = 0
    n_draft_verif_steps: int = 0
    t_start: int = 0
    t_prompt_last: int = 0
    t_gen_last: int = 0

    @property
    def is_set(self) -> bool:
        return self.t_start > 0

    @property
    def t_prompt_ms(self) -> float:
        return (self.t_prompt_last - self.t_start) / 1000.0 if self.t_prompt_last else 0.0

    @property
    def t_gen_us(self) -> int:
        # at least 1: the first token can land in the microsecond in which the prompt ended
        return max(1, self.t_gen_last - self.t_prompt_last) if self.t_gen_last else 0

    @property
    def t_gen_ms(self) -> float:
        return self.t_gen_us / 1000.0

    @property
    def n_gen_steps(self) -> int:
        """Decode steps spent on generation: the first token comes from the logits of the prompt."""
        return max(0, self.n_gen - 1)

    @property
    def t_prompt_per_token_ms(self) -> float:
        return self.t_prompt_ms / self.n_prompt_processed if self.n_prompt_processed else 0.0

    @property
    def t_gen_per_token_ms(self) -> float:
        return self.t_gen_ms / self.n_gen_steps if self.n_gen_steps else 0.0

    @property
    def n_prompt_tps(self) -> float:
        """Prompt tokens per second."""
        t_ms = self.t_prompt_ms
        return 1e3 * self.n_prompt_processed / t_ms if t_ms > 0 else 0.0

    @property
    def n_gen_tps(self) -> float:
        """Decode steps of generation per second."""
        t_ms = self.t_gen_ms
        return 1e3 * self.n_gen_steps / t_ms if t_ms > 0 else 0.0
