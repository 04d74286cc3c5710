"""Probabilities of the tokens of which a text is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamasrv.api.probs import probabilities
from llamasrv.engine.result import TokenProb


class TokenTrail:
    """Sampled tokens that wait for the text that they become.

    Markup never becomes text, and a text may come later than its tokens.
    """

    __slots__ = ("_probs",)

    def __init__(self, probs: Sequence[TokenProb] = ()) -> None:
        self._probs = list(probs)

    def add(self, prob: TokenProb) -> None:
        self._probs.append(prob)

    def take(self, text: str) -> list[TokenProb]:
        """The last tokens that make up ``text``; they and those before them are gone. Empty if it is not there."""
        data = text.encode()
        begin = b"".join(prob.piece for prob in self._probs).rfind(data)
        if begin < 0:
            return []
        end, pos, first, last = begin + len(data), 0, 0, 0
        for index, prob in enumerate(self._probs):
            if pos <= begin:
                first = index
            if pos < end:
                last = index + 1
            pos += len(prob.piece)
        taken = self._probs[first:last]
        del self._probs[:last]
        return taken


def logprobs_json(probs: Sequence[TokenProb], n_top: int) -> list[dict[str, Any]]:
    """Natural logarithms, with the ``n_top`` most likely tokens at each place."""
    entries = probabilities(probs, False)
    for entry in entries:
        entry["top_logprobs"] = [_plain(other) for other in entry["top_logprobs"][:n_top]]
    return [_plain(entry) for entry in entries]


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "id"}
