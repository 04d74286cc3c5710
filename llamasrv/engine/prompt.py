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
    """Token ids in order of position, and checkpoints in order of ``n_tokens``.

    ``n_exact``: from this token on the cells were computed behind others that are gone (a context shift, shifted
    chunks); they serve the request that moved them and nobody else. None: all are what the tokens say.
    """

    tokens: list[int] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    n_exact: int | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_usable(self) -> int:
        """Tokens at the beginning that may serve another prompt."""
        return self.n_tokens if self.n_exact is None else min(self.n_tokens, self.n_exact)

    def keep_first(self, n: int) -> None:
        del self.tokens[n:]
        if self.n_exact is not None and n <= self.n_exact:
            self.n_exact = None

    def clear(self) -> None:
        self.tokens = []
        self.checkpoints = []
        self.n_exact = None

    def copy(self) -> Prompt:
        return Prompt(list(self.tokens), list(self.checkpoints), self.n_exact)

    def prefix(self, tokens: Sequence[int]) -> int:
        """How much of the beginning of ``tokens`` these cells hold."""
        return min(common_prefix(self.tokens, tokens), self.n_usable)

    def moved(self, n_tokens: int) -> None:
        """Cells from token ``n_tokens`` on were moved there from behind others."""
        self.n_exact = n_tokens if self.n_exact is None else min(n_tokens, self.n_exact)
