"""Parameters as they are after the checks of the start-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from llamasrv.engine.log import srv_inf, srv_trc, srv_wrn

#: Slots when nobody says how many.
AUTO_SLOTS = 4
#: How the parser marks ``-c 0``, the whole context of the model.
WHOLE_CONTEXT = 0xFFFFFFFF


def is_router(params: Mapping[str, Any]) -> bool:
    """Whether no model is named, so that the server would manage many."""
    model = params["model"]
    return not (model["path"] or model["hf_repo"] or model["docker_repo"])


def check_ui_config(params: Mapping[str, Any]) -> None:
    """Raise ValueError if --ui-config is no JSON; the page would get an error instead of the server's properties."""
    try:
        orjson.loads(params["ui_config_json"] or "{}")
    except orjson.JSONDecodeError as exc:
        raise ValueError(f"failed to parse UI config: {exc}") from None


def adjustments(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields to change before anything is set up. ``params``: ``Params.to_dict()``."""
    changed: dict[str, Any] = {}
    # all tokens of an embedding have to be in one physical batch
    if params["embedding"] and params["n_batch"] > params["n_ubatch"]:
        n_ubatch = params["n_ubatch"]
        srv_wrn("llama_server", "embeddings enabled with n_batch (%d) > n_ubatch (%d)", params["n_batch"], n_ubatch)
        srv_wrn("llama_server", "setting n_batch = n_ubatch = %d to avoid assertion failure", n_ubatch)
        changed["n_batch"] = n_ubatch

    n_parallel = params["n_parallel"]
    if n_parallel < 0:
        n_parallel = AUTO_SLOTS
        srv_trc("llama_server", "n_parallel is set to auto, using n_parallel = %d and kv_unified = true", n_parallel)
        changed.update(n_parallel=n_parallel, kv_unified=True)

    per_slot = params["kv_unified_per_slot"]
    is_whole = params["fit_params_min_ctx"] & 0xFFFFFFFF == WHOLE_CONTEXT
    if per_slot > 0 and params["n_ctx"] == 0 and not is_whole:
        changed["n_ctx"] = n_parallel * per_slot
        srv_inf(
            "llama_server",
            "--kv-unified-per-slot: sizing KV pool to n_parallel * kv_unified_per_slot = %d * %d = %d",
            n_parallel,
            per_slot,
            changed["n_ctx"],
        )

    if not params["model_alias"] and params["model"]["name"]:
        changed["model_alias"] = [params["model"]["name"]]
    return changed
