"""How much of a prompt may go into one step while others are being answered."""

from __future__ import annotations

#: Never fewer prompt tokens than this in a step: a prompt must get on, and the CPU backend computes attention of
#: smaller ubatches token by token (GGML_FA_TILE_Q in ggml), at up to twice the time per token.
N_MIN = 64
#: Fewest prompt tokens of a step that says something about the speed.
N_MEASURED = 16
#: Bound before anything was measured.
N_FIRST = 64
#: Weight of the latest measurement.
WEIGHT = 0.3


class ChunkBudget:
    """Bounds the prompt tokens of a step so that a running stream waits about ``target_ms`` for its next token.

    A step is taken to last ``t_gen + n_prompt * t_prompt``; both times are moving averages of what was measured.
    ``target_ms`` 0: no bound.
    """

    def __init__(self, target_ms: float) -> None:
        self._target_s = target_ms / 1e3
        self._t_gen: float | None = None
        self._t_prompt: float | None = None

    def limit(self, n_batch: int) -> int:
        """Prompt tokens allowed in a step that also generates; at most ``n_batch``."""
        if self._target_s <= 0:
            return n_batch
        if not self._t_prompt:
            return min(N_FIRST, n_batch)
        room = self._target_s - (self._t_gen or 0.0)
        return min(n_batch, max(N_MIN, int(room / self._t_prompt)))

    def record(self, n_prompt: int, n_gen: int, seconds: float) -> None:
        """Take note of one step whose result was waited for."""
        if n_prompt == 0:
            self._t_gen = self._mean(self._t_gen, seconds)
        elif n_prompt >= N_MEASURED:
            rest = seconds - (self._t_gen or 0.0 if n_gen else 0.0)
            self._t_prompt = self._mean(self._t_prompt, max(rest, seconds / 10) / n_prompt)

    @staticmethod
    def _mean(old: float | None, new: float) -> float:
        return new if old is None else old + WEIGHT * (new - old)
