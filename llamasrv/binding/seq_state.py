"""States of a context's sequences: reading, putting back."""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from llamasrv.binding.errors import NativeError
from llamasrv.binding.native import NULL, Handle, c_path, ffi, int_arg, lib

STATE_PARTIAL_ONLY = int(lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
STATE_ON_DEVICE = int(lib.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE)

_new_uncleared = ffi.new_allocator(should_clear_after_alloc=False)
_STATE_HEADER = struct.Struct("=Ii")  # magic, sequence


class SeqStates:
    """The part of a context that deals in states. One thread at a time."""

    __slots__ = ("_handle", "_magic", "_on_device", "_pointer", "n_seq_max")

    def __init__(self, handle: Handle, pointer: Any) -> None:
        """``handle`` owns the context ``pointer``."""
        self._handle = handle
        self._pointer = pointer
        self._on_device: dict[int, bytes] = {}
        self._magic = b""
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

    def state_seq_set(self, seq: int, data: bytes | bytearray, flags: int = 0) -> int:
        """Replace a sequence's state by one of :meth:`state_seq_get`; returns the bytes read, 0 if it does not fit."""
        self._check_seq(seq)
        if flags & STATE_ON_DEVICE and bytes(data[: _STATE_HEADER.size]) not in self._on_device.values():
            # the native side aborts the process on anything else
            raise ValueError("the data is no on-device state of this context")
        with self._handle:
            source = ffi.from_buffer("uint8_t[]", data)
            return int(lib.llama_state_seq_set_data_ext(self._pointer, source, len(data), seq, flags))

    def state_seq_save_file(self, path: str | os.PathLike[str], seq: int, tokens: Sequence[int]) -> int:
        """Write the state of a sequence with its tokens; returns the bytes written, 0 on failure (the log says why)."""
        name = c_path("path", path)
        self._check_seq(seq)
        try:
            array_ = ffi.new("llama_token[]", list(tokens))
        except OverflowError as error:
            raise ValueError(str(error)) from None
        with self._handle:
            n = int(lib.llama_state_seq_save_file(self._pointer, name, seq, array_, len(tokens)))
        # the native side does not see that its last bytes found no room
        return n if n and os.path.getsize(path) == n else 0

    def state_seq_load_file(self, path: str | os.PathLike[str], seq: int, capacity: int) -> tuple[int, list[int]]:
        """Read a file of :meth:`state_seq_save_file` with at most ``capacity`` tokens.

        Returns the bytes read and the tokens, or ``(0, [])`` on failure. The tokens are as the file has them: check
        them against the vocabulary.
        """
        name = c_path("path", path)
        self._check_seq(seq)
        int_arg("capacity", capacity, 1)
        count = ffi.new("size_t *")
        with self._handle:
            # head and number of tokens only: the native side aborts the process on a state that lacks its last bytes
            n_head = int(lib.llama_state_seq_load_file(self._pointer, name, seq, NULL, 0, count))
        if n_head == 0 or count[0] > capacity:
            return 0, []
        n_mark = _STATE_HEADER.size
        try:
            with open(path, "rb") as file:
                file.seek(n_head)
                tokens = array("i", file.read(4 * count[0]))
                n_state = os.fstat(file.fileno()).st_size - file.tell()
                data = bytearray(n_mark + n_state)
                if file.readinto(memoryview(data)[n_mark:]) != n_state:
                    return 0, []
        except OSError:
            return 0, []
        if not self._magic:
            self._magic = self.state_seq_get(seq)[:4]
        data[:n_mark] = self._magic + struct.pack("=i", seq)
        n = self.state_seq_set(seq, data)
        return (n_head + 4 * len(tokens) + n - n_mark, tokens.tolist()) if n > n_mark else (0, [])

    def _check_seq(self, seq: int) -> None:
        int_arg("seq", seq, 0, self.n_seq_max - 1)
