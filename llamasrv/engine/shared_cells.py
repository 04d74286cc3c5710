"""Which KV cells several sequences of a unified buffer hold together."""

from __future__ import annotations


class SharedCells:
    """For each pair of sequences, how many leading tokens stand in the same cells.

    A shared cell must not be shifted: the move would hit every sequence in it.
    """

    def __init__(self, n_seq: int) -> None:
        self._common = [[0] * n_seq for _ in range(n_seq)]

    def copied(self, src: int, dst: int, n_tokens: int) -> None:
        """``dst``, until now empty, got the first ``n_tokens`` cells of ``src``, and thereby of all who share them."""
        for other in range(len(self._common)):
            if other != dst:
                n = n_tokens if other == src else min(n_tokens, self._common[src][other])
                self._common[dst][other] = self._common[other][dst] = n

    def cut(self, seq: int, n_tokens: int) -> None:
        """``seq`` gave up, or moved, its cells from token ``n_tokens`` on."""
        for other in range(len(self._common)):
            n = min(n_tokens, self._common[seq][other])
            self._common[seq][other] = self._common[other][seq] = n

    def n_shared(self, seq: int) -> int:
        """Number of leading tokens of ``seq`` whose cells any other sequence holds, too."""
        return max(self._common[seq])

    def sharers(self, seq: int, n_tokens: int) -> list[int]:
        """Sequences that share more than the first ``n_tokens`` tokens with ``seq``."""
        return [other for other, n in enumerate(self._common[seq]) if n > n_tokens]
