"""Generated text: what may be shown, and where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence


def incomplete_tail(text: bytes | bytearray) -> int:
    """Number of bytes at the end of ``text`` that begin a UTF-8 character without ending it (0..3).

    Only the lead byte is looked at; broken sequences elsewhere are the model's own and are not held back.
    """
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return back if back < need else 0
    return 0


def partial_stop(text: bytes | bytearray, start: int, word: bytes) -> int:
    """Position in ``text`` (at or after ``start``) of a tail that begins ``word``, or -1."""
    for length in range(min(len(text) - start, len(word)), 0, -1):
        if text.endswith(word[:length]):
            return len(text) - length
    return -1


class GeneratedText:
    """Text of one completion as bytes, with the mark up to which it was released to the client.

    A tail is held back while it may still become a stop string or a whole UTF-8 character.
    """

    __slots__ = ("_searched", "_words", "data", "n_sent")

    def __init__(self, stop_words: Sequence[bytes] = ()) -> None:
        self.data = bytearray()
        self.n_sent = 0
        self._words = tuple(stop_words)
        #: Up to here no stop string ends.
        self._searched = 0

    def append(self, piece: bytes) -> None:
        self.data += piece

    @property
    def incomplete(self) -> bool:
        """Whether the text ends inside a UTF-8 character."""
        data = self.data
        return bool(data) and data[-1] >= 0x80 and incomplete_tail(data) > 0

    def find_stop(self) -> tuple[int, int] | None:
        """Leftmost whole stop string in what was not sent: ``(position, index of the word)``.

        Searches only where a word can newly end.
        """
        best: tuple[int, int] | None = None
        for index, word in enumerate(self._words):
            start = max(self.n_sent, self._searched - len(word) + 1, 0)
            pos = self.data.find(word, start)
            if pos != -1 and (best is None or pos < best[0]):
                best = (pos, index)
        self._searched = len(self.data)
        return best

    def ends_in_partial_stop(self) -> bool:
        """Whether the unsent text may still turn into a stop string."""
        return any(partial_stop(self.data, self.n_sent, word) != -1 for word in self._words)

    def truncate(self, length: int) -> None:
        """Drop everything from ``length`` on. What was already sent stays sent."""
        del self.data[length:]
        self.n_sent = min(self.n_sent, length)
        self._searched = min(self._searched, length)

    def release(self) -> bytes:
        """Everything not sent so far; it counts as sent."""
        out = bytes(self.data[self.n_sent :])
        self.n_sent = len(self.data)
        return out
