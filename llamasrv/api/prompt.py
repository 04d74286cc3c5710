"""Prompts of requests: text, token ids, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.jsonio import type_name
from llamasrv.api.openapi_schema import STRING, TOKEN, TOKENS, array, either, object_of
from llamasrv.api.protocols import Vocab

#: Prompts, inputs or documents of one request: each becomes a task.
MAX_PROMPTS = 10_000

#: What :func:`tokenize_mixed` takes, and an object around it.
MIXED = either(STRING, array(either(TOKEN, STRING)))
PROMPT_OBJECT = object_of({"prompt_string": MIXED}, ["prompt_string"])
#: What :func:`tokenize_prompts` takes.
PROMPT = either(
    STRING,
    PROMPT_OBJECT,
    array(either(TOKEN, STRING), minItems=1, maxItems=MAX_PROMPTS),
    array(either(STRING, TOKENS, PROMPT_OBJECT), minItems=1, maxItems=MAX_PROMPTS),
)

_WRONG_ELEMENT = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, '
    "or a list of mixed strings & tokens."
)


def is_token(value: Any) -> bool:
    """Whether a JSON value can be a token id."""
    return isinstance(value, int) and not isinstance(value, bool)


def tokenize_mixed(vocab: Vocab, value: Any, add_special: bool, parse_special: bool) -> list[int]:
    """Tokens of a string or of a list of strings and token ids.

    Special tokens are added only if the string, or the first element, is text. The ids are not checked. Raises
    :class:`ApiError` for values of another type.
    """
    if isinstance(value, str):
        return vocab.tokenize(value, add_special, parse_special)
    if not isinstance(value, list):
        raise invalid_request(f"type must be string, but is {type_name(value)}")
    tokens: list[int] = []
    for position, item in enumerate(value):
        if isinstance(item, str):
            tokens += vocab.tokenize(item, add_special and position == 0, parse_special)
        elif is_token(item):
            tokens.append(item)
        else:
            raise invalid_request(f"type must be number, but is {type_name(item)}")
    return tokens


def tokenize_prompts(
    vocab: Vocab, prompt: Any, add_special: bool = True, parse_special: bool = True
) -> list[list[int]]:
    """Tokens of each prompt in the field ``prompt``, which holds one prompt or a list of them.

    A prompt is a string, a list of token ids and strings, or ``{"prompt_string": prompt}``. Raises :class:`ApiError`.
    """
    if isinstance(prompt, list) and not any(is_token(item) for item in prompt):
        if not prompt:
            raise invalid_request('"prompt" must not be empty')
        check_amount("prompt", prompt)
        return [tokenize_prompt(vocab, item, add_special, parse_special) for item in prompt]
    return [tokenize_prompt(vocab, prompt, add_special, parse_special)]


def check_amount(name: str, items: Sequence[Any]) -> None:
    """Raises :class:`ApiError` if the field ``name`` holds too many prompts."""
    if len(items) > MAX_PROMPTS:
        raise invalid_request(f'"{name}" has too many entries ({len(items)}, limit {MAX_PROMPTS})')


def check_tokens(vocab: Vocab, tokens: Sequence[int], message: str = "Prompt contains invalid tokens") -> None:
    """Raises :class:`ApiError` with ``message`` if an id is not in the vocabulary."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab.n_tokens):
        raise invalid_request(message)


def tokenize_prompt(vocab: Vocab, prompt: Any, add_special: bool = True, parse_special: bool = True) -> list[int]:
    """Tokens of one prompt: a string, token ids, both in a list, or an object around one of them."""
    if isinstance(prompt, dict) and "prompt_string" in prompt:
        if "multimodal_data" in prompt:
            raise invalid_request("Multimodal data provided, but model does not support multimodal requests.")
        prompt = prompt["prompt_string"]
    elif not isinstance(prompt, str) and not _is_token_list(prompt):
        raise invalid_request(_WRONG_ELEMENT)
    tokens = tokenize_mixed(vocab, prompt, add_special, parse_special)
    check_tokens(vocab, tokens)
    return tokens


def _is_token_list(value: Any) -> bool:
    """Ids only, or ids and strings; anything else beside them is for :func:`tokenize_mixed` to refuse."""
    if not isinstance(value, list):
        return False
    return all(is_token(item) for item in value) or (
        any(is_token(item) for item in value) and any(isinstance(item, str) for item in value)
    )
