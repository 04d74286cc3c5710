"""The backend over libllama."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamasrv import binding
from llamasrv.engine.backend import AdapterInfo, BackendError, Batch, Sampler, SeqRm
from llamasrv.engine.task import SamplingParams

#: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: only what cannot be recomputed by removing tokens.
_PARTIAL_ONLY = binding.STATE_PARTIAL_ONLY


class NativeBackend:
    """A model and its context as :class:`~llamasrv.engine.backend.Backend`."""

    def __init__(self, params: binding.Params, progress: Callable[[float], bool] | None = None) -> None:
        """Load what the command line asks for. Raises :class:`binding.NativeError`."""
        self._params = params
        self.model = binding.Model.load(params, progress)
        context = self.model.context
        vocab = self.model.vocab
        self._context = context
        self._memory = context.memory
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
        self.seq_rm_type = SeqRm(context.seq_rm_type())
        self.pooling_type = context.pooling_type
        self.n_embd_out = self.model.n_embd_out
        self.n_vocab = vocab.n_tokens
        self._vocab = vocab
        self._eog = vocab.eog
        self._pieces = {special: vocab.pieces(special) for special in (False, True)}

    def close(self) -> None:
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
        return self._context.state_seq_size(seq_id, _PARTIAL_ONLY if partial else 0)

    def state_get(self, seq_id: int, partial: bool = False) -> bytes:
        return self._context.state_seq_get(seq_id, _PARTIAL_ONLY if partial else 0)

    def state_set(self, seq_id: int, data: bytes, partial: bool = False) -> bool:
        if self._context.state_seq_set(seq_id, data, _PARTIAL_ONLY if partial else 0) == len(data):
            return True
        self._memory.seq_rm(seq_id, -1, -1)
        return False

    def state_save_file(self, path: str, seq_id: int, tokens: Sequence[int]) -> int:
        return self._context.state_seq_save_file(path, seq_id, tokens)

    def state_load_file(self, path: str, seq_id: int, capacity: int) -> tuple[int, list[int]]:
        return self._context.state_seq_load_file(path, seq_id, capacity)

    def new_sampler(self, params: SamplingParams) -> Sampler:
        try:
            return binding.Sampler(self.model, self._params, sampler_settings(params))
        except binding.NativeError as exc:
            raise BackendError(str(exc)) from exc

    def sample_many(self, samplers: Sequence[Sampler], indices: Sequence[int]) -> list[int | BackendError]:
        out = binding.sample_many(self.model, samplers, indices)  # type: ignore[arg-type]
        return [BackendError(str(token)) if isinstance(token, binding.NativeError) else token for token in out]

    def token_probs(
        self, sampler: Sampler, index: int, token: int, n_top: int, post: bool
    ) -> tuple[float, list[tuple[int, float]]]:
        assert isinstance(sampler, binding.Sampler)
        return binding.token_probs(self.model, sampler, index, token, min(n_top, self.n_vocab), post)

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
