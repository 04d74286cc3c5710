"""Settings of the engine, taken from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class EngineConfig:
    """Fields have the names and meaning of the original's parameters; sizes in tokens unless a unit is named."""

    n_parallel: int = 1
    n_predict: int = -1
    kv_unified: bool = False
    kv_unified_per_slot: int = 0
    cont_batching: bool = True
    ctx_shift: bool = False
    n_cache_reuse: int = 0
    swa_full: bool = False
    special: bool = False
    slot_prompt_similarity: float = 0.1
    #: MiB; -1: no limit, 0: no cache.
    cache_ram_mib: int = 8192
    cache_idle_slots: bool = True
    n_ctx_checkpoints: int = 32
    checkpoint_min_step: int = 8192
    sleep_idle_seconds: int = -1
    slots_debug: bool = False
    #: Take prefixes from other slots (--no-share-prefix turns it off).
    share_prefix: bool = True
    #: Milliseconds that a running stream may wait for its next token because of another's prompt; 0: no bound.
    stream_gap_ms: int = 1000
    #: Tasks that may wait for a slot before more are refused; -1: no bound.
    queue_max: int = -1
    #: Scales of the adapters given by --lora, by index.
    lora: list[float] = field(default_factory=list)

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> EngineConfig:
        """From ``Params.to_dict()`` and the environment."""
        same = {name: params[name] for name in cls.__dataclass_fields__ if name in params}
        config = cls(**same)
        is_off = params.get("lora_init_without_apply", False)
        config.lora = [0.0 if is_off else float(adapter["scale"]) for adapter in params.get("lora_adapters", [])]
        debug = os.environ.get("LLAMA_SERVER_SLOTS_DEBUG", "")
        config.slots_debug = debug.strip().lstrip("+-").isdigit() and int(debug) != 0
        return config
