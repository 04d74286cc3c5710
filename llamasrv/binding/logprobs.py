"""Log-probabilities of given tokens: how likely the model finds a text."""

from __future__ import annotations

from collections.abc import Sequence

from llamasrv.binding.model import Model
from llamasrv.binding.native import check, ffi, int_arg, lib, new_text_pointer


def logprobs(
    model: Model, indices: Sequence[int], tokens: Sequence[int], n_top: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each index of the last decode the natural logarithm of its token's probability, and the most likely tokens.

    Softmax over the raw logits; ``n_top`` (at most the vocabulary's size) pairs of token and logarithm, best first.
    Raises NativeError where there are no logits. Call it from the thread that decodes.
    """
    n = len(indices)
    if n != len(tokens):
        raise ValueError(f"{n} indices but {len(tokens)} tokens")
    int_arg("n_top", n_top, 0, model.vocab.n_tokens)
    values, ids, tops, err = (
        ffi.new("float[]", n),
        ffi.new("int32_t[]", n * n_top),
        ffi.new("float[]", n * n_top),
        new_text_pointer(),
    )
    try:
        idx, wanted = ffi.new("int32_t[]", list(indices)), ffi.new("int32_t[]", list(tokens))
    except OverflowError as error:
        raise ValueError(str(error)) from None
    with model._engine as engine:
        check(
            lib.lsrv_logprobs(engine, n, idx, wanted, n_top, values, ids, tops, err), err, "reading log-probabilities"
        )
    pairs = list(zip(ffi.unpack(ids, n * n_top), ffi.unpack(tops, n * n_top), strict=True)) if n * n_top else []
    return [(float(values[i]), pairs[i * n_top : (i + 1) * n_top]) for i in range(n)]
