"""Settings of a request that sets nothing: those of the server's command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from llamasrv.api.handlers import TRIGGER_PATTERN, TRIGGER_PATTERN_FULL, TRIGGER_TOKEN, TRIGGER_WORD
from llamasrv.engine.task import SamplingParams, TaskParams

_TRIGGER_NAMES = {
    "token": TRIGGER_TOKEN,
    "word": TRIGGER_WORD,
    "pattern": TRIGGER_PATTERN,
    "pattern_full": TRIGGER_PATTERN_FULL,
}

#: Fields of a request that have a default on the command line, by the same name.
_SAME_NAME = ("n_keep", "n_predict", "n_cache_reuse", "cache_prompt", "sse_ping_interval", "reasoning_format")
#: Verbosity from which on responses carry debugging information.
_VERBOSE = 9


def request_defaults(params: Mapping[str, Any]) -> TaskParams:
    """From ``Params.to_dict()`` of the server."""
    defaults = TaskParams(**{name: params[name] for name in _SAME_NAME if name in params})
    defaults.antiprompt = tuple(params.get("antiprompt", ()))
    defaults.verbose = params.get("verbosity", 0) > _VERBOSE
    defaults.speculative_types = ",".join(params.get("speculative", {}).get("types", ())) or "none"
    defaults.sampling = sampling_defaults(params)
    return defaults


def sampling_defaults(params: Mapping[str, Any]) -> SamplingParams:
    """From the member "sampling" of ``Params.to_dict()``."""
    given: Mapping[str, Any] = params.get("sampling", {})
    plain = {
        item.name: given[item.name]
        for item in dataclasses.fields(SamplingParams)
        if item.name in given and isinstance(given[item.name], bool | int | float | str)
    }
    sampling = SamplingParams(**plain)
    for name in ("dry_sequence_breakers", "samplers"):
        if name in given:
            setattr(sampling, name, tuple(given[name]))
    if given.get("grammar"):
        sampling.grammar = (given["grammar"]["type"], given["grammar"]["value"])
    sampling.grammar_triggers = tuple(
        (_TRIGGER_NAMES[trigger["type"]], trigger["value"], trigger["token"])
        for trigger in given.get("grammar_triggers", ())
    )
    sampling.preserved_tokens = frozenset(given.get("preserved_tokens", ()))
    # infinities come as text
    sampling.logit_bias = tuple((token, float(bias)) for token, bias in given.get("logit_bias", ()))
    return sampling
