"""Embedding requests: what is asked of the engine, what is refused, what comes back."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from api_fakes import BOS, FakeIds, FakeServer, FakeVocab, server_meta, server_params

from llamasrv.api.context import ApiContext
from llamasrv.api.embeddings import EmbeddingRequest, build_embedding_tasks, check_enabled, embeddings_json
from llamasrv.api.errors import ApiError
from llamasrv.engine.result import EmbeddingResult
from llamasrv.engine.task import Task, TaskType

MEAN, NONE = 1, 0


def context(pooling: int = MEAN, vocab: FakeVocab | None = None, **meta: Any) -> ApiContext:
    facts = server_meta(pooling_type=pooling, n_embd_out=4, **{"n_ubatch": 64, **meta})
    return ApiContext(FakeServer(server_params(embedding=True, embd_normalize=2), facts, vocab or FakeVocab()))


def build(
    data: dict[str, Any], is_oai: bool = True, of: ApiContext | None = None
) -> tuple[EmbeddingRequest, list[Task]]:
    return build_embedding_tasks(of or context(), data, FakeIds(), is_oai)


def refused(data: dict[str, Any], is_oai: bool = True, of: ApiContext | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        build(data, is_oai, of)
    return caught.value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        ("", [[BOS]]),
        ([1, 2], [[1, 2]]),
        ([1, "a", 2], [[1, 97, 2]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        (["a", [1, 2]], [[BOS, 97], [1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt_string": "a"}, [[BOS, 97]]),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [[BOS, 97, 98]]),
        (["a", {"content": [{"type": "text", "text": "b"}]}], [[BOS, 97], [BOS, 98]]),
    ],
)
def test_inputs_of_every_shape(value: Any, expected: list[list[int]]) -> None:
    request, tasks = build({"input": value})
    assert [task.tokens for task in tasks] == expected
    assert {task.type for task in tasks} == {TaskType.EMBEDDING}
    assert request.is_oai


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, '"input" or "content" must be provided'),
        ({"input": []}, '"input" must not be empty'),
        ({"input": True}, '"prompt" elements must be a string, a list of tokens'),
        ({"input": {}}, '"prompt" elements must be a string, a list of tokens'),
        ({"input": [-1]}, "Prompt contains invalid tokens"),
        ({"input": [[1, 2], [999]]}, "Prompt contains invalid tokens"),
        ({"input": {"content": "x"}}, '"content" must be an array'),
        ({"input": {"content": [{"type": "unknown"}]}}, "unsupported content[].type"),
        ({"input": {"content": ["x"]}}, "content[] must be an object, but is string"),
        ({"input": {"content": [{"type": "image_url"}]}}, "image input is not supported"),
        ({"input": {"content": [{"type": "input_audio"}]}}, "audio input is not supported"),
        ({"input": {"content": [{"type": "video_url"}]}}, "video input is not supported"),
        ({"input": "x", "encoding_format": "hex"}, "The format to return the embeddings in. Can be either float or"),
        ({"input": "x", "encoding_format": 1}, "The format to return the embeddings in. Can be either float or"),
        ({"input": "x", "dimensions": 0}, "Field 'dimensions': Value must be between 1 <= value <= 4, but got 0"),
        ({"input": "x", "dimensions": 5}, "Field 'dimensions': Value must be between 1 <= value <= 4, but got 5"),
        ({"input": "x", "dimensions": "2"}, "Field 'dimensions': type must be number, but is string"),
        ({"input": "x", "embd_normalize": "2"}, "Field 'embd_normalize': type must be number, but is string"),
        ({"input": "x", "embd_normalize": 2**40}, "Field 'embd_normalize': Value must be between"),
    ],
)
def test_mistakes_are_refused(data: dict[str, Any], message: str) -> None:
    error = refused(data)
    assert error.status == 400
    assert error.message.startswith(message)


def test_an_empty_text_without_bos_is_refused() -> None:
    of = context(vocab=FakeVocab(add_bos=False))
    assert refused({"input": ["a", ""]}, of=of).message == "Input content cannot be empty"


def test_an_input_beyond_the_physical_batch_is_named() -> None:
    error = refused({"input": ["short", "x" * 64]})
    assert error.status == 400
    assert error.message == (
        "input 1 (65 tokens) is too large to process. increase the physical batch size (current batch size: 64)"
    )
    assert len(build({"input": "x" * 63})[1]) == 1


@pytest.mark.parametrize(
    ("can_split", "n_fit", "message"), [(True, 510, "exceeds the available"), (False, 511, "is larger than")]
)
def test_an_input_beyond_the_context_is_named(can_split: bool, n_fit: int, message: str) -> None:
    of = context(n_ubatch=1000, can_split_embeddings=can_split)
    build({"input": "x" * n_fit}, of=of)
    error = refused({"input": ["x", "x", "x" * (n_fit + 1)]}, of=of)
    assert error.body()["error"]["type"] == "exceed_context_size_error"
    assert error.message.startswith(f"input 2 ({n_fit + 2} tokens) {message}")
    assert error.extra == {"n_prompt_tokens": n_fit + 2, "n_ctx": 512}


def test_splittable_inputs_may_exceed_the_physical_batch() -> None:
    assert len(build({"input": "x" * 200}, of=context(can_split_embeddings=True))[1]) == 1


def test_servers_without_embeddings_say_so() -> None:
    with pytest.raises(ApiError) as caught:
        check_enabled(ApiContext(FakeServer()))
    assert caught.value.status == 501
    assert caught.value.message == "This server does not support embeddings. Start it with `--embeddings`"
    check_enabled(context())


def test_vectors_of_tokens_are_not_for_openais_route() -> None:
    error = refused({"input": "x"}, of=context(NONE))
    assert (error.status, error.message) == (
        400,
        "Pooling type 'none' is not OAI compatible. Please use a different pooling type",
    )


def answer(data: dict[str, Any], *vectors: list[list[float]], is_oai: bool = True, of: ApiContext | None = None) -> Any:
    request, tasks = build(data, is_oai, of)
    results = [
        EmbeddingResult(id=task.id, index=index, embedding=vector, n_tokens=task.n_tokens)
        for index, (task, vector) in enumerate(zip(tasks, vectors, strict=True))
    ]
    return embeddings_json(request, results)


def test_openais_answer() -> None:
    got = answer({"input": ["a", "bc"], "model": "mine"}, [[3.0, 4.0, 0.0, 0.0]], [[0.0, 2.0, 0.0, 0.0]])
    assert got == {
        "model": "mine",
        "object": "list",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
        "data": [
            {"embedding": pytest.approx([0.6, 0.8, 0.0, 0.0]), "index": 0, "object": "embedding"},
            {"embedding": [0.0, 1.0, 0.0, 0.0], "index": 1, "object": "embedding"},
        ],
    }
    assert answer({"input": "a", "model": 5}, [[1.0] * 4])["model"] == "tiny"


def test_base64_answer() -> None:
    (entry,) = answer({"input": "a", "encoding_format": "base64"}, [[3.0, 4.0, 0.0, 0.0]])["data"]
    assert entry["encoding_format"] == "base64"
    assert struct.unpack("<4f", base64.b64decode(entry["embedding"])) == pytest.approx((0.6, 0.8, 0.0, 0.0))


def test_dimensions_cut_the_vector_and_give_it_its_length_back() -> None:
    (entry,) = answer({"input": "a", "dimensions": 2}, [[3.0, 4.0, 12.0, 0.0]])["data"]
    assert entry["embedding"] == pytest.approx([0.6, 0.8])
    (entry,) = answer({"input": "a", "dimensions": 2, "encoding_format": "base64"}, [[3.0, 4.0, 12.0, 0.0]])["data"]
    assert struct.unpack("<2f", base64.b64decode(entry["embedding"])) == pytest.approx((0.6, 0.8))


@pytest.mark.parametrize(("kind", "expected"), [(None, [0.6, 0.8]), (-1, [3.0, 4.0]), (1, [3 / 7, 4 / 7])])
def test_a_request_may_choose_its_norm(kind: int | None, expected: list[float]) -> None:
    got = answer({"input": "a", "embd_normalize": kind}, [[3.0, 4.0]], is_oai=False)
    assert got == [{"index": 0, "embedding": [pytest.approx(expected)]}]


def test_vectors_of_tokens_stay_as_they_are() -> None:
    got = answer({"input": "a", "embd_normalize": 2}, [[3.0, 4.0], [1.0, 0.0]], is_oai=False, of=context(NONE))
    assert got == [{"index": 0, "embedding": [[3.0, 4.0], [1.0, 0.0]]}]


def test_content_is_answered_in_the_native_dialect() -> None:
    assert isinstance(answer({"content": "a"}, [[1.0, 0.0]]), list)
    assert "data" in answer({"input": "a", "content": "b"}, [[1.0, 0.0]])
