"""The native log sink: Python lines go through it, so that all lines share stream, order and format.

Thread-safe, except that :func:`set_verbosity` belongs to start-up.
"""

from __future__ import annotations

from llamasrv.binding.native import int_arg, lib

OUTPUT = 0
ERROR = 1
WARN = 2
INFO = 3
TRACE = 4
DEBUG = 5


def log(level: int, text: str) -> None:
    """Write one line (a missing newline is added) if ``level`` is not above the verbosity."""
    if level > lib.lsrv_log_verbosity():
        return
    data = text.encode("utf-8", "backslashreplace").replace(b"\0", b"\\0")
    if not data.endswith(b"\n"):
        data += b"\n"
    lib.lsrv_log(int_arg("level", level), data)


def verbosity() -> int:
    """The threshold set by ``-lv``: lines of a higher level are dropped."""
    return int(lib.lsrv_log_verbosity())


def set_verbosity(threshold: int) -> None:
    lib.lsrv_log_set_verbosity(int_arg("threshold", threshold))


def flush() -> None:
    """Wait until everything logged so far was written."""
    lib.lsrv_log_flush()


def is_jsonl() -> bool:
    """Whether every line is a JSON object (--log-jsonl)."""
    return bool(lib.lsrv_log_is_jsonl())


def event(type_: str, data: bytes) -> None:
    """Write the line ``{"type": type_, "data": data}`` if :func:`is_jsonl`; what is not JSON is written as a string."""
    lib.lsrv_log_event(type_.encode(), data)
