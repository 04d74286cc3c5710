"""What the engine needs of a model and its context.

:class:`Backend` is implemented by :mod:`llamasrv.engine.native` over libllama and, in the tests, by a fake whose KV
content is a plain map of (sequence, position) to token.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llamasrv.engine.drafting import Drafter
from llamasrv.engine.task import SamplingParams


class SeqRm(enum.IntEnum):
    """Which removals a memory supports; values of ``common_context_seq_rm_type``."""

    NO = 0
    PART = 1
    FULL = 2
    RS = 3


class DecodeStatus(enum.IntEnum):
    """Return values of ``llama_process`` (llama.h); anything below ``INVALID_BATCH`` is a compute error."""

    OK = 0
    NO_KV_SPACE = 1
    ABORTED = 2
    INVALID_BATCH = -1


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What a LoRA file says about itself. ``invocation``: tokens that switch it on (aLoRA); empty: an ordinary one."""

    path: str
    task_name: str = ""
    prompt_prefix: str = ""
    invocation: tuple[int, ...] = ()


#: How the texts of errors begin for which the grammar of the request is at fault, not the server.
GRAMMAR_ERRORS = ("the grammar is too complex", "no token fits the grammar", "Unexpected empty grammar stack")


class BackendError(RuntimeError):
    """The native side refused; the text is its own."""


class Batch(Protocol):
    """Entries of one logical batch in columns; index i is entry i."""

    @property
    def n_tokens(self) -> int: ...
    def clear(self) -> None: ...
    def add(self, token: int, pos: int, seq_id: int, output: bool) -> int:
        """Append one entry and return its index. Raises ValueError when the batch is full."""

    def extend(self, tokens: Sequence[int], pos0: int, seq_id: int, output: bool) -> int:
        """Append consecutive tokens from position ``pos0`` on and return the first index."""

    def set_output(self, index: int, output: bool) -> None: ...
    def set_decision_order(self, index: int, order: int) -> None:
        """Role of an entry for a joint decision head, see :class:`~llamasrv.engine.task.Decision`; 0 if not given."""


class Sampler(Protocol):
    """Sampler chain with grammar and history of one task."""

    def accept(self, tokens: Sequence[int], is_generated: bool) -> None: ...
    def reset(self) -> None: ...
    def force_reasoning_end(self) -> bool:
        """End the model's reasoning with the next tokens. False if that was not asked for when it was made."""

    def close(self) -> None: ...


class Backend(Protocol):
    """A loaded model with one context of ``n_seq_max`` sequences.

    Only the main-loop thread calls it, except :meth:`abort`, :meth:`stop` and :meth:`piece`.
    """

    n_ctx: int
    n_ctx_seq: int
    n_ctx_train: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_swa: int
    add_bos: bool
    has_memory: bool
    causal_attn: bool
    can_shift: bool
    seq_rm_type: SeqRm
    #: Tokens that a memory of type RS can roll back.
    n_rs_seq: int
    #: None: no speculative decoding.
    drafter: Drafter | None
    pooling_type: int
    n_embd_out: int
    n_vocab: int

    def new_batch(self, n_alloc: int) -> Batch: ...

    def decode(self, batch: Batch, offset: int, n_tokens: int, sync: bool, serial: int) -> int:
        """Process entries [offset, offset + n_tokens); returns a :class:`DecodeStatus` or a lower number.

        ``sync`` waits for the result. ``serial`` is the name by which :meth:`abort` can stop this very call.
        """

    def synchronize(self) -> None: ...
    def abort(self, serial: int) -> None: ...
    def stop(self) -> None:
        """Make the running and every later :meth:`decode` return ABORTED soon."""

    def set_embeddings(self, value: bool) -> None: ...
    def set_lora(self, adapters: Sequence[tuple[int, float]]) -> None:
        """Apply exactly these ``(index, scale)``; every other adapter is off."""

    def adapter_infos(self) -> list[AdapterInfo]:
        """The loaded adapters, in the order of their indices."""

    # memory: positions are token positions; p1 < 0 means "to the end", p0 < 0 "from the start"
    def seq_rm(self, seq_id: int, p0: int, p1: int) -> bool: ...
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None: ...
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None: ...
    def seq_pos_min(self, seq_id: int) -> int: ...
    def seq_pos_max(self, seq_id: int) -> int: ...
    def state_size(self, seq_id: int, partial: bool = False) -> int: ...
    def state_get(self, seq_id: int, partial: bool = False) -> bytes: ...
    def state_set(self, seq_id: int, data: bytes, partial: bool = False) -> bool:
        """Replace the sequence's state; False if it does not fit, the sequence is then empty."""

    def split_state(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        """A state of :meth:`state_get` as those of the model's context, of the drafter's, and of the drafter itself."""

    def join_state(self, target: bytes, draft: bytes, spec: bytes) -> bytes:
        """Inverse of :meth:`split_state`."""

    def state_save_file(self, path: str, seq_id: int, tokens: Sequence[int]) -> int:
        """Write the sequence's state and tokens; returns bytes written, 0 on failure."""

    def state_load_file(self, path: str, seq_id: int, capacity: int) -> tuple[int, list[int]]:
        """Read a file of :meth:`state_save_file`; returns (bytes read, tokens), (0, []) on failure."""

    # sampling
    def new_sampler(self, params: SamplingParams) -> Sampler:
        """Raises :class:`BackendError`, for example when the grammar does not parse."""

    def clone_sampler(self, sampler: Sampler) -> Sampler:
        """A sampler with the same settings, in the same state."""

    def copy_sampler(self, source: Sampler, target: Sampler) -> None:
        """Give ``target`` the state of ``source``, which was cloned from it."""

    def set_sampler(self, seq_id: int, sampler: Sampler | None) -> None:
        """Let the backend's device sample for this sequence, where it can; None: no longer."""

    def sample_many(self, samplers: Sequence[Sampler], indices: Sequence[int]) -> list[int | BackendError]:
        """Sample and accept one token per sampler from the logits at these indices of the last decoded part."""

    def token_probs(
        self, sampler: Sampler, index: int, token: int, n_top: int, post: bool
    ) -> tuple[float, list[tuple[int, float]]]:
        """Probability of ``token`` and the ``n_top`` most likely ``(token, probability)``.

        ``post``: after the sampler chain, else softmax over the raw logits.
        """

    def logprobs(
        self, indices: Sequence[int], tokens: Sequence[int], n_top: int
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        """Natural logarithms of probabilities by the raw logits of the last decoded part.

        For each index that of its token, and the ``n_top`` most likely ``(token, logarithm)``. Raises
        :class:`BackendError`.
        """

    # vocabulary
    def piece(self, token: int, special: bool) -> bytes: ...
    def is_eog(self, token: int) -> bool: ...
    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...

    # outputs of the last decode, float32
    def logits_at(self, index: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of these tokens at an entry, float32[len(tokens)]. Raises :class:`BackendError` if there are none."""

    def embeddings_at(self, indices: Sequence[int]) -> npt.NDArray[np.float32]:
        """Embeddings at these entries, float32[len(indices), n_embd_out]. Raises :class:`BackendError`."""

    def embeddings_ith(self, index: int) -> list[float] | None: ...
    def embeddings_seq(self, seq_id: int) -> list[float] | None: ...

    def identity(self) -> dict[str, str]:
        """What a saved state depends on, by name: model, cache types."""

    def n_reused(self) -> int:
        """Compute graphs reused so far."""

    def close(self) -> None: ...
