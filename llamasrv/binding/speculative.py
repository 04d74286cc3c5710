"""Speculative decoding: a cheap drafter proposes tokens, one decode of the model verifies them.

A generation goes: :meth:`Speculative.begin`; then per step :meth:`Speculative.draft`, a decode of the last token and
its draft with an output at each, :meth:`Speculative.process` of the same entries, :meth:`Speculative.verify` and
:meth:`Speculative.accept`. Prompts pass through :meth:`Speculative.process` as well, and whatever happens to the cells
of a sequence has to happen in both contexts: :class:`llamasrv.binding.PairedMemory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamasrv.binding import log
from llamasrv.binding.batch import Batch
from llamasrv.binding.draft_context import DraftContext
from llamasrv.binding.errors import ClosedError, NativeError
from llamasrv.binding.model import Model, load_with_progress
from llamasrv.binding.native import (
    NULL,
    UINT64_MAX,
    Handle,
    NativeObject,
    check,
    ffi,
    int_arg,
    lib,
    new_text_pointer,
    text_of,
)
from llamasrv.binding.params import Params
from llamasrv.binding.sampler import Sampler

DEFAULT_SEED = int(lib.LLAMA_DEFAULT_SEED)


def speculative_types() -> tuple[str, ...]:
    """All names that ``--spec-type`` knows."""
    return tuple(text_of(lib.lsrv_spec_all_types()).split(","))


def output_limits(n_batch: int, n_parallel: int, n_draft: int) -> tuple[int, int]:
    """``n_outputs_max`` and ``n_outputs_max_per_seq`` with which drafts of ``n_draft`` tokens can be verified."""
    total, per_seq = ffi.new("int32_t *"), ffi.new("int32_t *")
    lib.lsrv_spec_output_limits(int_arg("n_batch", n_batch), int_arg("n_parallel", n_parallel), n_draft, total, per_seq)
    return int(total[0]), int(per_seq[0])


@dataclass(slots=True)
class DraftRequest:
    """``tokens``: the sequence's without ``id_last``, which is not yet in the KV cells and will be at ``pos0``.

    ``n_max``: draft no more than this. ``temp``, ``seed``: of the target's sampler; with ``temp`` > 0 a drafter that
    samples keeps its distributions for verification by rejection sampling.
    """

    seq: int
    tokens: Sequence[int]
    id_last: int
    pos0: int
    n_max: int
    temp: float = 0.0
    seed: int = DEFAULT_SEED


@dataclass(slots=True)
class VerifyRequest:
    """``index``: batch index of the token before the draft; ``draft`` stands at the next ones.

    ``rejection``: by rejection sampling, if this draft's distributions were kept (temperature > 0). ``replay``: these
    tokens were accepted before, but a roll-back took them out of the cells again. ``n_top`` >= 0: also tell
    probabilities, ``post``: after the sampler chain, else over the raw logits.
    """

    sampler: Sampler
    seq: int
    index: int
    draft: Sequence[int]
    rejection: bool = False
    replay: bool = False
    n_top: int = -1
    post: bool = False


@dataclass(slots=True)
class Verified:
    """``tokens``: those of the draft that stand, and last the target's own; at least one.

    ``probs``: for each, if asked for, its probability and the most likely ``(token, probability)``, as
    :func:`llamasrv.binding.token_probs` gives them.
    """

    tokens: list[int]
    probs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)


class _DraftArrays:
    """Arguments of :meth:`Speculative.draft`, kept from step to step."""

    __slots__ = ("items", "tokens")

    def __init__(self, n: int, n_max: int) -> None:
        self.items = ffi.new("lsrv_draft_item[]", n)
        self.tokens = ffi.new("int32_t[]", max(1, n * n_max))
        for i in range(n):
            self.items[i].draft = self.tokens + i * n_max


class Speculative(NativeObject):
    """The drafters of one model. One thread at a time, the one that decodes.

    ``types``: their names; ``n_max``: tokens of the longest draft; ``context``: of the draft model or of the model's
    own prediction heads, None for n-grams; ``synth_probs``: chances of acceptance under ``--spec-synth-*``, else empty.
    """

    __slots__ = ("_arrays", "_n_prompt", "_n_vocab", "context", "n_max", "n_seq", "synth_probs", "types")

    def __init__(self, handle: Handle, model: Model, params: dict[str, Any]) -> None:
        self._handle = handle
        self._n_vocab = model.vocab.n_tokens
        self.types = tuple(name for name in params["speculative"]["types"] if name != "none")
        self.n_seq = int(params["n_parallel"])
        self._n_prompt = [0] * self.n_seq
        with handle as spec:
            self.n_max = int(lib.lsrv_spec_n_max(spec))
            n_synth = lib.lsrv_spec_n_synth(spec)
            probs = ffi.unpack(lib.lsrv_spec_synth_probs(spec), n_synth) if n_synth > 0 else []
            pointer = lib.lsrv_spec_context(spec)
        self.synth_probs: tuple[float, ...] = tuple(probs)
        self.context = DraftContext(handle, pointer, bool(params["kv_unified"])) if pointer != NULL else None
        self._arrays = _DraftArrays(self.n_seq, self.n_max)

    @classmethod
    def load(cls, model: Model, params: Params, progress: Callable[[float], bool] | None = None) -> Speculative | None:
        """Load the draft model and set up what ``--spec-type`` asks for; ``progress`` as in :meth:`Model.load`.

        None if nothing is asked for or if it does not fit this model: the log says why. Raises NativeError when the
        draft model cannot be loaded, or when synthetic acceptance was asked for and nothing could be set up.
        """
        fields = params.to_dict()
        spec = fields["speculative"]
        if spec["draft"]["model"]["path"] and not any(name.startswith("draft-") for name in spec["types"]):
            log.log(log.WARN, "the draft model is not used: --spec-type names no type that needs one")
        out = ffi.new("lsrv_spec **")
        with model._engine as engine, params._handle as pointer:
            reason = load_with_progress(
                progress,
                lambda callback, user_data, err: int(
                    lib.lsrv_spec_load(engine, pointer, callback, user_data, out, err)
                ),
                "failed to load the draft model",
            )
            if out[0] == NULL:
                if reason is not None:
                    log.log(log.ERROR, f"failed to initialize speculative decoding context: {reason}")
                if spec["has_synth"]:
                    raise NativeError(reason or "synthetic acceptance requires a type of speculative decoding")
                return None
            handle = Handle("speculative", out[0], lib.lsrv_spec_free, parent=model._engine)
        try:
            return cls(handle, model, fields)
        except BaseException:
            handle.close()
            raise

    # tokens of a sequence

    def begin(self, seq: int, tokens: Sequence[int], seed: int = DEFAULT_SEED) -> None:
        """A generation starts after these tokens. ``seed``: of the random numbers of ``--spec-synth-*``.

        Raises ValueError or NativeError for an unknown sequence or a token outside the vocabulary.
        """
        self.set_tokens(seq, tokens)
        err = new_text_pointer()
        with self._handle as spec:
            check(lib.lsrv_spec_begin(spec, seq, seed & 0xFFFFFFFF, err), err, "beginning to speculate")

    def set_tokens(self, seq: int, tokens: Sequence[int]) -> None:
        """The tokens of a sequence changed otherwise than by growing, for example in a context shift."""
        int_arg("seq", seq, 0, self.n_seq - 1)
        self._put_tokens(seq, 0, tokens)

    def _put_tokens(self, seq: int, n_keep: int, tokens: Sequence[int]) -> None:
        err = new_text_pointer()
        try:
            array = ffi.new("int32_t[]", list(tokens))
        except OverflowError as error:
            raise ValueError(str(error)) from None
        with self._handle as spec:
            check(lib.lsrv_spec_prompt(spec, seq, n_keep, array, len(tokens), err), err, "taking in tokens")
        self._n_prompt[seq] = n_keep + len(tokens)

    def _sync_tokens(self, seq: int, tokens: Sequence[int]) -> None:
        n_known = self._n_prompt[seq]
        if len(tokens) > n_known:
            self._put_tokens(seq, n_known, tokens[n_known:])
        elif len(tokens) < n_known:
            self._put_tokens(seq, 0, tokens)

    # a step

    def draft(self, requests: Sequence[DraftRequest], serial: int = 0) -> list[list[int]]:
        """Draft for these sequences, in one native call; an item is empty where nothing was found.

        Of ``tokens`` only what is new since the last call is read. The draft context holds drafted positions
        afterwards: remove them from ``pos0`` on. ``serial`` is for :meth:`Context.abort`; a stopped call leaves short
        drafts or none. Raises ValueError or NativeError for unknown or repeated sequences and foreign tokens.
        """
        if not requests:
            return []
        int_arg("serial", serial, 0, UINT64_MAX - 1)
        if len(requests) > self.n_seq:
            raise ValueError(f"{len(requests)} requests for {self.n_seq} sequences")
        items, tokens = self._arrays.items, self._arrays.tokens
        for i, request in enumerate(requests):
            seq = int_arg("seq", request.seq, 0, self.n_seq - 1)
            self._sync_tokens(seq, request.tokens)
            item = items[i]
            item.seq_id = seq
            item.n_max = request.n_max
            item.pos0 = request.pos0
            item.id_last = request.id_last
            item.n_prompt = len(request.tokens)
            item.temp = request.temp
            item.seed = request.seed & 0xFFFFFFFF
            item.rejection = 1 if request.temp > 0 else 0
        err = new_text_pointer()
        with self._handle as spec:
            check(lib.lsrv_spec_draft(spec, len(requests), items, serial, err), err, "drafting")
        n_max = self.n_max
        return [
            ffi.unpack(tokens + i * n_max, items[i].n_draft) if items[i].n_draft > 0 else []
            for i in range(len(requests))
        ]

    def process(self, batch: Batch, offset: int, n: int, serial: int = 0) -> bool:
        """Take in entries [offset, offset + n), just decoded by the model's context.

        False: the draft context lacks them now (the log says why); its sequences have to be emptied. Raises ValueError
        if the range is not within the batch.
        """
        if offset < 0 or n < 1 or offset + n > batch.n_tokens:
            raise ValueError(f"entries [{offset}, {offset + n}) are not within a batch of {batch.n_tokens}")
        int_arg("serial", serial, 0, UINT64_MAX - 1)
        with self._handle as spec:
            status = lib.lsrv_spec_process(
                spec,
                n,
                batch.native_token + offset,
                batch.native_pos + offset,
                batch.native_seq_id + offset,
                serial,
            )
        return bool(status == 0)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verified | NativeError]:
        """Sample at the indices of each draft from the last decode and take the tokens that stand, in one native call.

        An item is an error if its sampler failed. The samplers have moved on by the tokens returned. Raises ValueError
        for an empty draft, ClosedError for a closed sampler.
        """
        if not requests:
            return []
        items = ffi.new("lsrv_verify_item[]", len(requests))
        keep: list[Any] = []  # the arrays that the items point to
        for i, request in enumerate(requests):
            if request.sampler._handle.closed:
                raise ClosedError("sampler is closed")
            if request.sampler._handle.parent is not self._handle.parent:
                raise ValueError("the sampler belongs to another model")
            keep.append(self._fill(items[i], request))
        with self._handle as spec:
            lib.lsrv_spec_verify(spec, len(requests), items, NULL)
        return [self._verified(items[i]) for i in range(len(requests))]

    def _fill(self, item: Any, request: VerifyRequest) -> tuple[Any, ...]:
        n_draft = len(request.draft)
        if n_draft == 0:
            raise ValueError("there is no draft to verify")
        n_top = min(request.n_top, self._n_vocab)
        try:
            draft = ffi.new("int32_t[]", list(request.draft))
            item.idx = request.index
            item.n_top = n_top
        except OverflowError as error:
            raise ValueError(str(error)) from None
        accepted = ffi.new("int32_t[]", n_draft + 1)
        item.smpl = request.sampler._pointer
        item.seq_id = int_arg("seq", request.seq, 0, self.n_seq - 1)
        item.n_draft = n_draft
        item.draft = draft
        item.accepted = accepted
        item.rejection = 1 if request.rejection else 0
        item.replay = 1 if request.replay else 0
        item.post = 1 if request.post else 0
        if n_top < 0:
            return draft, accepted
        prob = ffi.new("float[]", n_draft + 1)
        n_written = ffi.new("int32_t[]", n_draft + 1)
        top_ids = ffi.new("int32_t[]", max(1, (n_draft + 1) * n_top))
        top_probs = ffi.new("float[]", max(1, (n_draft + 1) * n_top))
        item.prob, item.n_written, item.top_ids, item.top_probs = prob, n_written, top_ids, top_probs
        return draft, accepted, prob, n_written, top_ids, top_probs

    @staticmethod
    def _verified(item: Any) -> Verified | NativeError:
        if item.status != 0:
            return NativeError(text_of(lib.lsrv_sampler_error(item.smpl)))
        n, n_top = item.n_accepted, item.n_top
        out = Verified(ffi.unpack(item.accepted, n))
        if n_top >= 0:
            for i in range(n):
                n_written = item.n_written[i]
                top: list[tuple[int, float]] = []
                if n_written > 0:
                    ids = ffi.unpack(item.top_ids + i * n_top, n_written)
                    probs = ffi.unpack(item.top_probs + i * n_top, n_written)
                    top = list(zip(ids, probs, strict=True))
                out.probs.append((float(item.prob[i]), top))
        return out

    def accept(self, seq: int, n: int) -> None:
        """Of the last draft of this sequence ``n`` tokens were accepted. Raises NativeError if there is none."""
        err = new_text_pointer()
        with self._handle as spec:
            check(lib.lsrv_spec_accept(spec, int_arg("seq", seq), int_arg("n", n), err), err, "accepting a draft")

    # state that belongs to a checkpoint

    def state_get(self, seq: int) -> bytes:
        """What a drafter keeps of a sequence besides its cells; empty for most. Raises NativeError."""
        data, size, err = ffi.new("uint8_t **"), ffi.new("size_t *"), new_text_pointer()
        with self._handle as spec:
            check(lib.lsrv_spec_get_state(spec, int_arg("seq", seq), data, size, err), err, "reading the state")
        try:
            return bytes(ffi.buffer(data[0], size[0]))
        finally:
            lib.lsrv_free(data[0])

    def state_set(self, seq: int, data: bytes) -> None:
        """Put back what :meth:`state_get` gave; data of another drafter is ignored. Raises NativeError."""
        err = new_text_pointer()
        with self._handle as spec:
            source = ffi.from_buffer("uint8_t[]", data)
            status = lib.lsrv_spec_set_state(spec, int_arg("seq", seq), source, len(data), err)
        check(status, err, "putting back the state")

    def print_stats(self) -> None:
        """Log calls, drafts, acceptance and times of each drafter (trace level)."""
        with self._handle as spec:
            lib.lsrv_spec_print_stats(spec)
