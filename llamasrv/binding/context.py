"""A context: batches in, logits and embeddings out, state of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamasrv.binding.batch import Batch
from llamasrv.binding.memory import Memory
from llamasrv.binding.native import NULL, UINT64_MAX, Handle, check, ffi, int_arg, lib, new_text_pointer
from llamasrv.binding.seq_state import SeqStates

POOLING_UNSPECIFIED = int(lib.LLAMA_POOLING_TYPE_UNSPECIFIED)
POOLING_NONE = int(lib.LLAMA_POOLING_TYPE_NONE)
POOLING_MEAN = int(lib.LLAMA_POOLING_TYPE_MEAN)
POOLING_CLS = int(lib.LLAMA_POOLING_TYPE_CLS)
POOLING_LAST = int(lib.LLAMA_POOLING_TYPE_LAST)
POOLING_RANK = int(lib.LLAMA_POOLING_TYPE_RANK)

SEQ_RM_NO = 0
SEQ_RM_PART = 1
SEQ_RM_FULL = 2
SEQ_RM_RS = 3


class Context(SeqStates):
    """Made by :class:`Model`. One thread at a time, except :meth:`abort`, :meth:`stop` and the plain attributes.

    ``n_ctx``: cells in all; ``n_ctx_seq``: for one sequence; ``n_batch``, ``n_ubatch``: entries of a logical and of a
    physical batch; ``n_seq_max``: sequences; ``n_rs_seq``: tokens by which SEQ_RM_RS can roll back.
    """

    __slots__ = (
        "_row",
        "_row_seq",
        "_vocab_size",
        "has_memory",
        "memory",
        "n_batch",
        "n_ctx",
        "n_ctx_seq",
        "n_rs_seq",
        "n_ubatch",
        "pooling_type",
    )

    def __init__(
        self, engine: Handle, pointer: Any, *, kv_unified: bool, n_embd_out: int, n_cls_out: int, n_vocab: int
    ) -> None:
        super().__init__(engine, pointer)
        self._vocab_size = n_vocab

        self.n_ctx = int(lib.llama_n_ctx(pointer))
        self.n_ctx_seq = int(lib.llama_n_ctx_seq(pointer))
        self.n_batch = int(lib.llama_n_batch(pointer))
        self.n_ubatch = int(lib.llama_n_ubatch(pointer))
        self.n_rs_seq = int(lib.llama_n_rs_seq(pointer))
        self.pooling_type = int(lib.llama_pooling_type(pointer))
        memory = lib.llama_get_memory(pointer)
        self.has_memory = memory != NULL
        self.memory = Memory(engine, memory, self.n_seq_max, kv_unified)
        self._row = n_embd_out
        self._row_seq = n_cls_out if self.pooling_type == POOLING_RANK else n_embd_out

    @property
    def causal_attn(self) -> bool:
        with self._handle:
            return bool(lib.llama_get_causal_attn(self._pointer))

    # decoding

    def decode(self, batch: Batch, offset: int, n: int, *, sync: bool, serial: int) -> int:
        """Process entries [offset, offset + n) of the batch; entry ``offset`` gets output index 0.

        ``sync`` waits for the result. ``serial`` (1 ... 2**64 - 2, or 0) is the name by which :meth:`abort` stops this
        call. Returns the value of ``llama_process()``: 0 done, 1 no room in the KV cache, 2 aborted, -1 invalid batch,
        below -1 a failed computation. Raises ValueError if the range is not within the batch.
        """
        if offset < 0 or n < 1 or offset + n > batch.n_tokens:
            raise ValueError(f"entries [{offset}, {offset + n}) are not within a batch of {batch.n_tokens}")
        int_arg("serial", serial, 0, UINT64_MAX - 1)
        columns = (
            batch.native_token + offset,
            batch.native_pos + offset,
            batch.native_seq_id + offset,
            batch.native_output + offset,
        )
        with self._handle as engine:
            if batch.native_order is not None:
                return int(lib.lsrv_decode_ordered(engine, n, *columns, batch.native_order + offset, sync, serial))
            return int(lib.lsrv_decode(engine, n, *columns, sync, serial))

    def synchronize(self) -> None:
        """Wait for the last :meth:`decode`."""
        with self._handle:
            lib.llama_synchronize(self._pointer)

    def abort(self, serial: int) -> None:
        """Stop the :meth:`decode` of this serial, running or yet to come, between two nodes of its graph.

        Calls with another serial go on; 0 withdraws. Never blocks, works from every thread and does nothing once the
        model is closed. Compute on the CPU only.
        """
        int_arg("serial", serial, 0, UINT64_MAX)
        self._handle.if_open(lambda engine: lib.lsrv_abort(engine, serial))

    def stop(self) -> None:
        """Stop the running and every later :meth:`decode`, until ``abort(0)``."""
        self.abort(UINT64_MAX)

    def set_embeddings(self, value: bool) -> None:
        """Whether the context gives embeddings; while it does, every entry of a batch is an output."""
        with self._handle as engine:
            lib.lsrv_engine_set_embeddings(engine, value)

    # results of the last decode

    def logits_ith(self, i: int) -> npt.NDArray[np.float32] | None:
        """Copy of float32[n_vocab] for entry i of the last decode; None if it had no output."""
        with self._handle:
            return _floats(lib.llama_get_logits_ith(self._pointer, int_arg("i", i, 0)), self._vocab_size)

    def logits_at(self, i: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The raw logits of these tokens for entry i, float32[len(tokens)]. Raises NativeError if it had no output."""
        values: npt.NDArray[np.float32] = np.empty(len(tokens), np.float32)
        err = new_text_pointer()
        try:
            ids = ffi.new("int32_t[]", list(tokens))
        except OverflowError as error:
            raise ValueError(str(error)) from None
        out = ffi.from_buffer("float[]", values, require_writable=True)
        with self._handle as engine:
            status = lib.lsrv_logits_at(engine, int_arg("i", i), ids, len(tokens), out, err)
        check(status, err, "reading logits")
        return values

    def embeddings_at(self, indices: Sequence[int]) -> npt.NDArray[np.float32]:
        """Rows of :meth:`embeddings_ith`, float32[len(indices), n_embd_out]. Raises NativeError if one is missing."""
        rows: npt.NDArray[np.float32] = np.empty((len(indices), self._row), np.float32)
        err = new_text_pointer()
        try:
            idx = ffi.new("int32_t[]", list(indices))
        except OverflowError as error:
            raise ValueError(str(error)) from None
        out = ffi.from_buffer("float[]", rows, require_writable=True)
        with self._handle as engine:
            check(lib.lsrv_embeddings_at(engine, idx, len(indices), out, err), err, "reading embeddings")
        return rows

    def embeddings_ith(self, i: int) -> npt.NDArray[np.float32] | None:
        """Copy of float32[n_embd_out] for entry i of the last decode; None if it had no output."""
        with self._handle:
            return _floats(lib.llama_get_embeddings_ith(self._pointer, int_arg("i", i, 0)), self._row)

    def embeddings_seq(self, seq: int) -> npt.NDArray[np.float32] | None:
        """Copy of a sequence's pooled float32[n_embd_out] (rank pooling: float32[n_cls_out]); None if there is none."""
        with self._handle:
            return _floats(lib.llama_get_embeddings_seq(self._pointer, int_arg("seq", seq, 0)), self._row_seq)

    # files of a sequence's state

    def seq_rm_type(self) -> int:
        """Which removals the memory supports (SEQ_RM_*). Tries it out: the memory is empty afterwards."""
        with self._handle:
            return int(lib.lsrv_context_seq_rm_type(self._pointer))

    # measurements

    def perf(self) -> dict[str, float | int]:
        """Times in milliseconds since loading (``t_load_ms``, ``t_p_eval_ms``, ``t_eval_ms``) and counts."""
        with self._handle:
            data = lib.llama_perf_context(self._pointer)
        return {
            "t_start_ms": float(data.t_start_ms),
            "t_load_ms": float(data.t_load_ms),
            "t_p_eval_ms": float(data.t_p_eval_ms),
            "t_eval_ms": float(data.t_eval_ms),
            "n_p_eval": int(data.n_p_eval),
            "n_eval": int(data.n_eval),
            "n_reused": int(data.n_reused),
        }

    @property
    def n_reused(self) -> int:
        """How often a compute graph was reused."""
        with self._handle:
            return int(lib.llama_perf_context(self._pointer).n_reused)


def _floats(pointer: Any, n: int) -> npt.NDArray[np.float32] | None:
    if pointer == NULL:
        return None
    values: npt.NDArray[np.float32] = np.array(np.frombuffer(ffi.buffer(pointer, 4 * n), np.float32))
    return values
