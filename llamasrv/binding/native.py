"""The compiled library: import, status codes, strings, ranges and ownership of handles.

Every call into ``lib`` releases the GIL, so one thread can close a handle while another is inside a call with it;
:class:`Handle` makes the closing thread wait.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

from llamasrv.binding.errors import ClosedError, NativeError

# the extension module has no types; nothing outside this package touches these two
_llama: Any = import_module("llamasrv._native._llama")
ffi: Any = _llama.ffi
lib: Any = _llama.lib

T = TypeVar("T")

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

NULL: Any = ffi.NULL


class Handle:
    """Owner of one native object. ``with handle as pointer`` keeps it open for the time of a call.

    Closing first closes the objects that depend on it (``parent``), then waits for the calls under way, then frees.
    """

    __slots__ = (
        "__weakref__",
        "_children",
        "_free",
        "_idle",
        "_lock",
        "_pointer",
        "_users",
        "closed",
        "name",
        "parent",
    )

    def __init__(self, name: str, pointer: Any, free: Callable[[Any], None], parent: Handle | None = None) -> None:
        self.name = name
        self._pointer = pointer
        self._free = free
        self.parent = parent  # kept alive: it must not be freed before this one
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._users = 0
        self.closed = False
        # re-entrant, since a signal handler or the garbage collector may come back here on the same thread
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        if parent is not None:
            parent._adopt(self)

    def _adopt(self, child: Handle) -> None:
        with self._lock:
            if self.closed:
                child.close()
                raise ClosedError(f"{self.name} is closed")
            self._children.add(child)

    def __enter__(self) -> Any:
        with self._lock:
            if self.closed:
                raise ClosedError(f"{self.name} is closed")
            self._users += 1
        return self._pointer

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._users -= 1
            if self.closed:
                self._idle.notify_all()

    def if_open(self, call: Callable[[Any], None]) -> None:
        """Run a call that returns at once; does nothing after close and never waits for calls under way."""
        with self._lock:
            if not self.closed:
                call(self._pointer)

    def close(self) -> None:
        """Free the native object; a second close does nothing. Must not be called from inside a call with it."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            children = list(self._children)
            while self._users > 0:
                self._idle.wait()
        for child in children:
            child.close()
        pointer, self._pointer = self._pointer, None
        self._free(pointer)

    def __del__(self) -> None:
        # half-built when the constructor raised
        if hasattr(self, "_idle"):
            self.close()


class Closing:
    """What is closed at the end of a ``with`` block, or by the garbage collector."""

    __slots__ = ()

    def close(self) -> None:
        """Free what it stands for; a second close does nothing."""
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class NativeObject(Closing):
    """One native object and the calls on it."""

    __slots__ = ("_handle",)

    _handle: Handle

    def close(self) -> None:
        self._handle.close()


def int_arg(name: str, value: int, lo: int = INT32_MIN, hi: int = INT32_MAX) -> int:
    """The value itself, or ValueError when it is not within [lo, hi]."""
    if not lo <= value <= hi:
        raise ValueError(f"{name} must be between {lo} and {hi}, not {value}")
    return value


def c_text(name: str, text: str | bytes) -> bytes:
    """UTF-8 bytes for a C string. Raises ValueError when it holds a NUL or a lone surrogate."""
    data = text.encode() if isinstance(text, str) else bytes(text)
    if b"\0" in data:
        raise ValueError(f"{name} must not contain a NUL character")
    return data


def c_path(name: str, path: str | bytes | os.PathLike[str]) -> bytes:
    """Bytes of a file name for a C string. Raises ValueError when it holds a NUL."""
    data = os.fsencode(path)
    if b"\0" in data:
        raise ValueError(f"{name} must not contain a NUL character")
    return data


def text_of(pointer: Any) -> str:
    """A C string that stays with the native side, as text; bytes that are not UTF-8 are replaced."""
    data: bytes = ffi.string(pointer)
    return data.decode("utf-8", "replace")


def take_text(out: Any) -> str:
    """The string that a call stored through ``char **out``; frees it."""
    pointer = out[0]
    out[0] = NULL
    try:
        return text_of(pointer)
    finally:
        lib.lsrv_free(pointer)


def error_text(err: Any, default: str) -> str:
    """The error that a call stored through ``char **err``; frees it."""
    return take_text(err) if err[0] != NULL else default


def check(status: int, err: Any, doing: str) -> None:
    """Raise NativeError with the native text unless status is LSRV_OK."""
    if status != 0:
        raise NativeError(error_text(err, f"{doing} failed"))


def new_text_pointer() -> Any:
    """An empty ``char **`` for an error or a result."""
    return ffi.new("char **")
