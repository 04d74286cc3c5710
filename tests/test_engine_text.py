"""What sampled tokens do to the text of a slot: stop strings, and what is shown when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llamasrv.engine.generation import accept_token
from llamasrv.engine.result import StopType
from llamasrv.engine.slot import Slot
from llamasrv.engine.task import Task, TaskParams, TaskType
from llamasrv.engine.text import GeneratedText


def speaking(
    pieces: Sequence[bytes], stop: Sequence[str] = (), n_predict: int = -1, n_ctx: int = 100, n_indent: int = 0
) -> Slot:
    """A slot that has been given these pieces; one token stands for each."""
    slot = Slot(0, n_ctx)
    params = TaskParams(n_predict=n_predict, antiprompt=tuple(stop), n_indent=n_indent, stream=True)
    slot.task = Task(id=1, type=TaskType.COMPLETION, tokens=[1], params=params)
    slot.n_predict_max = n_predict
    slot.text = GeneratedText([word.encode() for word in stop])
    slot.prompt.tokens.append(1)
    shown = b""
    for number, piece in enumerate(pieces):
        assert slot.has_next_token
        slot.stats.n_gen += 1
        out, _ = accept_token(slot, number, piece, is_eog=False, ctx_shift=False)
        shown += out
        slot.prompt.tokens.append(number)
    if not slot.has_next_token:
        assert shown == slot.text.data
    return slot


@pytest.mark.parametrize("n_predict", [2, 3])
def test_a_stop_string_is_found_in_a_token_that_ends_inside_a_character(n_predict: int) -> None:
    slot = speaking([b"one", b". \xe7"], [". "], n_predict)
    assert (slot.stop, slot.stopping_word, slot.has_next_token) == (StopType.WORD, ". ", False)
    assert bytes(slot.text.data) == b"one"


def test_a_stop_string_counts_although_the_context_is_full() -> None:
    slot = speaking([b"a", b"b", b"STOP"], ["STOP"], n_ctx=4)
    assert (slot.stop, slot.stopping_word, slot.truncated) == (StopType.WORD, "STOP", False)
    slot = speaking([b"a", b"b", b"STOP"], n_ctx=4)
    assert (slot.stop, slot.truncated) == (StopType.LIMIT, True)


def test_an_unfinished_character_is_shown_at_the_end_by_limit() -> None:
    slot = speaking([b"a", b"\xe7"], n_predict=2)
    assert (slot.stop, bytes(slot.text.data)) == (StopType.LIMIT, b"a\xe7")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"a", b"\n", b" ma"], b"a\n "),
        ([b"a\n ma"], b"a\n "),
        ([b"a\n  b", b"\n", b" ", b" ", b"c", b"\n", b"\t", b"d"], b"a\n  b\n  c\n\t"),
        ([b"a\n  b\n  c\nd"], b"a\n  b\n  c\n"),
        ([b"a\n", b"\n"], b"a\n"),
    ],
)
def test_a_line_that_is_indented_too_little_is_never_shown(pieces: list[bytes], text: bytes) -> None:
    slot = speaking(pieces, n_indent=2)
    assert (bytes(slot.text.data), slot.stop, slot.has_next_token) == (text, StopType.LIMIT, False)


def test_lines_that_are_indented_enough_go_on() -> None:
    slot = speaking([b"a\n  b\n", b"   c", b"\n ", b" "], n_indent=2)
    assert slot.has_next_token
    assert bytes(slot.text.data) == b"a\n  b\n   c\n  "
