"""GET /props."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from llamasrv.api.defaults import sampling_defaults
from llamasrv.api.ids import media_marker
from llamasrv.api.models import TEXT_ONLY
from llamasrv.api.settings import generation_settings
from llamasrv.engine.meta import ServerMeta
from llamasrv.engine.task import TaskParams


def props_json(
    meta: ServerMeta,
    params: Mapping[str, Any],
    is_sleeping: bool,
    input_modalities: Sequence[str] = TEXT_ONLY,
) -> dict[str, Any]:
    """``params``: ``Params.to_dict()`` of the server. Needs no loaded model."""
    out: dict[str, Any] = {
        "default_generation_settings": {
            "params": generation_settings(TaskParams(sampling=sampling_defaults(params)), short=True),
            "n_ctx": meta.slot_n_ctx,
        },
        "total_slots": params["n_parallel"],
        "model_alias": meta.model_name,
        "model_ftype": meta.model_ftype,
        "model_path": meta.model_path,
        "modalities": {
            "vision": "image" in input_modalities,
            "video": "video" in input_modalities,
            "audio": "audio" in input_modalities,
        },
        "media_marker": media_marker(),
        "endpoint_slots": params["endpoint_slots"],
        "endpoint_props": params["endpoint_props"],
        "endpoint_metrics": params["endpoint_metrics"],
        "ui": params["ui"],
        "ui_settings": orjson.loads(params.get("ui_config_json") or "{}"),
        "chat_template": meta.chat_template,
        "chat_template_caps": meta.chat_template_caps,
        "bos_token": meta.bos_token,
        "eos_token": meta.eos_token,
        "build_info": meta.build_info,
        "is_sleeping": is_sleeping,
        # there is none, whatever --ui-mcp-proxy says: the page must not offer it
        "cors_proxy_enabled": False,
    }
    if params["use_jinja"] and meta.chat_template_tool_use:
        out["chat_template_tool_use"] = meta.chat_template_tool_use
    return out
