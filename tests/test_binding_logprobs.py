"""Log-probabilities of given tokens against numpy's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamasrv.binding import Batch, Model, NativeError, Params, backend_init, logprobs

TEXT = "Once upon a time there was a river"


@pytest.fixture(scope="module")
def decoded(tiny_model_path: Path) -> Iterator[tuple[Model, list[int]]]:
    """A model, and the prompt whose every position but the last has an output."""
    with Params.parse(
        ["llamasrv", "-m", str(tiny_model_path), "-c", "256", "-np", "1", "--no-warmup", "-lv", "0"]
    ) as params:
        backend_init(params)
        with Model.load(params) as model:
            tokens = model.vocab.tokenize(TEXT, True, True)
            batch = Batch(len(tokens))
            batch.extend(tokens, 0, 0, True)
            batch.set_output(len(tokens) - 1, False)
            assert model.context.decode(batch, 0, len(tokens), sync=True, serial=1) == 0
            yield model, tokens


@pytest.mark.parametrize("n_top", [0, 1, 7])
def test_they_are_the_logarithm_of_the_softmax(decoded: tuple[Model, list[int]], n_top: int) -> None:
    model, tokens = decoded
    indices = list(range(len(tokens) - 1))
    found = logprobs(model, indices, tokens[1:], n_top)
    assert len(found) == len(indices)
    for index, token, (value, top) in zip(indices, tokens[1:], found, strict=True):
        logits = model.context.logits_ith(index)
        assert logits is not None
        wide = logits.astype(np.float64)
        expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
        assert value == pytest.approx(expected[token], abs=1e-4)
        assert [t for t, _ in top] == np.argsort(-wide, kind="stable")[:n_top].tolist()
        assert [p for _, p in top] == pytest.approx(np.sort(expected)[::-1][:n_top].tolist(), abs=1e-4)


def test_the_whole_vocabulary_sums_to_one(decoded: tuple[Model, list[int]]) -> None:
    model, _ = decoded
    n_vocab = model.vocab.n_tokens
    [(value, top)] = logprobs(model, [0], [n_vocab - 1], n_vocab)
    assert sum(np.exp(p) for _, p in top) == pytest.approx(1.0, abs=1e-4)
    assert dict(top)[n_vocab - 1] == value


def test_nothing_is_asked_for_nothing(decoded: tuple[Model, list[int]]) -> None:
    assert logprobs(decoded[0], [], [], 3) == []


def test_errors_say_what_is_wrong(decoded: tuple[Model, list[int]]) -> None:
    model, tokens = decoded
    with pytest.raises(NativeError, match=f"no logits at batch index {len(tokens) - 1}"):
        logprobs(model, [len(tokens) - 1], [0], 1)
    with pytest.raises(NativeError, match="no logits at batch index -1"):
        logprobs(model, [-1], [0], 1)
    with pytest.raises(NativeError, match="token out of range"):
        logprobs(model, [0], [model.vocab.n_tokens], 1)
    with pytest.raises(ValueError, match="n_top"):
        logprobs(model, [0], [0], model.vocab.n_tokens + 1)
    with pytest.raises(ValueError, match="2 indices but 1 tokens"):
        logprobs(model, [0, 1], [0], 1)
