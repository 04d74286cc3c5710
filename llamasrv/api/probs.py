"""Probabilities of sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llamasrv.api.fields import FLOAT_MAX, float32
from llamasrv.api.jsonio import to_text
from llamasrv.engine.result import TokenProb
from llamasrv.engine.text import incomplete_tail


def probabilities(probs: Sequence[TokenProb], post_sampling: bool) -> list[dict[str, Any]]:
    """JSON for each sampled token and its candidates: ``prob`` in 0..1 after sampling, else natural ``logprob``."""
    top_name = "top_probs" if post_sampling else "top_logprobs"
    out = []
    for prob in probs:
        entry = _entry(prob.token, prob.piece, prob.prob, post_sampling)
        entry[top_name] = [_entry(token, piece, value, post_sampling) for token, piece, value in prob.top]
        out.append(entry)
    return out


def _entry(token: int, piece: bytes, value: float, post_sampling: bool) -> dict[str, Any]:
    text = piece[: len(piece) - incomplete_tail(piece)]
    entry: dict[str, Any] = {"id": token, "token": to_text(text), "bytes": list(piece)}
    if post_sampling:
        entry["prob"] = value
    else:
        # JSON has no minus infinity
        entry["logprob"] = float32(math.log(value)) if value > 0.0 else -FLOAT_MAX
    return entry
