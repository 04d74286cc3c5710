"""POST /rerank and its aliases, in the dialects of Jina (``documents``) and TEI (``texts``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.fields import INT32_MAX, FieldError, Limits, as_int, bounded_int
from llamasrv.api.openapi_schema import BOOLEAN, STRING, Member, array, integer
from llamasrv.api.prompt import MAX_PROMPTS, check_amount
from llamasrv.api.protocols import TaskIds, Vocab
from llamasrv.api.sizes import check_sizes
from llamasrv.engine.result import ErrorType, RerankResult
from llamasrv.engine.task import Task, TaskType

_PLACE = re.compile(r"\{(?:query|document)\}")


_TEXTS = array(STRING, minItems=1, maxItems=MAX_PROMPTS)
#: Members of a request. One of ``documents`` and ``texts`` has to be there.
MEMBERS = (
    Member("query", STRING, "What the documents are rated for.", True),
    Member("documents", _TEXTS, "The documents.", null=False),
    Member("texts", _TEXTS, "The documents, for an answer in TEI's dialect.", null=False),
    Member("top_n", integer(0, INT32_MAX), "Best documents to tell; all where it is absent."),
    Member("return_text", BOOLEAN, "TEI's dialect: repeats each document."),
    Member("model", STRING, "Repeated in the answer."),
)


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """What a request asks for, beside its tasks. ``return_text``: TEI's, each answer repeats its document."""

    is_tei: bool
    documents: list[str]
    top_n: int
    return_text: bool
    model: str


def build_rerank_tasks(context: ApiContext, data: Mapping[str, Any], ids: TaskIds) -> tuple[RerankRequest, list[Task]]:
    """One task per document. Raises ApiError before anything is computed."""
    if "query" not in data:
        raise invalid_request('"query" must be provided')
    query = data["query"]
    if not isinstance(query, str):
        raise invalid_request('"query" must be a string')
    is_tei = "texts" in data
    documents = _documents(data)
    model = data.get("model")
    return_text = data.get("return_text")
    request = RerankRequest(
        is_tei=is_tei,
        documents=documents,
        top_n=_top_n(data, len(documents)),
        return_text=is_tei and return_text is True,
        model=model if isinstance(model, str) else context.meta.model_name,
    )
    template = context.meta.rerank_template
    prompts = [rerank_prompt(context.vocab, template, query, document) for document in documents]
    check_sizes(context.meta, [len(tokens) for tokens in prompts], "document")
    return request, [Task(id=ids.new_id(), type=TaskType.RERANK, tokens=tokens) for tokens in prompts]


def check_enabled(context: ApiContext) -> None:
    """Raises ApiError (501) if the server was not started for reranking."""
    if not context.params["embedding"] or context.params["pooling_type"] != "rank":
        message = "This server does not support reranking. Start it with `--reranking`"
        raise ApiError(ErrorType.NOT_SUPPORTED, message)


def rerank_prompt(vocab: Vocab, template: str, query: str, document: str) -> list[int]:
    """Tokens of a query and a document, joined as the model knows it.

    ``template``: the model's own text with ``{query}`` and ``{document}``; empty: BOS query EOS SEP document EOS, of
    which the vocabulary's flags tell what is there.
    """
    if template:
        values = {"{query}": query, "{document}": document}
        return vocab.tokenize(_PLACE.sub(lambda match: values[match.group()], template), False, True)
    end = [vocab.eos if vocab.eos != -1 else vocab.sep] if vocab.add_eos else []
    return [
        *([vocab.bos] if vocab.add_bos else []),
        *vocab.tokenize(query, False, False),
        *end,
        *([vocab.sep] if vocab.add_sep else []),
        *vocab.tokenize(document, False, False),
        *end,
    ]


def rerank_json(request: RerankRequest, results: Sequence[RerankResult]) -> Any:
    """The answer, best documents first; ``results`` in the order of the documents."""
    name = "score" if request.is_tei else "relevance_score"
    ranked = sorted(results, key=lambda result: result.score, reverse=True)[: request.top_n]
    entries: list[dict[str, Any]] = [{"index": result.index, name: result.score} for result in ranked]
    if request.return_text:
        for entry in entries:
            entry["text"] = request.documents[entry["index"]]
    if request.is_tei:
        return entries
    n_tokens = sum(result.n_tokens for result in results)
    return {
        "model": request.model,
        "object": "list",
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        "results": entries,
    }


def _documents(data: Mapping[str, Any]) -> list[str]:
    """Of "documents" and "texts" the first that is a list of strings."""
    for name in ("documents", "texts"):
        value = data.get(name)
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            check_amount(name, value)
            return value
    raise invalid_request('"documents" must be a non-empty string array')


def _top_n(data: Mapping[str, Any], n_documents: int) -> int:
    value = data.get("top_n")
    if value is None:
        return n_documents
    try:
        return bounded_int(as_int(value), Limits(0, INT32_MAX))
    except FieldError as error:
        raise invalid_request(f"Field 'top_n': {error}") from None
