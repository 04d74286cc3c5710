"""States of a context's sequences: reading, putting back."""

from __future__ import annotations

import struct
from typing import Any

from llamasrv.binding.errors import NativeError
from llamasrv.binding.native import Handle, ffi, int_arg, lib

STATE_PARTIAL_ONLY = int(lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
STATE_ON_DEVICE = int(lib.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE)

_new_uncleared = ffi.new_allocator(should_clear_after_alloc=False)
_STATE_HEADER = struct.Struct("=Ii")  # magic, sequence


class SeqStates:
    """The part of a context that deals in states. One thread at a time."""

    __slots__ = ("_handle", "_on_device", "_pointer", "n_seq_max")

    def __init__(self, handle: Handle, pointer: Any) -> None:
        """``handle`` owns the context ``pointer``."""
        self._handle = handle
        self._pointer = pointer
        self._on_device: dict[int, bytes] = {}
        self.n_seq_max = int(lib.llama_n_seq_max(pointer))

    def state_seq_size(self, seq: int, flags: int = 0) -> int:
        """Bytes that :meth:`state_seq_get` would give now."""
        self._check_seq(seq)
        with self._handle:
            return int(lib.llama_state_seq_get_size_ext(self._pointer, seq, flags))

    def state_seq_get(self, seq: int, flags: int = 0) -> bytes:
        """The state of a sequence. Raises NativeError."""
        self._check_seq(seq)
        with self._handle:
            size = int(lib.llama_state_seq_get_size_ext(self._pointer, seq, flags))
            buffer = _new_uncleared("uint8_t[]", size)
            n = int(lib.llama_state_seq_get_data_ext(self._pointer, buffer, size, seq, flags))
        if n == 0:
            raise NativeError(f"failed to read the state of sequence {seq}")
        data = bytes(ffi.buffer(buffer, n))
        if flags & STATE_ON_DEVICE:
            self._on_device[seq] = data[: _STATE_HEADER.size]
        return data

    def state_seq_set(self, seq: int, data: bytes, flags: int = 0) -> int:
        """Replace a sequence's state by one of :meth:`state_seq_get`; returns the bytes read, 0 if it does not fit."""
        self._check_seq(seq)
        if flags & STATE_ON_DEVICE and data[: _STATE_HEADER.size] not in self._on_device.values():
            # the native side aborts the process on anything else
            raise ValueError("the data is no on-device state of this context")
        with self._handle:
            source = ffi.from_buffer("uint8_t[]", data)
            return int(lib.llama_state_seq_set_data_ext(self._pointer, source, len(data), seq, flags))

    def _check_seq(self, seq: int) -> None:
        int_arg("seq", seq, 0, self.n_seq_max - 1)
