"""The tokens that a sequence's KV cells stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal tokens at the start of both. Compares slices, so that most of the work happens in C."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 64:
        mid = (low + high) // 2
        if a[low:mid] == b[low:mid]:
            low = mid
        else:
            high = mid
    while low < high and a[low] == b[low]:
        low += 1
    return low


@dataclass(slots=True)
class Checkpoint:
    """State of the part of a memory that cannot be rolled back, taken when ``n_tokens`` tokens were in it."""

    n_tokens: int
    pos_min: int
    pos_max: int
    data: bytes
    #: Task that made it; -1: read from a file.
    id_task: int = -1

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)


@dataclass(slots=True)
class Prompt:
    """Token ids in order of position, and checkpoints in order of ``n_tokens``."""

    tokens: list[int] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def keep_first(self, n: int) -> None:
        del self.tokens[n:]

    def clear(self) -> None:
        self.tokens = []
        self.checkpoints = []

    def copy(self) -> Prompt:
        return Prompt(list(self.tokens), list(self.checkpoints))
