"""What the engine needs of a drafter, see :class:`llamasrv.engine.backend.Backend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llamasrv.engine.backend import BackendError, Batch, Sampler, SeqRm


@dataclass(slots=True)
class DraftRequest:
    """Draft at most ``n_max`` tokens after ``tokens`` and ``last``, which is not in the KV cells yet.

    With ``temp`` > 0 a drafter that samples keeps its distributions, for verification by rejection sampling.
    """

    seq_id: int
    tokens: Sequence[int]
    last: int
    n_max: int
    temp: float
    seed: int


@dataclass(slots=True)
class VerifyRequest:
    """``index``: entry of the last decode before the draft, which stands at the next ones.

    ``replay``: these tokens were accepted before, but a roll-back took them out of the cells. ``n_top`` >= 0: also
    tell probabilities, ``post``: after the sampler chain.
    """

    sampler: Sampler
    seq_id: int
    index: int
    draft: Sequence[int]
    replay: bool
    rejection: bool
    n_top: int
    post: bool


@dataclass(slots=True)
class Verified:
    """``tokens``: those of the draft that stand and the target's own after them; ``probs``: one for each, if asked."""

    tokens: list[int]
    probs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)


class Drafter(Protocol):
    """Proposes tokens that the model verifies in one decode. Main-loop thread only.

    Removals, copies and shifts of cells reach its own memory through the backend.
    """

    n_max: int
    #: Removals that its own memory supports; PART if it has none.
    seq_rm_type: SeqRm
    n_rs_seq: int

    def begin(self, seq_id: int, tokens: Sequence[int], seed: int) -> None:
        """A generation starts after these tokens."""

    def set_tokens(self, seq_id: int, tokens: Sequence[int]) -> None:
        """The sequence's tokens changed otherwise than by growing."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One draft per request, empty where nothing was found."""

    def process(self, batch: Batch, offset: int, n_tokens: int) -> bool:
        """Take in entries that the model has decoded. False: its memory lacks them now."""

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verified | BackendError]: ...
    def accept(self, seq_id: int, n_tokens: int) -> None:
        """Of the last draft so many tokens stand."""

    def checkpoint(self, seq_id: int) -> bytes:
        """The part of its own memory that cannot be rolled back; empty if there is none."""

    def roll_back(self, seq_id: int, data: bytes, n_tokens: int) -> None:
        """Return to a :meth:`checkpoint`, if ``data`` is one, and drop its cells from ``n_tokens`` on."""

    def print_stats(self) -> None: ...
