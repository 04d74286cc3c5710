"""The backend over libllama."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamasrv import binding
from llamasrv.engine.backend import AdapterInfo, BackendError, Batch, Sampler, SeqRm
from llamasrv.engine.drafting import Drafter, DraftRequest, Verified, VerifyRequest
from llamasrv.engine.task import SamplingParams

#: Sizes of the model's and of the drafter's state, before both and the drafter's own.
_STATE_HEAD = struct.Struct("<QQ")
#: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: only what cannot be recomputed by removing tokens.
_PARTIAL_ONLY = binding.STATE_PARTIAL_ONLY


class NativeBackend:
    """A model and its context as :class:`~llamasrv.engine.backend.Backend`."""

    def __init__(self, params: binding.Params, progress: Callable[[float], bool] | None = None) -> None:
        """Load what the command line asks for. Raises :class:`binding.NativeError`."""
        self._params = params
        self.model = binding.Model.load(params, progress)
        try:
            self.seq_rm_type = SeqRm(self.model.context.seq_rm_type())
            spec = None
            if self.seq_rm_type is not SeqRm.NO:
                spec = binding.Speculative.load(self.model, params, progress)
        except binding.NativeError:
            self.model.close()
            raise
        self._spec = spec
        context = self.model.context
        vocab = self.model.vocab
        self._context = context
        draft_context = spec.context if spec is not None else None
        self._draft_context = draft_context
        self._memory = binding.PairedMemory(context.memory, draft_context)
        self.n_ctx = context.n_ctx
        self.n_ctx_seq = context.n_ctx_seq
        self.n_ctx_train = self.model.n_ctx_train
        self.n_batch = context.n_batch
        self.n_ubatch = context.n_ubatch
        self.n_seq_max = context.n_seq_max
        self.n_swa = self.model.n_swa
        self.add_bos = vocab.add_bos
        self.has_memory = context.has_memory
        self.causal_attn = context.causal_attn
        self.can_shift = self.has_memory and self._memory.can_shift
        self.n_rs_seq = context.n_rs_seq
        self.drafter: Drafter | None = NativeDrafter(spec) if spec is not None else None
        self.pooling_type = context.pooling_type
        self.n_embd_out = self.model.n_embd_out
        self.n_vocab = vocab.n_tokens
        self._vocab = vocab
        self._eog = vocab.eog
        self._pieces = {special: vocab.pieces(special) for special in (False, True)}

    def close(self) -> None:
        if self._spec is not None:
            self._spec.close()
        self.model.close()

    def new_batch(self, n_alloc: int) -> Batch:
        return binding.Batch(n_alloc)

    def decode(self, batch: Batch, offset: int, n_tokens: int, sync: bool, serial: int) -> int:
        assert isinstance(batch, binding.Batch)
        return self._context.decode(batch, offset, n_tokens, sync=sync, serial=serial)

    def synchronize(self) -> None:
        self._context.synchronize()

    def abort(self, serial: int) -> None:
        self._context.abort(serial)

    def stop(self) -> None:
        self._context.stop()

    def set_embeddings(self, value: bool) -> None:
        self._context.set_embeddings(value)

    def set_lora(self, adapters: Sequence[tuple[int, float]]) -> None:
        self.model.set_lora(list(adapters))

    def adapter_infos(self) -> list[AdapterInfo]:
        return [
            AdapterInfo(info["path"], info["task_name"], info["prompt_prefix"], tuple(info["alora_invocation_tokens"]))
            for info in self.model.lora_info()
        ]

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        return self._memory.seq_rm(seq_id, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self._memory.seq_cp(src, dst, p0, p1)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        self._memory.seq_add(seq_id, p0, p1, delta)

    def seq_pos_min(self, seq_id: int) -> int:
        return self._memory.seq_pos_min(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        return self._memory.seq_pos_max(seq_id)

    def state_size(self, seq_id: int, partial: bool = False) -> int:
        flags = _PARTIAL_ONLY if partial else 0
        size = self._context.state_seq_size(seq_id, flags)
        if self._draft_context is not None:
            size += self._draft_context.state_seq_size(seq_id, flags)
        return size

    def state_get(self, seq_id: int, partial: bool = False) -> bytes:
        flags = _PARTIAL_ONLY if partial else 0
        target = self._context.state_seq_get(seq_id, flags)
        if self._spec is None:
            return target
        draft = b"" if self._draft_context is None else self._draft_context.state_seq_get(seq_id, flags)
        return self.join_state(target, draft, self._spec.state_get(seq_id))

    def state_set(self, seq_id: int, data: bytes, partial: bool = False) -> bool:
        flags = _PARTIAL_ONLY if partial else 0
        target, draft, spec = self.split_state(data)
        if self._context.state_seq_set(seq_id, target, flags) != len(target):
            self._memory.seq_rm(seq_id, -1, -1)
            return False
        # a drafter without its state drafts worse, nothing else
        if self._draft_context is not None and self._draft_context.state_seq_set(seq_id, draft, flags) != len(draft):
            self._draft_context.memory.seq_rm(seq_id)
        if self._spec is not None and spec:
            self._spec.state_set(seq_id, spec)
        return True

    def split_state(self, data: bytes) -> tuple[bytes, bytes, bytes]:
        if self._spec is None:
            return data, b"", b""
        n_target, n_draft = _STATE_HEAD.unpack_from(data)
        start = _STATE_HEAD.size
        end = start + n_target
        return data[start:end], data[end : end + n_draft], data[end + n_draft :]

    def join_state(self, target: bytes, draft: bytes, spec: bytes) -> bytes:
        if self._spec is None:
            return target
        return b"".join((_STATE_HEAD.pack(len(target), len(draft)), target, draft, spec))

    def state_save_file(self, path: str, seq_id: int, tokens: Sequence[int]) -> int:
        return self._context.state_seq_save_file(path, seq_id, tokens)

    def state_load_file(self, path: str, seq_id: int, capacity: int) -> tuple[int, list[int]]:
        if self._draft_context is not None:
            self._draft_context.memory.seq_rm(seq_id)
        return self._context.state_seq_load_file(path, seq_id, capacity)

    def new_sampler(self, params: SamplingParams) -> Sampler:
        try:
            return binding.Sampler(self.model, self._params, sampler_settings(params))
        except binding.NativeError as exc:
            raise BackendError(str(exc)) from exc

    def clone_sampler(self, sampler: Sampler) -> Sampler:
        assert isinstance(sampler, binding.Sampler)
        return sampler.clone()

    def copy_sampler(self, source: Sampler, target: Sampler) -> None:
        assert isinstance(source, binding.Sampler)
        assert isinstance(target, binding.Sampler)
        target.copy_from(source)

    def set_sampler(self, seq_id: int, sampler: Sampler | None) -> None:
        assert sampler is None or isinstance(sampler, binding.Sampler)
        binding.set_sampler(self.model, seq_id, sampler)

    def sample_many(self, samplers: Sequence[Sampler], indices: Sequence[int]) -> list[int | BackendError]:
        out = binding.sample_many(self.model, samplers, indices)  # type: ignore[arg-type]
        return [BackendError(str(token)) if isinstance(token, binding.NativeError) else token for token in out]

    def token_probs(
        self, sampler: Sampler, index: int, token: int, n_top: int, post: bool
    ) -> tuple[float, list[tuple[int, float]]]:
        assert isinstance(sampler, binding.Sampler)
        return binding.token_probs(self.model, sampler, index, token, min(n_top, self.n_vocab), post)

    def logprobs(
        self, indices: Sequence[int], tokens: Sequence[int], n_top: int
    ) -> list[tuple[float, list[tuple[int, float]]]]:
        try:
            return binding.logprobs(self.model, indices, tokens, min(n_top, self.n_vocab))
        except binding.NativeError as exc:
            raise BackendError(str(exc)) from exc

    def piece(self, token: int, special: bool) -> bytes:
        return self._pieces[special][token]

    def is_eog(self, token: int) -> bool:
        return token in self._eog

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._vocab.tokenize(text, add_special, parse_special)

    def logits_at(self, index: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        try:
            return self._context.logits_at(index, tokens)
        except binding.NativeError as exc:
            raise BackendError(str(exc)) from exc

    def embeddings_at(self, indices: Sequence[int]) -> npt.NDArray[np.float32]:
        try:
            return self._context.embeddings_at(indices)
        except binding.NativeError as exc:
            raise BackendError(str(exc)) from exc

    def embeddings_ith(self, index: int) -> list[float] | None:
        vector = self._context.embeddings_ith(index)
        return None if vector is None else vector.tolist()

    def embeddings_seq(self, seq_id: int) -> list[float] | None:
        vector = self._context.embeddings_seq(seq_id)
        return None if vector is None else vector.tolist()

    def identity(self) -> dict[str, str]:
        meta = "\n".join(f"{key}={value}" for key, value in sorted(self.model.meta().items()))
        facts = f"{meta}\n{self.model.n_params} {self.model.size} {self.n_vocab}"
        params = self._params.to_dict()
        return {
            "model": hashlib.sha256(facts.encode(errors="replace")).hexdigest(),
            "cache type": f"{params['cache_type_k']}/{params['cache_type_v']}",
        }

    def n_reused(self) -> int:
        return self._context.n_reused


class NativeDrafter:
    """The drafters of libllama-common as :class:`~llamasrv.engine.drafting.Drafter`."""

    def __init__(self, spec: binding.Speculative) -> None:
        self._spec = spec
        self.n_max = spec.n_max
        context = spec.context
        self._context = context
        self.seq_rm_type = SeqRm(context.seq_rm_type) if context is not None else SeqRm.PART
        self.n_rs_seq = context.n_rs_seq if context is not None else 0

    def begin(self, seq_id: int, tokens: Sequence[int], seed: int) -> None:
        self._spec.begin(seq_id, tokens, seed)

    def set_tokens(self, seq_id: int, tokens: Sequence[int]) -> None:
        self._spec.set_tokens(seq_id, tokens)

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return self._spec.draft(
            [
                binding.DraftRequest(
                    seq=request.seq_id,
                    tokens=request.tokens,
                    id_last=request.last,
                    pos0=len(request.tokens),
                    n_max=request.n_max,
                    temp=request.temp,
                    seed=request.seed,
                )
                for request in requests
            ]
        )

    def process(self, batch: Batch, offset: int, n_tokens: int) -> bool:
        assert isinstance(batch, binding.Batch)
        return self._spec.process(batch, offset, n_tokens)

    def verify(self, requests: Sequence[VerifyRequest]) -> list[Verified | BackendError]:
        out: list[Verified | BackendError] = []
        for result in self._spec.verify([self._verify_request(request) for request in requests]):
            if isinstance(result, binding.NativeError):
                out.append(BackendError(str(result)))
            else:
                out.append(Verified(result.tokens, result.probs))
        return out

    @staticmethod
    def _verify_request(request: VerifyRequest) -> binding.VerifyRequest:
        assert isinstance(request.sampler, binding.Sampler)
        return binding.VerifyRequest(
            sampler=request.sampler,
            seq=request.seq_id,
            index=request.index,
            draft=request.draft,
            rejection=request.rejection,
            replay=request.replay,
            n_top=request.n_top,
            post=request.post,
        )

    def accept(self, seq_id: int, n_tokens: int) -> None:
        self._spec.accept(seq_id, n_tokens)

    def checkpoint(self, seq_id: int) -> bytes:
        return b"" if self._context is None else self._context.state_seq_get(seq_id, _PARTIAL_ONLY)

    def roll_back(self, seq_id: int, data: bytes, n_tokens: int) -> None:
        context = self._context
        if context is None:
            return
        restored = not data or context.state_seq_set(seq_id, data, _PARTIAL_ONLY) == len(data)
        if not (restored and context.memory.seq_rm(seq_id, n_tokens, -1)):
            context.memory.seq_rm(seq_id)

    def print_stats(self) -> None:
        self._spec.print_stats()


def sampler_settings(params: SamplingParams) -> dict[str, Any]:
    """The JSON form in which the bridge takes sampler settings."""
    kind, value = params.grammar
    return {
        **{name: getattr(params, name) for name in _PLAIN_SETTINGS},
        "grammar_lazy": params.grammar_lazy and bool(value),
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "samplers": list(params.samplers),
        "grammar": {"type": kind, "value": value},
        "grammar_triggers": [
            {"type": _TRIGGER_TYPES[type_], "value": text, "token": token}
            for type_, text, token in params.grammar_triggers
        ],
        "preserved_tokens": sorted(params.preserved_tokens),
        "logit_bias": [[token, "-inf" if bias == float("-inf") else bias] for token, bias in params.logit_bias],
        "reasoning_budget_start": list(params.reasoning_budget_start),
        "reasoning_budget_end": [list(tokens) for tokens in params.reasoning_budget_end],
        "reasoning_budget_forced": list(params.reasoning_budget_forced),
    }


#: Names of the grammar trigger types by their number.
_TRIGGER_TYPES = ("token", "word", "pattern", "pattern_full")

_PLAIN_SETTINGS = tuple(
    name
    for name in SamplingParams.__dataclass_fields__
    if name
    not in {
        "dry_sequence_breakers",
        "samplers",
        "grammar",
        "grammar_triggers",
        "preserved_tokens",
        "logit_bias",
        "reasoning_budget_start",
        "reasoning_budget_end",
        "reasoning_budget_forced",
    }
)
