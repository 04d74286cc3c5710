"""Vectors of texts and the rating of documents."""

from __future__ import annotations

from typing import cast

from flask import Response, request

from llamasrv.api import embeddings, rerank
from llamasrv.api.context import ApiContext
from llamasrv.engine.result import EmbeddingResult, RerankResult
from llamasrv.http.body import request_object
from llamasrv.http.errors import json_response
from llamasrv.http.route import Route
from llamasrv.http.sse import Client
from llamasrv.http.state import ServerState
from llamasrv.http.waiting import results_of


def routes(state: ServerState, context: ApiContext) -> list[Route]:
    def embed(is_oai: bool) -> Response:
        embeddings.check_enabled(context)
        data = request_object()
        reader = state.reader()
        asked, tasks = embeddings.build_embedding_tasks(context, data, reader, is_oai)
        results = results_of(reader, tasks, Client(request.environ).is_gone)
        return json_response(embeddings.embeddings_json(asked, cast("list[EmbeddingResult]", results)))

    def rank() -> Response:
        rerank.check_enabled(context)
        data = request_object()
        reader = state.reader()
        asked, tasks = rerank.build_rerank_tasks(context, data, reader)
        results = results_of(reader, tasks, Client(request.environ).is_gone)
        return json_response(rerank.rerank_json(asked, cast("list[RerankResult]", results)))

    return [
        *(Route("POST", path, lambda: embed(False), needs_model=True) for path in ("/embedding", "/embeddings")),
        Route("POST", "/v1/embeddings", lambda: embed(True), needs_model=True),
        *(
            Route("POST", path, rank, needs_model=True)
            for path in ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
        ),
    ]
