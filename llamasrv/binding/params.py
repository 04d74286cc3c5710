"""The command line and process-wide set-up."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

from llamasrv.binding.native import (
    Handle,
    NativeObject,
    c_path,
    c_text,
    check,
    ffi,
    lib,
    new_text_pointer,
    take_text,
    text_of,
)

_init_lock = threading.Lock()
_initialized = False


def init() -> None:
    """Set up logging and the numeric locale, once per process; :meth:`Params.parse` does it as well."""
    global _initialized
    with _init_lock:
        if not _initialized:
            lib.lsrv_init()
            _initialized = True


def backend_init(params: Params) -> None:
    """Initialize the compute backends and NUMA as the parameters say; once, before a model is loaded."""
    with params._handle as pointer:
        lib.lsrv_backend_init(pointer)


def backend_free() -> None:
    lib.lsrv_backend_free()


def build_info() -> str:
    """Build number and commit of the native library, for example ``b11549-1a2b3c4``."""
    return text_of(lib.lsrv_build_info())


def build_number() -> int:
    return int(lib.lsrv_build_number())


class Params(NativeObject):
    """Parameters of llama-server as its own parser read them. One thread at a time."""

    __slots__ = ()

    def __init__(self) -> None:
        """The defaults, as if the command line were empty (environment variables are not read)."""
        init()
        pointer = lib.lsrv_params_new()
        if not pointer:
            raise MemoryError("no memory for the parameters")
        self._handle = Handle("params", pointer, lib.lsrv_params_free)

    @classmethod
    def parse(cls, argv: Sequence[str], usage_extra: str = "") -> Params:
        """Parse a command line: flags, their aliases, environment variables, presets.

        ``argv`` is as ``sys.argv``: the first item is the program's name. ``usage_extra`` is printed below ``--help``.
        Raises NativeError on bad input; the parser has then written what is wrong to stderr. For ``--help``,
        ``--version`` and their like the parser prints and ends the process itself.
        """
        args = [c_path("argument", arg) for arg in argv] or [b"llamasrv"]
        extra = c_text("usage_extra", usage_extra)
        params = cls()
        buffers = [ffi.new("char[]", arg) for arg in args]
        array = ffi.new("char *[]", [*buffers, ffi.NULL])  # C programs may look at argv[argc]
        sys.stdout.flush()
        err = new_text_pointer()
        try:
            with params._handle as pointer:
                status = lib.lsrv_params_parse(pointer, len(args), array, extra, err)
            check(status, err, "parsing the command line")
        except BaseException:
            params.close()
            raise
        return params

    def to_dict(self) -> dict[str, Any]:
        """All fields by their native names; see ``lsrv_params_to_json`` in bridge.h. Infinities are words ("-inf")."""
        out, err = new_text_pointer(), new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_params_to_json(pointer, out, err), err, "reading the parameters")
        fields: dict[str, Any] = json.loads(take_text(out))
        return fields

    def set(self, **fields: Any) -> None:
        """Set fields (numbers, booleans, strings and lists of strings) by the names of :meth:`to_dict`.

        All are set or none: raises NativeError for an unknown name, a wrong type or a number out of range.
        """
        text = json.dumps(fields).encode()
        err = new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_params_set(pointer, text, err), err, "setting parameters")

    def resolve_model(self) -> bool:
        """Find or download what ``-hf``, ``-mu`` or ``--docker-repo`` name and set the model paths.

        For local files too: it tells the kind of speculative decoding from the draft model, if none was named.
        Returns whether the repository holds a preset for the router. Raises NativeError.
        """
        is_preset, err = ffi.new("bool *"), new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_params_resolve_model(pointer, is_preset, err), err, "resolving the model")
        return bool(is_preset[0])

    def print_info(self, devices: bool) -> None:
        """Log build, system and, if wanted, devices."""
        with self._handle as pointer:
            lib.lsrv_params_print_info(pointer, devices)
