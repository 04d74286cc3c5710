"""The context's memory: KV cells or recurrent states of each sequence."""

from __future__ import annotations

from typing import Any

from llamasrv.binding.native import INT32_MAX, Handle, int_arg, lib


class Memory:
    """Positions are half-open ranges [p0, p1); p0 < 0 means from the start, p1 < 0 to the end.

    What would abort the process raises ValueError instead. One thread at a time.
    """

    __slots__ = ("_engine", "_last_seq", "_pointer", "_shared", "can_shift")

    def __init__(self, engine: Handle, pointer: Any, n_seq_max: int, kv_unified: bool) -> None:
        self._engine = engine
        self._pointer = pointer
        self._last_seq = n_seq_max - 1
        self._shared = kv_unified
        self.can_shift = bool(lib.llama_memory_can_shift(pointer))

    def _range(self, seq: int, p0: int, p1: int) -> None:
        int_arg("seq", seq, 0, self._last_seq)
        int_arg("p0", p0)
        int_arg("p1", p1)

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove a range of a sequence (-1: of all). False, and nothing changed, if only whole ones can be removed."""
        int_arg("seq", seq, -1, self._last_seq)
        int_arg("p0", p0)
        int_arg("p1", p1)
        with self._engine:
            return bool(lib.llama_memory_seq_rm(self._pointer, seq, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Give the cells of ``src`` to ``dst`` too. With one buffer per sequence only whole sequences can be copied."""
        self._range(src, p0, p1)
        int_arg("dst", dst, 0, self._last_seq)
        if src == dst:
            return
        if not self._shared and (p0 > 0 or p1 >= 0):
            raise ValueError("a part of a sequence can be copied only in a unified KV buffer")
        with self._engine:
            lib.llama_memory_seq_cp(self._pointer, src, dst, p0, p1)

    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        int_arg("seq", seq, 0, self._last_seq)
        with self._engine:
            lib.llama_memory_seq_keep(self._pointer, seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move a range by ``delta`` positions; the cells are rotated at the next decode."""
        self._range(seq, p0, p1)
        int_arg("delta", delta)
        self._require_shift()
        with self._engine:
            lib.llama_memory_seq_add(self._pointer, seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions of a range by ``d``."""
        self._range(seq, p0, p1)
        int_arg("d", d, 1, INT32_MAX)
        self._require_shift()
        with self._engine:
            lib.llama_memory_seq_div(self._pointer, seq, p0, p1, d)

    def _require_shift(self) -> None:
        if not self.can_shift:
            raise ValueError("this memory cannot shift positions")

    def seq_pos_min(self, seq: int) -> int:
        """The first position present, -1 if the sequence is empty."""
        int_arg("seq", seq, 0, self._last_seq)
        with self._engine:
            return int(lib.llama_memory_seq_pos_min(self._pointer, seq))

    def seq_pos_max(self, seq: int) -> int:
        """The last position present, -1 if the sequence is empty."""
        int_arg("seq", seq, 0, self._last_seq)
        with self._engine:
            return int(lib.llama_memory_seq_pos_max(self._pointer, seq))

    def clear(self, data: bool = True) -> None:
        """Empty all sequences; ``data``: overwrite the buffers as well."""
        with self._engine:
            lib.llama_memory_clear(self._pointer, data)
