"""POST /embedding, /embeddings and /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamasrv.api.content import content_text
from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.fields import INT32_MAX, FieldError, Limits, as_int, bounded_int
from llamasrv.api.openapi_schema import STRING, TOKEN, TOKENS, Member, array, either, enum, integer, object_of
from llamasrv.api.prompt import MAX_PROMPTS, PROMPT_OBJECT, check_amount, is_token, tokenize_prompt
from llamasrv.api.protocols import TaskIds
from llamasrv.api.sizes import check_sizes
from llamasrv.api.vectors import NORM_NONE, embedding, to_base64
from llamasrv.engine.result import EmbeddingResult, ErrorType
from llamasrv.engine.task import Task, TaskParams, TaskType

#: llama_pooling_type: one vector per token.
POOLING_NONE = 0

_CONTENT = object_of({"content": array(object_of({"type": enum("text"), "text": STRING}, ["type"]))}, ["content"])
_INPUT = either(
    STRING,
    PROMPT_OBJECT,
    _CONTENT,
    array(either(TOKEN, STRING), minItems=1, maxItems=MAX_PROMPTS),
    array(either(STRING, TOKENS, PROMPT_OBJECT, _CONTENT), minItems=1, maxItems=MAX_PROMPTS),
)
#: Members of a request, of which ``input`` goes before ``content``.
MEMBERS = (
    Member("input", _INPUT, "Text, tokens, both in a list, or a list of such.", null=False),
    Member("content", _INPUT, "Counts where `input` is absent; the answer is in the native form then.", null=False),
    Member("encoding_format", enum("float", "base64"), "How OpenAI's route gives vectors."),
    Member("embd_normalize", integer(-INT32_MAX - 1, INT32_MAX), "-1 none, 0 largest value, p > 0: p-norm."),
    Member("dimensions", integer(1), "Values of each vector to keep, at most as many as the model has."),
    Member("model", STRING, "Repeated in the answer."),
)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What a request asks for, beside its tasks.

    ``is_oai``: the answer is in OpenAI's dialect. ``normalize``: norm, see :mod:`llamasrv.api.vectors`.
    ``dimensions``: values of a vector to keep; None: all.
    """

    is_oai: bool
    is_base64: bool
    normalize: int
    dimensions: int | None
    model: str


def build_embedding_tasks(
    context: ApiContext, data: Mapping[str, Any], ids: TaskIds, is_oai: bool
) -> tuple[EmbeddingRequest, list[Task]]:
    """One task per input. ``is_oai``: asked by OpenAI's route. Raises ApiError before anything is computed."""
    if is_oai and context.meta.pooling_type == POOLING_NONE:
        message = "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
        raise invalid_request(message)
    if "input" in data:
        prompt = data["input"]
    elif "content" in data:
        # no word of OpenAI's
        is_oai, prompt = False, data["content"]
    else:
        raise invalid_request('"input" or "content" must be provided')
    model = data.get("model")
    request = EmbeddingRequest(
        is_oai=is_oai,
        is_base64=_is_base64(data),
        normalize=_normalize(context, data),
        dimensions=_dimensions(context, data),
        model=model if isinstance(model, str) else context.meta.model_name,
    )
    prompts = _tokenize(context, prompt)
    check_sizes(context.meta, [len(tokens) for tokens in prompts], "input")
    params = TaskParams(embd_normalize=request.normalize)
    tasks = [Task(id=ids.new_id(), type=TaskType.EMBEDDING, tokens=tokens, params=params) for tokens in prompts]
    return request, tasks


def check_enabled(context: ApiContext) -> None:
    """Raises ApiError (501) if the server was not started for embeddings."""
    if not context.params["embedding"]:
        message = "This server does not support embeddings. Start it with `--embeddings`"
        raise ApiError(ErrorType.NOT_SUPPORTED, message)


def embeddings_json(request: EmbeddingRequest, results: Sequence[EmbeddingResult]) -> Any:
    """The answer; ``results`` in the order of the inputs."""
    if not request.is_oai:
        return [
            {"index": result.index, "embedding": [_values(request, vector) for vector in result.embedding]}
            for result in results
        ]
    n_tokens = sum(result.n_tokens for result in results)
    return {
        "model": request.model,
        "object": "list",
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        "data": [_entry(request, index, result) for index, result in enumerate(results)],
    }


def _entry(request: EmbeddingRequest, index: int, result: EmbeddingResult) -> dict[str, Any]:
    if request.is_base64:
        encoded = to_base64(embedding(result.embedding[0], request.normalize, request.dimensions))
        return {"embedding": encoded, "index": index, "object": "embedding", "encoding_format": "base64"}
    return {"embedding": _values(request, result.embedding[0]), "index": index, "object": "embedding"}


def _values(request: EmbeddingRequest, vector: Sequence[float]) -> list[float]:
    values: list[float] = embedding(vector, request.normalize, request.dimensions).tolist()
    return values


def _is_base64(data: Mapping[str, Any]) -> bool:
    name = data.get("encoding_format")
    if name is None:
        return False
    if name not in ("float", "base64"):
        raise invalid_request("The format to return the embeddings in. Can be either float or base64")
    return bool(name == "base64")


def _normalize(context: ApiContext, data: Mapping[str, Any]) -> int:
    value = data.get("embd_normalize")
    if value is None:
        value = context.params["embd_normalize"]
    try:
        kind = bounded_int(as_int(value), Limits(-INT32_MAX - 1, INT32_MAX))
    except FieldError as error:
        raise invalid_request(f"Field 'embd_normalize': {error}") from None
    # the vectors of single tokens stay as they are
    return NORM_NONE if context.meta.pooling_type == POOLING_NONE else kind


def _dimensions(context: ApiContext, data: Mapping[str, Any]) -> int | None:
    value = data.get("dimensions")
    if value is None:
        return None
    try:
        return bounded_int(as_int(value), Limits(1, context.meta.n_embd_out))
    except FieldError as error:
        raise invalid_request(f"Field 'dimensions': {error}") from None


def _tokenize(context: ApiContext, prompt: Any) -> list[list[int]]:
    if isinstance(prompt, list) and not any(is_token(item) for item in prompt):
        check_amount("input", prompt)
        prompts = [_tokenize_entry(context, item) for item in prompt]
    else:
        prompts = [_tokenize_entry(context, prompt)]
    if not prompts:
        raise invalid_request('"input" must not be empty')
    if not all(prompts):
        # a model without BOS makes nothing of an empty text
        raise invalid_request("Input content cannot be empty")
    return prompts


def _tokenize_entry(context: ApiContext, item: Any) -> list[int]:
    if isinstance(item, dict) and "content" in item:
        return context.vocab.tokenize(content_text(item["content"]), True, True)
    return tokenize_prompt(context.vocab, item)
