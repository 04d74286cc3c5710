"""POST /infill: the prompt of fill-in-the-middle models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.openapi_schema import STRING, Member, array, object_of
from llamasrv.api.prompt import MIXED, check_tokens, tokenize_mixed
from llamasrv.api.protocols import Vocab
from llamasrv.engine.result import ErrorType

#: What stands before an extra chunk when the model has no token for that.
_SNIPPET = "\n\n--- snippet ---\n\n"
#: Chunks of a request.
MAX_CHUNKS = 1024
#: Name of the project, and of a chunk without a name.
_PROJECT = "myproject"
_UNNAMED = "tmp"
#: Name of the file in which the gap is.
_CURRENT = "filename"


#: Members of a request beside those of a completion.
MEMBERS = (
    Member("prompt", STRING, "Text right before the cursor, the end of the prefix."),
    Member("input_prefix", MIXED, "What stands before the gap.", True),
    Member("input_suffix", MIXED, "What stands after the gap.", True),
    Member(
        "input_extra",
        array(object_of({"filename": STRING, "text": STRING}, ["text"]), maxItems=MAX_CHUNKS),
        "Other files that the model should know.",
    ),
)


def infill_prompt(context: ApiContext, data: Mapping[str, Any]) -> list[int]:
    """Tokens of the prompt for the gap between ``input_prefix`` and ``input_suffix``. Raises ApiError.

    [repository and extra chunks] BOS PRE prefix prompt SUF suffix MID, with ``--spm-infill`` BOS SUF suffix PRE prefix
    prompt MID. ``prompt`` is the text before the cursor that the model has to go on with. The end of the prefix
    and the beginning of the suffix, three to one, get one batch; the end of the chunks gets what the context has left.
    """
    vocab, params = context.vocab, context.params
    _check_model(vocab)
    prompt = data.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise invalid_request('"prompt" must be a string')
    for name in ("input_prefix", "input_suffix"):
        if data.get(name) is None:
            raise invalid_request(f'"{name}" is required')
    extra = _repository(vocab, _chunks(data))
    prefix = _tokenize(vocab, data, "input_prefix")
    suffix = _tokenize(vocab, data, "input_suffix")
    cursor = vocab.tokenize(prompt, False, True) if prompt else []

    n_quarter = params["n_batch"] // 4
    n_prefix = min(len(prefix), 3 * n_quarter)
    n_suffix = min(len(suffix), max(0, n_quarter - 2 - len(cursor)))
    n_extra = min(len(extra), max(0, context.meta.slot_n_ctx - params["n_batch"] - 2 * params["n_predict"]))

    before = [vocab.fim_pre, *prefix[len(prefix) - n_prefix :], *cursor]
    after = [vocab.fim_suf, *suffix[:n_suffix]]
    first, second = (after, before) if params["spm_infill"] else (before, after)
    bos = [vocab.bos] if vocab.add_bos else []
    return [*extra[len(extra) - n_extra :], *bos, *first, *second, vocab.fim_mid]


def _check_model(vocab: Vocab) -> None:
    tokens = {"prefix": vocab.fim_pre, "suffix": vocab.fim_suf, "middle": vocab.fim_mid}
    missing = "".join(f"{name} token is missing. " for name, token in tokens.items() if token == -1)
    if missing:
        raise ApiError(ErrorType.NOT_SUPPORTED, f"Infill is not supported by this model: {missing}")


def _tokenize(vocab: Vocab, data: Mapping[str, Any], name: str) -> list[int]:
    tokens = tokenize_mixed(vocab, data[name], False, False)
    check_tokens(vocab, tokens, f'"{name}" contains invalid tokens')
    return tokens


def _chunks(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """File name and text of each chunk of ``input_extra``."""
    value = data.get("input_extra")
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid_request('"input_extra" must be an array of {"filename": string, "text": string}')
    if len(value) > MAX_CHUNKS:
        raise invalid_request(f'"input_extra" has too many chunks ({len(value)}, limit {MAX_CHUNKS})')
    chunks = []
    for chunk in value:
        text = chunk.get("text") if isinstance(chunk, dict) else None
        if not isinstance(text, str):
            raise invalid_request('extra_context chunk must contain a "text" field with a string value')
        name = chunk.get("filename", _UNNAMED)
        if not isinstance(name, str):
            raise invalid_request('extra_context chunk\'s "filename" field must be a string')
        chunks.append((name, text))
    return chunks


def _repository(vocab: Vocab, chunks: Sequence[tuple[str, str]]) -> list[int]:
    """The chunks as files of a repository, and the name of the file in which the gap is."""
    tokens: list[int] = []
    if vocab.fim_rep != -1:
        tokens += [vocab.fim_rep, *vocab.tokenize(f"{_PROJECT}\n", False, False)]
    for name, text in chunks:
        if vocab.fim_sep != -1:
            tokens += [vocab.fim_sep, *vocab.tokenize(f"{name}\n", False, False)]
        else:
            tokens += vocab.tokenize(_SNIPPET, False, False)
        tokens += vocab.tokenize(text, False, False)
    if vocab.fim_sep != -1:
        tokens += [vocab.fim_sep, *vocab.tokenize(f"{_CURRENT}\n", False, False)]
    return tokens
