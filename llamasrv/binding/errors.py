"""Exceptions of the binding."""

from __future__ import annotations


class NativeError(RuntimeError):
    """The native side refused or failed; the text is its own."""


class ClosedError(NativeError):
    """The object, or the model it belongs to, was closed before."""
