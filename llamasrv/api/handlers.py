"""Fields of a request whose values need more than a type and bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from llamasrv.api.fields import (
    FLOAT_MAX,
    INT32_MAX,
    FieldError,
    Limits,
    RequestState,
    as_array,
    as_bool,
    as_float,
    as_int,
    as_object,
    as_string,
    as_strings,
    bounded_int,
    float32,
)
from llamasrv.api.samplers import samplers_from_chars, samplers_from_names

#: Stop strings are looked for after every token.
MAX_STOPS = 1024
MAX_STOP_CHARS = 65_536
#: Steps of one sampler chain.
MAX_SAMPLERS = 256
MAX_TRIGGER_CHARS = 65_536
MAX_TRIGGERS = 1024
#: Brackets within brackets of a trigger's pattern; the library's parser recurses.
MAX_TRIGGER_DEPTH = 100
_REFERS_BACK = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")
#: Each is compared with the whole vocabulary.
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 4096
MAX_PRESERVED = 10_000
MAX_RESPONSE_FIELDS = 1024
#: Characters of a text that begins or ends the reasoning.
MAX_TAG_CHARS = 4096
MAX_TAGS = 64
#: Biases beyond one per token of the vocabulary.
MAX_BIASES = 10_000

#: Types of a grammar trigger, as numbers in JSON.
TRIGGER_TOKEN, TRIGGER_WORD, TRIGGER_PATTERN, TRIGGER_PATTERN_FULL = range(4)

REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")

_TOKEN_KEY = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]{1,18}")


def read_seed(state: RequestState, value: Any) -> None:
    number = as_int(value)
    if not -(2**63) <= number < 2**64:
        raise FieldError("Value is out of the range of 64 bits")
    # clients send -1, full unsigned values and time stamps alike
    state.sampling.seed = number & 0xFFFFFFFF


def read_n_probs(state: RequestState, value: Any) -> None:
    state.sampling.n_probs = bounded_int(as_int(value), Limits(0, state.vocab.n_tokens, clamp=True))


def read_repeat_last_n(state: RequestState, value: Any) -> None:
    state.sampling.penalty_last_n = _history(state, value)


def read_dry_penalty_last_n(state: RequestState, value: Any) -> None:
    state.sampling.dry_penalty_last_n = _history(state, value)


def _history(state: RequestState, value: Any) -> int:
    # samplers allocate their whole history at once
    return min(bounded_int(as_int(value), Limits(0, INT32_MAX)), state.n_history_max)


def read_dry_base(state: RequestState, value: Any) -> None:
    base = float32(as_float(value))
    state.sampling.dry_base = base if base >= 1.0 else state.defaults.sampling.dry_base


def read_dry_sequence_breakers(state: RequestState, value: Any) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise FieldError("Error: dry_sequence_breakers must be a non-empty array of strings")
    _check_amount(value, MAX_BREAKERS, MAX_BREAKER_CHARS)
    state.sampling.dry_sequence_breakers = tuple(value)


def read_response_fields(state: RequestState, value: Any) -> None:
    fields = as_strings(value)
    _check_amount(fields, MAX_RESPONSE_FIELDS, MAX_STOP_CHARS)
    state.params.response_fields = tuple(fields)


def read_lora(state: RequestState, value: Any) -> None:
    state.params.lora = lora_scales(value)


def lora_scales(value: Any) -> dict[int, float]:
    """Scales by adapter index from ``[{"id", "scale"}, ...]``. Raises FieldError."""
    wrong = "Error: 'lora' must be an array of objects with 'id' and 'scale' fields"
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise FieldError(wrong)
    lora: dict[int, float] = {}
    for entry in value:
        index, scale = entry.get("id"), entry.get("scale")
        if index is None:
            raise FieldError(wrong)
        lora[bounded_int(as_int(index), Limits(-1, INT32_MAX))] = 0.0 if scale is None else float32(as_float(scale))
    return lora


def read_json_schema(state: RequestState, value: Any) -> None:
    if state.data.get("grammar"):
        # both given: the grammar wins
        return
    schema = {"type": "object"} if value == {} else value
    try:
        text = state.grammars.from_json_schema(schema)
    except ValueError as error:
        raise FieldError(f'"json_schema": {error}') from None
    state.sampling.grammar = ("output_format", text)


def read_grammar(state: RequestState, value: Any) -> None:
    text = as_string(value)
    if not text:
        return
    state.grammars.check(text)
    kind = state.data.get("grammar_type")
    state.sampling.grammar = ("tool_calls" if kind == "tool_calls" else "user", text)


def read_reasoning_format(state: RequestState, value: Any) -> None:
    name = as_string(value)
    if name not in REASONING_FORMATS:
        raise FieldError(f"Unknown reasoning format: {name}")
    state.params.reasoning_format = name


def read_continue_final_message(state: RequestState, value: Any) -> None:
    """Used by the chat endpoints; here only checked."""
    if not isinstance(value, bool) and value not in ("content", "reasoning_content"):
        raise FieldError('Invalid continue_final_message: expected a boolean, "content" or "reasoning_content"')


def read_echo(state: RequestState, value: Any) -> None:
    """Used by the formats of some endpoints; here only checked."""
    as_bool(value)


def read_preserved_tokens(state: RequestState, value: Any) -> None:
    found = set(state.sampling.preserved_tokens)
    texts = as_strings(value)
    _check_amount(texts, MAX_PRESERVED, MAX_PRESERVED * 100)
    for text in texts:
        tokens = state.vocab.tokenize(text, False, True)
        if len(tokens) == 1:
            found.add(tokens[0])
    state.sampling.preserved_tokens = frozenset(found)


def read_grammar_triggers(state: RequestState, value: Any) -> None:
    sampling = state.sampling
    entries = as_array(value)
    if len(entries) > MAX_TRIGGERS:
        raise FieldError(f"too many grammar triggers (limit {MAX_TRIGGERS})")
    triggers = [*sampling.grammar_triggers, *(_trigger(state, entry) for entry in entries)]
    if sum(len(text) for _, text, _ in triggers) > MAX_TRIGGER_CHARS:
        raise FieldError(f"the grammar triggers are too long (limit {MAX_TRIGGER_CHARS} characters together)")
    if sampling.grammar_lazy and not triggers:
        raise FieldError("Error: no triggers set for lazy grammar!")
    sampling.grammar_triggers = tuple(triggers)


def _trigger(state: RequestState, entry: Any) -> tuple[int, str, int]:
    entry = as_object(entry)
    for key in ("type", "value"):
        if key not in entry:
            raise FieldError(f"key '{key}' not found")
    kind, text = as_int(entry["type"]), as_string(entry["value"])
    if not TRIGGER_TOKEN <= kind <= TRIGGER_PATTERN_FULL:
        raise FieldError(f"unknown grammar trigger type: {kind}")
    if len(text) > MAX_TRIGGER_CHARS:
        raise FieldError(f"a grammar trigger is too long (limit {MAX_TRIGGER_CHARS} characters)")
    if kind == TRIGGER_TOKEN:
        if "token" not in entry:
            raise FieldError("key 'token' not found")
        token = as_int(entry["token"])
        if not 0 <= token < state.vocab.n_tokens:
            raise FieldError(f"token {token} is not in the vocabulary")
        return kind, text, token
    if kind == TRIGGER_WORD:
        tokens = state.vocab.tokenize(text, False, True)
        if len(tokens) == 1:
            if tokens[0] not in state.sampling.preserved_tokens:
                raise FieldError(f"Grammar trigger word should be marked as preserved token: {text}")
            return TRIGGER_TOKEN, text, tokens[0]
    elif _depth(text) > MAX_TRIGGER_DEPTH:
        raise FieldError(f"a grammar trigger is nested too deeply (limit {MAX_TRIGGER_DEPTH})")
    elif _REFERS_BACK.search(text):
        # no automaton matches it, and backtracking recurses over the text
        raise FieldError("a grammar trigger must not refer back to a group")
    return kind, text, -1


def _depth(pattern: str) -> int:
    """Brackets that are open at most at a time; those that stand for themselves are counted as well."""
    return max(accumulate((char == "(") - (char == ")") for char in pattern if char in "()"), default=0)


def _check_amount(texts: Sequence[str], most: int, most_chars: int) -> None:
    """Raises FieldError if there are too many texts, or too many characters in them."""
    if len(texts) > most or sum(map(len, texts)) > most_chars:
        raise FieldError(f"too many texts (limit {most} of {most_chars} characters together)")


def read_reasoning_budget_start(state: RequestState, value: Any) -> None:
    tag = as_string(value)
    _check_amount([tag], 1, MAX_TAG_CHARS)
    state.sampling.reasoning_budget_start = tuple(state.vocab.tokenize(tag, False, True))


def read_reasoning_budget_end(state: RequestState, value: Any) -> None:
    tags = [value] if isinstance(value, str) else as_strings(value)
    _check_amount(tags, MAX_TAGS, MAX_TAG_CHARS)
    state.sampling.reasoning_budget_end = tuple(tuple(state.vocab.tokenize(tag, False, True)) for tag in tags if tag)


def read_reasoning_budget_message(state: RequestState, value: Any) -> None:
    message, sampling = as_string(value), state.sampling
    _check_amount([message], 1, MAX_STOP_CHARS)
    if sampling.reasoning_budget_end:
        tokens = state.vocab.tokenize(message, False, True) if message else []
        sampling.reasoning_budget_forced = (*tokens, *sampling.reasoning_budget_end[0])


def read_logit_bias(state: RequestState, value: Any) -> None:
    """``[[token or text, bias], ...]`` or ``{token or text: bias}``; entries of another shape are passed over."""
    if isinstance(value, dict):
        pairs = [(int(key) if _TOKEN_KEY.fullmatch(key) else key, bias) for key, bias in value.items()]
    else:
        pairs = [(entry[0], entry[1]) for entry in as_array(value) if isinstance(entry, list) and len(entry) == 2]
    found: list[tuple[int, float]] = []
    n_max = state.vocab.n_tokens + MAX_BIASES
    if len(pairs) > n_max or sum(len(key) for key, _ in pairs if isinstance(key, str)) > n_max:
        raise FieldError(f"too many biases (limit {n_max})")
    for key, raw in pairs:
        bias = _bias(raw)
        if bias is None:
            continue
        if isinstance(key, str):
            found.extend((token, bias) for token in state.vocab.tokenize(key, False, False))
        elif isinstance(key, int) and not isinstance(key, bool) and 0 <= key < state.vocab.n_tokens:
            found.append((key, bias))
    state.sampling.logit_bias = tuple(found)


def _bias(value: Any) -> float | None:
    if value is False:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # two infinite logits would make the probabilities NaN
    return -math.inf if value < -FLOAT_MAX else float32(value)


def read_ignore_eos(state: RequestState, value: Any) -> None:
    sampling = state.sampling
    sampling.ignore_eos = as_bool(value)
    if not sampling.ignore_eos and state.defaults.sampling.ignore_eos:
        ends = set(state.logit_bias_eog)
        sampling.logit_bias = tuple(bias for bias in sampling.logit_bias if bias not in ends)


def read_stop(state: RequestState, value: Any) -> None:
    """A string or a list of them. Empty ones count for nothing; without any the server's own are taken."""
    words = [value] if isinstance(value, str) else [as_string(item) for item in as_array(value) if item is not None]
    words = [word for word in words if word]
    if len(words) > MAX_STOPS or sum(map(len, words)) > MAX_STOP_CHARS:
        raise FieldError(f"too many stop strings (limit {MAX_STOPS} of {MAX_STOP_CHARS} characters together)")
    state.params.antiprompt = tuple(words) or state.defaults.antiprompt


def read_samplers(state: RequestState, value: Any) -> None:
    samplers = samplers_from_chars(value) if isinstance(value, str) else samplers_from_names(as_strings(value))
    if len(samplers) > MAX_SAMPLERS:
        raise FieldError(f"too many samplers (limit {MAX_SAMPLERS})")
    state.sampling.samplers = samplers
