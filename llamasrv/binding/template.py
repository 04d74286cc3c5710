"""Jinja templates with the native engine, for prompts that are not chats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llamasrv.binding.native import Handle, NativeObject, c_text, check, ffi, lib, new_text_pointer, take_text


class Template(NativeObject):
    """A parsed template. Thread-safe."""

    __slots__ = ()

    def __init__(self, source: str) -> None:
        """Raises NativeError when the template does not parse."""
        out, err = ffi.new("lsrv_template **"), new_text_pointer()
        check(lib.lsrv_template_new(c_text("source", source), out, err), err, "parsing the template")
        self._handle = Handle("template", out[0], lib.lsrv_template_free)

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for these variables (what JSON can hold; the order of keys counts).

        Raises NativeError when the template does not get along with them, ValueError for infinities.
        """
        text = json.dumps(values, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
        out, err = new_text_pointer(), new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_template_render(pointer, text, out, err), err, "rendering the template")
        return take_text(out)
