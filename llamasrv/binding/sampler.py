"""Sampler chains with grammar and history, one per sequence that generates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from llamasrv.binding.errors import ClosedError, NativeError
from llamasrv.binding.model import Model
from llamasrv.binding.native import (
    INT32_MAX,
    Handle,
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


class Sampler:
    """A sampler of one model; closed with it. One thread at a time, made on any thread."""

    __slots__ = ("_handle", "_pointer", "seed")

    def __init__(self, model: Model, params: Params, settings: Mapping[str, Any]) -> None:
        """The sampling part of ``params`` overlaid by ``settings``: field names as in ``params.to_dict()["sampling"]``,
        besides ``reasoning_budget_start`` and the like; see ``lsrv_sampler_new`` in bridge.h.

        Raises NativeError for an unknown field, a value out of range, a grammar that does not parse.
        """
        text = _to_json(settings)
        out, err = ffi.new("lsrv_sampler **"), new_text_pointer()
        with model._engine as engine, params._handle as defaults:
            check(lib.lsrv_sampler_new(engine, defaults, text, out, err), err, "making the sampler")
            self._pointer = out[0]
            self._handle = Handle("sampler", out[0], lib.lsrv_sampler_free, parent=model._engine)
        self.seed = int(lib.lsrv_sampler_seed(self._pointer))

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

    def describe(self) -> str:
        """The chain in words, for the log."""
        out, err = new_text_pointer(), new_text_pointer()
        with self._handle as pointer:
            check(lib.lsrv_sampler_describe(pointer, out, err), err, "describing the sampler")
        return take_text(out)

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
