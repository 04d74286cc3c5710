"""Entries of a logical batch in columns that the native side reads in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamasrv.binding.native import INT32_MAX, INT32_MIN, ffi, int_arg, lib

ORDER_NONE = int(lib.LSRV_ORDER_NONE)
ORDER_QUESTION_NOUL = int(lib.LSRV_ORDER_QUESTION_NOUL)
ORDER_QUESTION_CHOICE = int(lib.LSRV_ORDER_QUESTION_CHOICE)
ORDER_QUESTION_SCORE = int(lib.LSRV_ORDER_QUESTION_SCORE)
ORDER_OPTION = int(lib.LSRV_ORDER_OPTION)

_FEW = 16  # below, one by one is faster than whole columns


class Batch:
    """Up to ``n_alloc`` entries; entry i is row i of the columns, rows from ``n_tokens`` on mean nothing.

    ``token``, ``pos``, ``seq_id``: int32[n_alloc]; ``output``: int8[n_alloc], 1 where a result is wanted.
    """

    __slots__ = (
        "n_alloc",
        "n_tokens",
        "native_order",
        "native_output",
        "native_pos",
        "native_seq_id",
        "native_token",
        "output",
        "pos",
        "seq_id",
        "token",
    )

    def __init__(self, n_alloc: int) -> None:
        self.n_alloc = int_arg("n_alloc", n_alloc, 1)
        self.n_tokens = 0
        self.token: npt.NDArray[np.int32] = np.zeros(n_alloc, np.int32)
        self.pos: npt.NDArray[np.int32] = np.zeros(n_alloc, np.int32)
        self.seq_id: npt.NDArray[np.int32] = np.zeros(n_alloc, np.int32)
        self.output: npt.NDArray[np.int8] = np.zeros(n_alloc, np.int8)
        # each keeps its column's memory alive and in place
        self.native_token = ffi.from_buffer("int32_t[]", self.token, require_writable=True)
        self.native_pos = ffi.from_buffer("int32_t[]", self.pos, require_writable=True)
        self.native_seq_id = ffi.from_buffer("int32_t[]", self.seq_id, require_writable=True)
        self.native_output = ffi.from_buffer("int8_t[]", self.output, require_writable=True)
        #: Decision order of each entry; None while no entry has one.
        self.native_order: Any = None

    def clear(self) -> None:
        self.n_tokens = 0
        self.native_order = None

    def add(self, token: int, pos: int, seq_id: int, output: bool) -> int:
        """Append one entry and return its index. Raises ValueError when full or when a value is not an int32."""
        index = self.n_tokens
        if index >= self.n_alloc:
            raise ValueError(f"the batch is full ({self.n_alloc} entries)")
        try:
            self.native_token[index] = token
            self.native_pos[index] = pos
            self.native_seq_id[index] = seq_id
        except OverflowError as error:
            raise ValueError(str(error)) from None
        self.native_output[index] = 1 if output else 0
        self.n_tokens = index + 1
        return index

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.int32], pos0: int, seq_id: int, output: bool) -> int:
        """Append tokens at positions ``pos0``, ``pos0 + 1``, ... and return the index of the first.

        Raises ValueError when they do not fit or when a value is not an int32; nothing is appended then.
        """
        start = self.n_tokens
        end = start + len(tokens)
        if end > self.n_alloc:
            raise ValueError(f"{len(tokens)} entries do not fit: {start} of {self.n_alloc} are in use")
        if len(tokens) <= _FEW:
            return self._extend_one_by_one(tokens, pos0, seq_id, output)
        int_arg("pos0", pos0, INT32_MIN, INT32_MAX - len(tokens))
        int_arg("seq_id", seq_id)
        self.token[start:end] = _int32_column(tokens)
        self.pos[start:end] = np.arange(pos0, pos0 + len(tokens), dtype=np.int32)
        self.seq_id[start:end] = seq_id
        self.output[start:end] = 1 if output else 0
        self.n_tokens = end
        return start

    def _extend_one_by_one(
        self, tokens: Sequence[int] | npt.NDArray[np.int32], pos0: int, seq_id: int, output: bool
    ) -> int:
        start = self.n_tokens
        try:
            for i, token in enumerate(tokens):
                self.add(token, pos0 + i, seq_id, output)
        except ValueError:
            self.n_tokens = start
            raise
        return start

    def set_output(self, i: int, output: bool) -> None:
        """Say whether a result is wanted for entry i. Raises ValueError when there is no such entry."""
        if not 0 <= i < self.n_tokens:
            raise ValueError(f"no entry {i} in a batch of {self.n_tokens}")
        self.native_output[i] = 1 if output else 0

    def set_decision_order(self, i: int, order: int) -> None:
        """What entry i is to a joint decision head (ORDER_*). Raises ValueError for an unknown entry or order."""
        if not 0 <= i < self.n_tokens:
            raise ValueError(f"no entry {i} in a batch of {self.n_tokens}")
        int_arg("order", order, ORDER_NONE, ORDER_OPTION)
        if self.native_order is None:
            self.native_order = ffi.new("int32_t[]", self.n_alloc)
        self.native_order[i] = order


def _int32_column(tokens: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32:
        return tokens
    try:
        wide = np.asarray(tokens, dtype=np.int64)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    if wide.ndim != 1:
        raise ValueError("tokens must be a flat sequence")
    if wide.size and (int(wide.min()) < INT32_MIN or int(wide.max()) > INT32_MAX):
        raise ValueError("a token is not an int32")
    return wide.astype(np.int32)
