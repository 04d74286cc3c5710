"""Prompts in RAM: sequences that lost their slot, kept with their state for the next request that begins like them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamasrv.engine.adapters import Adapters, n_computed
from llamasrv.engine.log import srv_err, srv_trc, srv_wrn
from llamasrv.engine.prompt import Prompt

MIB = 1024 * 1024


@dataclass(slots=True)
class CachedPrompt:
    prompt: Prompt
    adapters: Adapters
    data: bytes

    @property
    def size(self) -> int:
        """Bytes of the state and its checkpoints."""
        return len(self.data) + sum(checkpoint.size for checkpoint in self.prompt.checkpoints)


class PromptCache:
    """States in order of saving; the oldest go first when a limit is reached.

    ``limit_mib``: MiB, negative for none. ``limit_tokens``: grows as far as the size limit allows at the average size
    of a token.
    """

    def __init__(self, limit_mib: int, limit_tokens: int) -> None:
        self.states: list[CachedPrompt] = []
        self.limit_size = max(0, limit_mib) * MIB
        self.limit_tokens = limit_tokens

    @property
    def size(self) -> int:
        return sum(state.size for state in self.states)

    @property
    def n_tokens(self) -> int:
        return sum(state.prompt.n_tokens for state in self.states)

    def save(self, prompt: Prompt, adapters: Adapters, state_size: int, get_state: Callable[[], bytes]) -> bool:
        """Keep a copy unless the cache already holds it or it exceeds the limit. Entries it contains are dropped."""
        if not prompt.tokens:
            return False
        same = [state for state in self.states if state.adapters == adapters]
        if any(state.prompt.prefix(prompt.tokens) >= prompt.n_usable for state in same):
            srv_trc("save", " - prompt is already in the cache, skipping")
            return False
        size = state_size + sum(checkpoint.size for checkpoint in prompt.checkpoints)
        if self.limit_size and size > self.limit_size:
            srv_wrn(
                "save",
                " - prompt state size %.3f MiB exceeds cache size limit %.3f MiB, skipping",
                size / MIB,
                self.limit_size / MIB,
            )
            return False
        contained = {id(state) for state in same if prompt.prefix(state.prompt.tokens) >= state.prompt.n_usable}
        self.states = [state for state in self.states if id(state) not in contained]
        if self.limit_size:
            self._shrink_to(self.limit_size - size)
        try:
            data = get_state()
        except MemoryError:
            self.limit_size = max(1, int(0.4 * self.size))
            srv_err("save", "out of memory, cache size limit reduced to %.3f MiB", self.limit_size / MIB)
            self.update()
            return False
        self.states.append(CachedPrompt(prompt.copy(), adapters, data))
        return True

    def best(self, tokens: list[int], adapters: Adapters, n_shared: int, n_held: int) -> CachedPrompt | None:
        """The entry that shares more of ``tokens`` than the ``n_shared`` which a slot of ``n_held`` tokens has.

        It must also waste less of itself than the slot would, and at most three quarters. For memories that cannot
        drop a part: there a long entry is no better than what can be restored of it.
        """
        keep_best = n_shared / n_held if n_held else -1.0
        shared_best = n_shared
        found: CachedPrompt | None = None
        for state in self.states:
            if state.adapters != adapters:
                continue
            shared = state.prompt.prefix(tokens)
            keep = shared / state.prompt.n_tokens
            if keep >= 0.25 and keep > keep_best and shared > shared_best:
                keep_best, shared_best, found = keep, shared, state
        return found

    def longest(self, tokens: list[int], adapters: Adapters, n_shared: int) -> CachedPrompt | None:
        """The entry that shares most of ``tokens``, if it is more than ``n_shared``; of equals the shortest.

        Of an entry that was computed under other adapters, what was computed before them counts.
        """
        found: CachedPrompt | None = None
        for state in self.states:
            shared = n_computed(state, tokens, adapters)
            shorter = found is not None and state.prompt.n_tokens < found.prompt.n_tokens
            if shared > n_shared or (shared == n_shared and shorter):
                n_shared, found = shared, state
        return found

    def remove(self, state: CachedPrompt) -> None:
        self.states = [other for other in self.states if other is not state]

    def update(self) -> None:
        """Drop the oldest entries until both limits hold."""
        if self.limit_size:
            self._shrink_to(self.limit_size)
        if self.limit_tokens and self.states:
            per_token = max(1.0, self.size / max(1, self.n_tokens))
            limit = max(self.limit_tokens, int(self.limit_size / per_token)) if self.limit_size else self.limit_tokens
            while self.states and self.n_tokens > limit:
                self._drop_oldest()
        srv_trc("update", " - cache state: %d prompts, %.3f MiB", len(self.states), self.size / MIB)

    def _shrink_to(self, size: int) -> None:
        while self.states and self.size > size:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        state = self.states.pop(0)
        srv_wrn("update", " - removing oldest cache entry (size = %.3f MiB)", state.size / MIB)
