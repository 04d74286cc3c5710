"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import FieldError, as_array, as_bool
from llamasrv.api.jsonio import to_text, type_name
from llamasrv.api.openapi_schema import BOOLEAN, TOKENS, Member
from llamasrv.api.prompt import MIXED, check_tokens, is_token, tokenize_mixed
from llamasrv.api.protocols import Vocab

TOKENIZE_MEMBERS = (
    Member("content", MIXED, "Text, or text and tokens in a list.", null=False),
    Member("add_special", BOOLEAN, "Adds BOS and the like as the model wants them (false)."),
    Member("parse_special", BOOLEAN, "Reads the text of special tokens as these (true)."),
    Member("with_pieces", BOOLEAN, "Gives the text of each token as well (false)."),
)
DETOKENIZE_MEMBERS = (Member("tokens", TOKENS, "The tokens.", null=False),)


def tokenize_json(vocab: Vocab, data: Mapping[str, Any]) -> dict[str, Any]:
    """``{"tokens": [...]}`` of the text, or the strings and ids, in ``content``. Raises ApiError."""
    if "content" not in data:
        return {"tokens": []}
    add_special = _flag(data, "add_special", False)
    parse_special = _flag(data, "parse_special", True)
    with_pieces = _flag(data, "with_pieces", False)
    tokens = tokenize_mixed(vocab, data["content"], add_special, parse_special)
    check_tokens(vocab, tokens, "Content contains invalid tokens")
    if with_pieces:
        pieces = {token: piece_json(vocab.piece(token, True)) for token in set(tokens)}
        return {"tokens": [{"id": token, "piece": pieces[token]} for token in tokens]}
    return {"tokens": tokens}


def detokenize_json(vocab: Vocab, data: Mapping[str, Any]) -> dict[str, Any]:
    """``{"content": text}`` of the ids in ``tokens``, control tokens included. Raises ApiError."""
    if "tokens" not in data:
        return {"content": ""}
    try:
        tokens = as_array(data["tokens"])
    except FieldError as error:
        raise invalid_request(f"Field 'tokens': {error}") from None
    for token in tokens:
        if not is_token(token):
            raise invalid_request(f"Field 'tokens': type must be integer, but is {type_name(token)}")
    check_tokens(vocab, tokens, "Field 'tokens': invalid tokens")
    pieces = {token: vocab.piece(token, True) for token in set(tokens)}
    return {"content": to_text(b"".join(pieces[token] for token in tokens))}


def piece_json(piece: bytes) -> str | list[int]:
    """Text of a token; the bytes where they are not UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _flag(data: Mapping[str, Any], name: str, default: bool) -> bool:
    value = data.get(name)
    if value is None:
        return default
    try:
        return as_bool(value)
    except FieldError as error:
        raise invalid_request(f"Field '{name}': {error}") from None
