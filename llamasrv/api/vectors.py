"""Arithmetic and encoding of embedding vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]

#: Values of ``embd_normalize``; any other number p stands for the p-norm.
NORM_NONE, NORM_MAX, NORM_EUCLIDEAN = -1, 0, 2
#: NORM_MAX scales the largest value to this, the range of int16.
MAX_VALUE = 32760.0


def normalize(values: Sequence[float] | Vector, kind: int) -> Vector:
    """float32 values scaled as ``common_embd_normalize`` does it: sums in float64, one after the other."""
    vector = np.asarray(values, dtype=np.float32)
    if kind == NORM_NONE:
        return vector
    with np.errstate(all="ignore"):
        if kind == NORM_MAX:
            size = float(np.max(np.abs(vector), initial=0.0)) / MAX_VALUE
        elif kind == NORM_EUCLIDEAN:
            size = float(np.sqrt(_sum(vector * vector)))
        else:
            powers = np.power(np.abs(vector).astype(np.float64), kind)
            size = float(np.power(np.float64(_sum(powers)), np.float64(1.0) / kind))
        # a size of zero, or none at all, makes the vector zero
        factor = np.float32(1.0 / size) if size > 0.0 else np.float32(0.0)
        scaled: Vector = vector * factor
    return scaled


def _sum(terms: npt.NDArray[np.floating[npt.NBitBase]]) -> float:
    """In the order of the terms: numpy's own sum adds them pairwise."""
    return float(np.cumsum(terms, dtype=np.float64)[-1]) if terms.size else 0.0


def embedding(values: Sequence[float], kind: int, dimensions: int | None = None) -> Vector:
    """The first ``dimensions`` values (None: all of them), normalized."""
    return normalize(values if dimensions is None else values[:dimensions], kind)


def to_base64(vector: Vector) -> str:
    """Little-endian float32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
