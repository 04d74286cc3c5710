"""What a sampled token does to its slot: text, stop conditions, what may be shown."""

from __future__ import annotations

from llamasrv.engine.result import StopType
from llamasrv.engine.slot import Slot

_BLANKS = b" \t"


def accept_token(slot: Slot, token: int, piece: bytes, is_eog: bool, ctx_shift: bool) -> tuple[bytes, bool]:
    """Add a sampled token to the slot's text and decide how generation goes on.

    Sets ``stop``, ``stopping_word``, ``truncated``, ``has_next_token``, ``has_new_line`` of the slot.

    Returns:
        ``(text, shown)``: the bytes that may go out now, and whether the token counts as shown. It does not while
        the text ends inside a character: such a token is shown together with the one that ends it.
    """
    task = slot.task
    assert task is not None
    params = task.params
    text = slot.text

    slot.sampled = token
    text.append(piece)
    if params.return_tokens:
        slot.generated_tokens.append(token)
    slot.has_next_token = True

    incomplete = text.incomplete
    held = False
    if params.antiprompt:
        # looked for inside a character too: this token may be the last
        found = text.find_stop()
        if found is not None:
            text.truncate(found[0])
            incomplete = False
            slot.stop = StopType.WORD
            slot.stopping_word = params.antiprompt[found[1]]
            slot.has_next_token = False
        elif not (incomplete or is_eog):
            held = text.ends_in_partial_stop()

    if slot.has_next_token and not ctx_shift and slot.prompt.n_tokens + 1 >= slot.n_ctx:
        slot.truncated = True
        slot.stop = StopType.LIMIT
        slot.has_next_token = False

    if slot.has_next_token and not slot.has_budget:
        slot.stop = StopType.LIMIT
        slot.has_next_token = False

    if params.n_indent > 0:
        _check_indent(slot, params.n_indent)

    if params.t_max_predict_ms > 0 and not (incomplete or held):
        _check_time(slot, params.t_max_predict_ms)

    if is_eog:
        slot.stop = StopType.EOS
        slot.has_next_token = False

    if slot.has_next_token and (incomplete or held):
        return b"", not incomplete
    out = text.release()
    if b"\n" in out:
        slot.has_new_line = True
    return out, not incomplete


def _check_indent(slot: Slot, n_indent: int) -> None:
    """Stop where a line after the first begins with fewer than ``n_indent`` blanks, and drop it from there on."""
    data = slot.text.data
    while True:
        pos = start = slot.last_nl_pos
        if start > 0:
            while pos < len(data) and data[pos] in _BLANKS:
                pos += 1
            if pos == len(data):
                return
            if pos - start < n_indent:
                slot.stop = StopType.LIMIT
                slot.stopping_word = ""
                slot.has_next_token = False
                slot.text.truncate(pos)
                return
        newline = data.find(b"\n", start)
        if newline == -1:
            return
        slot.last_nl_pos = newline + 1


def _check_time(slot: Slot, t_max_predict_ms: int) -> None:
    """Stop after the time limit, but only where a new line goes out."""
    if slot.stats.t_gen_ms > t_max_predict_ms and slot.text.data.find(b"\n", slot.text.n_sent) != -1:
        slot.stop = StopType.LIMIT
        slot.has_next_token = False
