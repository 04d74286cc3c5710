"""GET /v1/models of a server with one model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llamasrv.engine.meta import ServerMeta

TEXT_ONLY = ("text",)


def models_json(meta: ServerMeta, input_modalities: Sequence[str] = TEXT_ONLY) -> dict[str, Any]:
    """``input_modalities``: "text" and what else the model takes ("image", "audio", "video")."""
    multimodal = len(input_modalities) > 1
    return {
        "models": [
            {
                "name": meta.model_name,
                "model": meta.model_name,
                "modified_at": "",
                "size": "",
                "digest": "",
                "type": "model",
                "description": "",
                "tags": [""],
                "capabilities": ["completion", "multimodal"] if multimodal else ["completion"],
                "parameters": "",
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": "",
                    "families": [""],
                    "parameter_size": "",
                    "quantization_level": "",
                },
            }
        ],
        "object": "list",
        "data": [model_json(meta, input_modalities)],
    }


def model_json(meta: ServerMeta, input_modalities: Sequence[str] = TEXT_ONLY) -> dict[str, Any]:
    """The model as an entry of the OpenAI list."""
    return {
        "id": meta.model_name,
        "aliases": list(meta.model_aliases),
        "tags": list(meta.model_tags),
        "object": "model",
        "architecture": {
            "input_modalities": list(input_modalities),
            "output_modalities": list(meta.output_modalities),
        },
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": meta.vocab_type,
            "n_vocab": meta.n_vocab,
            "n_ctx": meta.slot_n_ctx,
            "n_ctx_train": meta.n_ctx_train,
            "n_embd": meta.n_embd,
            "n_params": meta.model_n_params,
            "size": meta.model_size,
            "ftype": meta.model_ftype,
        },
    }
