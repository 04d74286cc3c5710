"""Rerank requests: prompts of query and document, both dialects of the answer."""

from __future__ import annotations

from typing import Any

import pytest
from api_fakes import BOS, EOS, SEP, FakeIds, FakeServer, FakeVocab, server_meta, server_params

from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.api.rerank import build_rerank_tasks, check_enabled, rerank_json, rerank_prompt
from llamasrv.engine.result import RerankResult
from llamasrv.engine.task import TaskType

RANK = 4


def context(**params: Any) -> ApiContext:
    params = server_params(embedding=True, pooling_type="rank", **params)
    return ApiContext(FakeServer(params, server_meta(pooling_type=RANK, n_ubatch=32)))


def refused(data: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        build_rerank_tasks(context(), data, FakeIds())
    return caught.value


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [BOS, 1, 2]),
        ({"add_bos": False}, [1, 2]),
        ({"add_eos": True}, [BOS, 1, EOS, 2, EOS]),
        ({"add_sep": True}, [BOS, 1, SEP, 2]),
        ({"add_eos": True, "add_sep": True}, [BOS, 1, EOS, SEP, 2, EOS]),
        ({"add_eos": True, "eos": -1}, [BOS, 1, SEP, 2, SEP]),
    ],
)
def test_query_and_document_are_joined_as_the_vocabulary_says(flags: dict[str, Any], expected: list[int]) -> None:
    assert rerank_prompt(FakeVocab(**flags), "", "\1", "\2") == expected


def test_the_models_own_template_wins() -> None:
    vocab = FakeVocab(add_eos=True)
    assert rerank_prompt(vocab, "<s>{query}|{document}|{query}", "a", "b") == [BOS, *b"a|b|a"]
    # what the caller writes is no place to fill in
    assert rerank_prompt(vocab, "{query}|{document}", "{document}", "{query}") == [*b"{document}|{query}"]


def test_texts_of_callers_hold_no_special_tokens() -> None:
    assert rerank_prompt(FakeVocab(), "", "<s>", "</s>") == [BOS, *b"<s></s>"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"documents": ["a"]}, '"query" must be provided'),
        ({"query": None, "documents": ["a"]}, '"query" must be a string'),
        ({"query": 5, "documents": ["a"]}, '"query" must be a string'),
        *(
            ({"query": "q", "documents": documents}, '"documents" must be a non-empty string array')
            for documents in ([], None, 123, [1, 2, 3], ["a", 1], {}, "a")
        ),
        ({"query": "q"}, '"documents" must be a non-empty string array'),
        ({"query": "q", "texts": []}, '"documents" must be a non-empty string array'),
        ({"query": "q", "documents": ["a"], "top_n": "x"}, "Field 'top_n': type must be number, but is string"),
        ({"query": "q", "documents": ["a"], "top_n": -1}, "Field 'top_n': Value must be between 0 <= value"),
    ],
)
def test_mistakes_are_refused(data: dict[str, Any], message: str) -> None:
    error = refused(data)
    assert error.status == 400
    assert error.message.startswith(message)


def test_a_document_beyond_the_physical_batch_is_named() -> None:
    error = refused({"query": "q", "documents": ["short", "x" * 40]})
    assert (error.status, error.message) == (
        400,
        "document 1 (42 tokens) is too large to process. increase the physical batch size (current batch size: 32)",
    )


def test_servers_that_do_not_rank_say_so() -> None:
    for params in ({"embedding": False}, {"pooling_type": "mean"}):
        server = FakeServer(server_params(**{"embedding": True, "pooling_type": "rank", **params}))
        with pytest.raises(ApiError) as caught:
            check_enabled(ApiContext(server))
        assert caught.value.status == 501
        assert caught.value.message == "This server does not support reranking. Start it with `--reranking`"
    check_enabled(context())


def answer(data: dict[str, Any], scores: list[float]) -> Any:
    request, tasks = build_rerank_tasks(context(), data, FakeIds())
    assert {task.type for task in tasks} == {TaskType.RERANK}
    results = [
        RerankResult(id=task.id, index=index, score=score, n_tokens=task.n_tokens)
        for index, (task, score) in enumerate(zip(tasks, scores, strict=True))
    ]
    return rerank_json(request, results)


DOCUMENTS = ["a", "bb", "ccc"]


def test_jinas_dialect() -> None:
    assert answer({"query": "q", "documents": DOCUMENTS}, [0.5, 2.0, -1.0]) == {
        "model": "tiny",
        "object": "list",
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
        "results": [
            {"index": 1, "relevance_score": 2.0},
            {"index": 0, "relevance_score": 0.5},
            {"index": 2, "relevance_score": -1.0},
        ],
    }
    assert answer({"query": "q", "documents": ["a"], "model": "m"}, [1.0])["model"] == "m"


def test_teis_dialect() -> None:
    asked = {"query": "q", "texts": DOCUMENTS}
    assert answer(asked, [0.5, 2.0, -1.0])[0] == {"index": 1, "score": 2.0}
    assert answer({**asked, "return_text": True}, [0.5, 2.0, -1.0])[2] == {"index": 2, "score": -1.0, "text": "ccc"}
    # a word of this dialect only
    assert "text" not in answer({"query": "q", "documents": ["a"], "return_text": True}, [1.0])["results"][0]


@pytest.mark.parametrize(("top_n", "expected"), [(None, 3), (0, 0), (2, 2), (2.0, 2), (3, 3), (99, 3)])
def test_the_best_are_kept(top_n: Any, expected: int) -> None:
    for name in ("documents", "texts"):
        got = answer({"query": "q", name: DOCUMENTS, "top_n": top_n}, [1.0, 3.0, 2.0])
        entries = got if name == "texts" else got["results"]
        assert [entry["index"] for entry in entries] == [1, 2, 0][:expected]
    # all of them were read
    assert answer({"query": "q", "documents": DOCUMENTS, "top_n": 1}, [1.0, 3.0, 2.0])["usage"]["prompt_tokens"] == 12
