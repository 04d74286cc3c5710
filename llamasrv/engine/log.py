"""Log lines of the server in llama-server's form. Nothing is formatted below the active level.

The process decides where lines go: :func:`set_sink` is given the native log at start-up, so that native and Python
lines are one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamasrv.engine.slot import Slot

ERROR, WARN, INFO, TRACE, DEBUG = 1, 2, 3, 4, 5


def _drop(level: int, text: str) -> None:
    pass


_threshold = 0
_sink: Callable[[int, str], None] = _drop
_events: Callable[[str, bytes], None] | None = None


def set_sink(
    sink: Callable[[int, str], None], threshold: int, events: Callable[[str, bytes], None] | None = None
) -> None:
    """Send lines of level <= ``threshold`` (1 error ... 5 debug) to ``sink(level, text)``.

    ``events(type, json)``: where structured entries go, if the log has them.
    """
    global _sink, _threshold, _events
    _sink, _threshold, _events = sink, threshold, events


def wants_events() -> bool:
    """Whether the log has structured entries (--log-jsonl)."""
    return _events is not None


def event(type_: str, data: bytes) -> None:
    """Write ``{"type": type_, "data": data}``; ``data``: a JSON value."""
    if _events is not None:
        _events(type_, data)


def active(level: int) -> bool:
    return level <= _threshold


def _text(level: int, fmt: str, args: tuple[object, ...]) -> str:
    """The message. One line below the debug level: nobody shall begin a new one with a name of his choice."""
    text = fmt % args if args else fmt
    if text.isprintable() or level >= DEBUG:
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _srv(level: int, prefix: str, where: str, fmt: str, args: tuple[object, ...]) -> None:
    if level <= _threshold:
        _sink(level, f"{prefix:<4} {where[:12]:>12}: {_text(level, fmt, args)}\n")


def srv_err(where: str, fmt: str, *args: object) -> None:
    _srv(ERROR, "srv", where, fmt, args)


def srv_wrn(where: str, fmt: str, *args: object) -> None:
    _srv(WARN, "srv", where, fmt, args)


def srv_inf(where: str, fmt: str, *args: object) -> None:
    _srv(INFO, "srv", where, fmt, args)


def srv_trc(where: str, fmt: str, *args: object) -> None:
    _srv(TRACE, "srv", where, fmt, args)


def srv_dbg(where: str, fmt: str, *args: object) -> None:
    _srv(DEBUG, "srv", where, fmt, args)


def que_inf(where: str, fmt: str, *args: object) -> None:
    _srv(INFO, "que", where, fmt, args)


def que_dbg(where: str, fmt: str, *args: object) -> None:
    _srv(DEBUG, "que", where, fmt, args)


def res_dbg(where: str, fmt: str, *args: object) -> None:
    _srv(DEBUG, "res", where, fmt, args)


def _slt(level: int, slot: Slot, where: str, fmt: str, args: tuple[object, ...]) -> None:
    if level <= _threshold:
        id_task = slot.task.id if slot.task else -1
        _sink(level, f"slot {where[:12]:>12}: id {slot.id:2d} | task {id_task} | {_text(level, fmt, args)}\n")


def slt_err(slot: Slot, where: str, fmt: str, *args: object) -> None:
    _slt(ERROR, slot, where, fmt, args)


def slt_wrn(slot: Slot, where: str, fmt: str, *args: object) -> None:
    _slt(WARN, slot, where, fmt, args)


def slt_inf(slot: Slot, where: str, fmt: str, *args: object) -> None:
    _slt(INFO, slot, where, fmt, args)


def slt_trc(slot: Slot, where: str, fmt: str, *args: object) -> None:
    _slt(TRACE, slot, where, fmt, args)


def slt_dbg(slot: Slot, where: str, fmt: str, *args: object) -> None:
    _slt(DEBUG, slot, where, fmt, args)
