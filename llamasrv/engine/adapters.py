"""Under which LoRA adapters the cells of a sequence are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llamasrv.engine.prompt import Prompt

#: More than any sequence is long.
ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Adapters:
    """``scales``: of every adapter, by index. The first ``start`` tokens are computed without any (aLoRA).

    ``start`` is 0 where no scale differs from zero, so that equal objects compute equal cells.
    """

    scales: tuple[float, ...] = ()
    start: int = 0

    @property
    def n_plain(self) -> int:
        """Tokens at the beginning whose cells are those of the bare model."""
        return self.start if any(self.scales) else ENDLESS

    def at(self, position: int) -> tuple[float, ...]:
        """Scales under which the token at this position is computed."""
        return self.scales if position >= self.start else (0.0,) * len(self.scales)

    def n_alike(self, other: Adapters) -> int:
        """How many tokens at the beginning are computed alike by both."""
        return ENDLESS if self == other else min(self.n_plain, other.n_plain)

    def without(self, first: int, last: int) -> Adapters:
        """After the cells of the tokens [first, last) are gone and what follows has moved down."""
        gone = max(0, min(last, self.start) - first)
        return Adapters(self.scales, self.start - gone) if gone else self


class Computed(Protocol):
    """What holds cells or their copy: a slot, an entry of the RAM cache."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def adapters(self) -> Adapters: ...


def n_computed(held: Computed, tokens: Sequence[int], adapters: Adapters) -> int:
    """How many of ``tokens``, from the first on, ``held`` has just as ``adapters`` would compute them."""
    n_alike = held.adapters.n_alike(adapters)
    return min(held.prompt.prefix(tokens), n_alike) if n_alike else 0


def resolve(scales: Sequence[float], invocations: Sequence[Sequence[int]], tokens: Sequence[int]) -> Adapters:
    """What a prompt is computed under.

    ``invocations``: by adapter, the tokens from whose last occurrence on it applies (aLoRA); empty: an ordinary one. An
    aLoRA is off for a prompt without them, and on from the beginning beside ordinary adapters. As in the original it
    begins with the token before them. Raises ValueError for several aLoRAs at once.
    """
    active = [index for index, scale in enumerate(scales) if scale != 0.0]
    if not active or not all(invocations[index] for index in active):
        return Adapters(tuple(scales))
    if len(active) > 1:
        raise ValueError("Cannot run multiple aLoRAs in a single request")
    found = find_last(tokens, invocations[active[0]])
    if found < 0:
        return Adapters((0.0,) * len(scales))
    return Adapters(tuple(scales), max(0, found - 1))


def find_last(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    """Where ``wanted`` stands in ``tokens`` for the last time; -1: nowhere."""
    first, n = wanted[0], len(wanted)
    for start in range(len(tokens) - n, -1, -1):
        if tokens[start] == first and list(tokens[start : start + n]) == list(wanted):
            return start
    return -1
