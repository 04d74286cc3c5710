"""Sampler chains with grammar and history, one per sequence that generates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from llamasrv.binding.errors import ClosedError, NativeError
from llamasrv.binding.model import Model
from llamasrv.binding.native import (
    INT32_MAX,
    Handle,
    NativeObject,
    check,
    error_text,
    ffi,
    int_arg,
    lib,
    new_text_pointer,
    take_text,
    text_of,
)
from llamasrv.binding.params import Params


class Sampler(NativeObject):
    """A sampler of one model; closed with it. One thread at a time, made on any thread."""

    __slots__ = ("_pointer", "backend_sampling", "seed")

    def __init__(self, model: Model, params: Params, settings: Mapping[str, Any]) -> None:
        """The sampling part of ``params`` overlaid by ``settings``: field names as in ``params.to_dict()["sampling"]``,
        besides ``reasoning_budget_start`` and the like; see ``lsrv_sampler_new`` in bridge.h.

        Raises NativeError for an unknown field, a value out of range, a grammar that does not parse.
        """
        text = _to_json(settings)
        out, err = ffi.new("lsrv_sampler **"), new_text_pointer()
        with model._engine as engine, params._handle as defaults:
            check(lib.lsrv_sampler_new(engine, defaults, text, out, err), err, "making the sampler")
            self._own(out[0], model._engine)

    def _own(self, pointer: Any, engine: Handle) -> None:
        self._pointer = pointer
        self._handle = Handle("sampler", pointer, lib.lsrv_sampler_free, parent=engine)
        self.seed = int(lib.lsrv_sampler_seed(pointer))
        #: Whether the settings ask for backend sampling and allow it; see :func:`set_sampler`.
        self.backend_sampling = bool(lib.lsrv_sampler_backend_sampling(pointer))

    def accept(self, tokens: Sequence[int], is_generated: bool) -> None:
        """Take tokens into the history; ``is_generated``: also into grammar and reasoning budget.

        Raises ValueError or NativeError for a token outside the vocabulary, NativeError when the grammar refuses one;
        the sampler is of no use then.
        """
        try:
            array = ffi.new("int32_t[]", list(tokens))
        except OverflowError as error:
            raise ValueError(str(error)) from None
        err = new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_sampler_accept(pointer, array, len(tokens), is_generated, err), err, "accepting tokens")

    def reset(self) -> None:
        """Forget the history."""
        with self._handle as pointer:
            lib.lsrv_sampler_reset(pointer)

    def clone(self) -> Sampler:
        """A second sampler in the same state. Raises NativeError."""
        out, err = ffi.new("lsrv_sampler **"), new_text_pointer()
        copy = object.__new__(Sampler)
        with self._handle as pointer:
            check(lib.lsrv_sampler_clone(pointer, out, err), err, "cloning the sampler")
            assert self._handle.parent is not None
            copy._own(out[0], self._handle.parent)
        return copy

    def copy_from(self, other: Sampler) -> None:
        """Take over the state of ``other``. Raises NativeError unless one is a clone of the other."""
        err = new_text_pointer()
        with self._handle as pointer, other._handle as source:
            check(lib.lsrv_sampler_copy(source, pointer, err), err, "copying the sampler")

    def force_reasoning_end(self) -> bool:
        """Make the next tokens end the reasoning that is under way; False when there is none to end."""
        with self._handle as pointer:
            return bool(lib.lsrv_sampler_force_reasoning_end(pointer))

    def describe(self) -> str:
        """The chain in words, for the log."""
        out, err = new_text_pointer(), new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_sampler_describe(pointer, out, err), err, "describing the sampler")
        return take_text(out)


def sample_many(model: Model, samplers: Sequence[Sampler], indices: Sequence[int]) -> list[int | NativeError]:
    """For each sampler sample a token from the logits at its index of the last decode, and accept it.

    One native call for all. An item is the token, or the error if that sampler failed. Raises ValueError if the lengths
    differ, ClosedError if the model or a sampler is closed. Call it from the thread that decodes.
    """
    n = len(samplers)
    if n != len(indices):
        raise ValueError(f"{n} samplers but {len(indices)} indices")
    if n == 0:
        return []
    arrays = model.sample_arrays
    arrays.grow(n)
    c_samplers, c_indices, tokens, status = arrays.samplers, arrays.indices, arrays.tokens, arrays.status
    try:
        for i in range(n):
            sampler = samplers[i]
            if sampler._handle.closed:
                raise ClosedError("sampler is closed")
            if sampler._handle.parent is not model._engine:
                raise ValueError("the sampler belongs to another model")
            c_samplers[i] = sampler._pointer
            c_indices[i] = indices[i]
    except OverflowError as error:
        raise ValueError(str(error)) from None
    with model._engine as engine:
        failed = lib.lsrv_sample_many(engine, n, c_samplers, c_indices, tokens, status, ffi.NULL)
        if not failed:
            result: list[int | NativeError] = ffi.unpack(tokens, n)
            return result
        return [
            tokens[i] if status[i] == 0 else NativeError(text_of(lib.lsrv_sampler_error(c_samplers[i])))
            for i in range(n)
        ]


def set_sampler(model: Model, seq: int, sampler: Sampler | None) -> None:
    """Run this sampler's chain in the compute graph for the outputs of a sequence (backend sampling), or none.

    Only a sampler with ``backend_sampling`` can, and once in its life: else NativeError. When the device cannot run the
    chain, the sampler works on the CPU and nothing else changes. Closing a sampler takes its chain out. Call it from
    the thread that decodes.
    """
    int_arg("seq", seq, 0, model.context.n_seq_max - 1)
    if sampler is not None and sampler._handle.parent is not model._engine:
        raise ValueError("the sampler belongs to another model")
    err = new_text_pointer()
    with model._engine as engine:
        if sampler is None:
            status = lib.lsrv_engine_set_sampler(engine, seq, ffi.NULL, err)
        else:
            with sampler._handle as pointer:
                status = lib.lsrv_engine_set_sampler(engine, seq, pointer, err)
    check(status, err, "setting the backend's sampler")
    if sampler is None:
        model.attached.pop(seq, None)
    else:
        model.attached[seq] = sampler


def token_probs(
    model: Model, sampler: Sampler, index: int, token: int, n_top: int, post: bool
) -> tuple[float, list[tuple[int, float]]]:
    """Probability of ``token``, just sampled at ``index``, and the ``n_top`` most likely ``(token, probability)``.

    ``post``: after the sampler chain (fewer if others have probability 0), else softmax over the raw logits.
    Raises NativeError when there are no logits at the index.
    """
    int_arg("n_top", n_top, 0, INT32_MAX)
    int_arg("token", token)
    n_top = min(n_top, model.vocab.n_tokens)
    arrays = model.sample_arrays
    arrays.grow_top(n_top)
    prob, err = ffi.new("float *"), new_text_pointer()
    with model._engine as engine, sampler._handle as pointer:
        n = lib.lsrv_token_probs(
            engine, pointer, int_arg("index", index, 0), token, n_top, post, arrays.ids, arrays.probs, prob, err
        )
    if n < 0:
        raise NativeError(error_text(err, "reading probabilities failed"))
    top = list(zip(ffi.unpack(arrays.ids, n), ffi.unpack(arrays.probs, n), strict=True)) if n > 0 else []
    return float(prob[0]), top


def _to_json(settings: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(settings, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(settings)).encode()


def _finite(value: Any) -> Any:
    """JSON has no infinities: the bridge takes "inf", "-inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
