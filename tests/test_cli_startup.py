"""Parameters after the checks of the start-up."""

from __future__ import annotations

from typing import Any

import pytest

from llamasrv.cli.startup import adjustments, is_router


def params(**changes: Any) -> dict[str, Any]:
    base = {
        "embedding": False,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_parallel": 1,
        "kv_unified": False,
        "kv_unified_per_slot": 0,
        "n_ctx": 0,
        "fit_params_min_ctx": 4096,
        "model_alias": ["name"],
        "model": {"path": "m.gguf", "hf_repo": "", "docker_repo": "", "name": "m.gguf"},
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"embedding": True}, {"n_batch": 512}),
        ({"embedding": True, "n_batch": 256}, {}),
        ({"n_parallel": -1}, {"n_parallel": 4, "kv_unified": True}),
        ({"n_parallel": 3, "kv_unified_per_slot": 100}, {"n_ctx": 300}),
        (
            {"n_parallel": -1, "kv_unified_per_slot": 100},
            {"n_parallel": 4, "kv_unified": True, "n_ctx": 400},
        ),
        ({"kv_unified_per_slot": 100, "n_ctx": 512}, {}),
        # -c 0: the whole context of the model
        ({"kv_unified_per_slot": 100, "fit_params_min_ctx": -1}, {}),
        ({"kv_unified_per_slot": 100, "fit_params_min_ctx": 0xFFFFFFFF}, {}),
        ({"model_alias": []}, {"model_alias": ["m.gguf"]}),
    ],
)
def test_adjustments(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert adjustments(params(**changes)) == expected


def test_without_any_model_it_would_be_the_router() -> None:
    empty = {"path": "", "hf_repo": "", "docker_repo": "", "name": ""}
    assert is_router(params(model=empty))
    for key in ("path", "hf_repo", "docker_repo"):
        assert not is_router(params(model={**empty, key: "x"}))
