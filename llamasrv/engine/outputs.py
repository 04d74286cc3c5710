"""Results read from a computed prompt, without sampling."""

from __future__ import annotations

import itertools

import numpy as np

from llamasrv.engine.backend import Backend, BackendError
from llamasrv.engine.batch_builder import PromptPart
from llamasrv.engine.result import DecisionResult, EmbeddingResult, ErrorResult, RerankResult, Result
from llamasrv.engine.slot import Slot
from llamasrv.engine.task import Decision, Task, TaskType

#: llama_pooling_type
POOLING_NONE = 0


def read_output(backend: Backend, slot: Slot, parts: list[PromptPart], offset: int, end: int) -> Result:
    """Answer of a task without generation whose last prompt token is in the decoded batch entries [offset, end)."""
    task = slot.task
    assert task is not None
    if task.type is TaskType.DECISION:
        first = min(max(part.first, offset) for part in parts if part.slot is slot and part.last > offset)
        return _decision(backend, task, slot.i_batch - offset, first - offset)
    if task.type is TaskType.RERANK:
        vector = backend.embeddings_seq(slot.id) or backend.embeddings_ith(slot.i_batch - offset)
        score = vector[0] if vector else -1e6
        return RerankResult(id=task.id, index=task.index, score=score, n_tokens=task.n_tokens)
    missing = [0.0] * backend.n_embd_out
    if backend.pooling_type == POOLING_NONE:
        entries = [
            index - offset
            for part in parts
            if part.slot is slot
            for index in range(max(part.first, offset), min(part.last, end))
        ]
        vectors = [backend.embeddings_ith(index) or missing for index in entries]
    else:
        vectors = [backend.embeddings_seq(slot.id) or missing]
    return EmbeddingResult(id=task.id, index=task.index, embedding=vectors, n_tokens=task.n_tokens)


def _decision(backend: Backend, task: Task, last: int, first: int) -> Result:
    """``last``: entry of the last prompt token; ``first``: the first of this prompt in what was decoded with it."""
    decision = task.decision
    assert decision is not None
    try:
        if decision.labels:
            scores = _label_scores(backend, decision, last)
        elif decision.order:
            scores = backend.embeddings_at(range(first, first + decision.n_scores))[:, 0].tolist()
        else:
            # the prompt ends at entry ``last``
            scores = _marker_scores(backend, decision, last - task.n_tokens + 1, first)
    except BackendError as exc:
        return ErrorResult(id=task.id, index=task.index, message=str(exc))
    return DecisionResult(id=task.id, index=task.index, scores=scores, n_tokens=task.n_tokens)


def _label_scores(backend: Backend, decision: Decision, index: int) -> list[float]:
    logits: list[float] = backend.logits_at(index, decision.labels).tolist()
    if not decision.label_groups:
        return logits
    ends = list(itertools.accumulate(decision.label_groups))
    return [max(logits[end - size : end]) for end, size in zip(ends, decision.label_groups, strict=True)]


def _marker_scores(backend: Backend, decision: Decision, origin: int, first: int) -> list[float]:
    """``origin``: the entry that prompt position 0 has, or would have; entries before ``first`` are others'."""
    if origin + decision.first_read < first:
        raise BackendError("failed to get embeddings, the question and its options must fit in one batch")
    rows = backend.embeddings_at([origin + position for position in decision.markers])
    if decision.pointer < 0:
        column: list[float] = rows[:, decision.column].tolist()
        return column
    n = rows.shape[1] // 2
    query = backend.embeddings_at([origin + decision.pointer])[0, :n]
    products: list[float] = (rows[:, n : 2 * n] @ query / np.sqrt(np.float32(n))).tolist()
    return products
