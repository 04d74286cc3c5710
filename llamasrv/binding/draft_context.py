"""The context beside the model's own in which a drafter works, and the two memories as one."""

from __future__ import annotations

from typing import Any

from llamasrv.binding.context import SEQ_RM_FULL
from llamasrv.binding.memory import Memory
from llamasrv.binding.native import Handle, lib
from llamasrv.binding.seq_state import SeqStates


class DraftContext(SeqStates):
    """The drafter's own context: memory and states. Closed with its ``Speculative``. One thread at a time.

    ``seq_rm_type``: removals that its memory supports (SEQ_RM_*); ``n_rs_seq``: tokens that SEQ_RM_RS can roll back.
    """

    __slots__ = ("memory", "n_ctx", "n_rs_seq", "seq_rm_type")

    def __init__(self, handle: Handle, pointer: Any, kv_unified: bool) -> None:
        super().__init__(handle, pointer)
        self.n_ctx = int(lib.llama_n_ctx(pointer))
        self.n_rs_seq = int(lib.llama_n_rs_seq(pointer))
        self.seq_rm_type = int(lib.lsrv_context_seq_rm_type(pointer))
        self.memory = Memory(handle, lib.llama_get_memory(pointer), self.n_seq_max, kv_unified)


class PairedMemory:
    """The memory of the model's context and the draft's beside it: each operation goes to both.

    Where the draft's cannot do what the model's can, its sequence is emptied: drafts are worse then, texts the same.
    """

    __slots__ = ("_draft", "_draft_rm_full", "_target")

    def __init__(self, target: Memory, draft: DraftContext | None) -> None:
        self._target = target
        self._draft = draft.memory if draft is not None else None
        self._draft_rm_full = draft is not None and draft.seq_rm_type == SEQ_RM_FULL

    @property
    def can_shift(self) -> bool:
        return self._target.can_shift

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """As :meth:`Memory.seq_rm`; on False nothing changed in either."""
        if not self._target.seq_rm(seq, p0, p1):
            return False
        if self._draft is not None and not self._draft.seq_rm(seq, p0, p1):
            self._draft.seq_rm(seq)
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        self._target.seq_cp(src, dst, p0, p1)
        if self._draft is None or src == dst:
            return
        if self._draft_rm_full and (p0 > 0 or p1 >= 0):
            self._draft.seq_rm(dst)
        else:
            self._draft.seq_cp(src, dst, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._target.seq_add(seq, p0, p1, delta)
        if self._draft is None:
            return
        if self._draft.can_shift:
            self._draft.seq_add(seq, p0, p1, delta)
        else:
            self._draft.seq_rm(seq)

    def seq_pos_min(self, seq: int) -> int:
        """Of the model's context."""
        return self._target.seq_pos_min(seq)

    def seq_pos_max(self, seq: int) -> int:
        """Of the model's context."""
        return self._target.seq_pos_max(seq)

    def clear(self, data: bool = True) -> None:
        self._target.clear(data)
        if self._draft is not None:
            self._draft.clear(data)
