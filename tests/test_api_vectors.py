"""Norms of embedding vectors and their encoding."""

from __future__ import annotations

import base64
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamasrv.api.vectors import embedding, normalize, to_base64

FLOATS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40)


def f32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def by_hand(values: list[float], kind: int) -> list[float]:
    """common_embd_normalize, one operation after the other."""
    total = 0.0
    if kind == -1:
        total = 1.0
    elif kind == 0:
        total = max(abs(value) for value in values) / 32760.0
    elif kind == 2:
        for value in values:
            total += f32(value * value)
        total = math.sqrt(total)
    else:
        for value in values:
            total += math.pow(abs(value), kind)
        total = math.pow(total, 1.0 / kind)
    norm = f32(1.0 / total) if total > 0.0 else 0.0
    return [f32(value * norm) for value in values]


@given(FLOATS, st.sampled_from([-1, 0, 2]))
def test_norms_are_the_native_ones_to_the_last_bit(values: list[float], kind: int) -> None:
    assert normalize(values, kind).tolist() == by_hand(values, kind)


@given(FLOATS, st.sampled_from([1, 3, 6]))
def test_p_norms(values: list[float], kind: int) -> None:
    assert normalize(values, kind).tolist() == pytest.approx(by_hand(values, kind), rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("kind", [-1, 0, 1, 2, 3, 400, -2, -(2**31), 2**31 - 1])
def test_extreme_norms_and_vectors_give_numbers_or_zero(kind: int) -> None:
    for values in ([0.0, 0.0], [1e-30, 0.0], [3e38, -3e38], [1.0]):
        result = normalize(values, kind)
        assert result.dtype == np.float32
        assert not np.isnan(result).any()
    assert normalize([0.0, 0.0], kind).tolist() == [0.0, 0.0]


def test_known_values() -> None:
    assert normalize([3.0, 4.0], 2).tolist() == pytest.approx([0.6, 0.8])
    assert normalize([1.0, -3.0], 1).tolist() == [0.25, -0.75]
    assert normalize([1.0, -2.0], 0).tolist() == [16380.0, -32760.0]
    assert normalize([5.0, 7.0], -1).tolist() == [5.0, 7.0]


@given(FLOATS, st.integers(1, 40))
def test_shortened_vectors_have_unit_length_again(values: list[float], dimensions: int) -> None:
    short = embedding(values, 2, dimensions)
    assert len(short) == min(dimensions, len(values))
    if any(abs(value) > 1e-10 for value in values[:dimensions]):
        assert float(np.linalg.norm(short.astype(np.float64))) == pytest.approx(1.0, abs=1e-5)


def test_base64_is_little_endian_float32() -> None:
    assert base64.b64decode(to_base64(np.array([1.5, -2.0], dtype=np.float32))) == struct.pack("<2f", 1.5, -2.0)
    assert to_base64(np.array([], dtype=np.float32)) == ""
