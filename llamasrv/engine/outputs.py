"""Results read from a computed prompt, without sampling."""

from __future__ import annotations

from llamasrv.engine.backend import Backend
from llamasrv.engine.batch_builder import PromptPart
from llamasrv.engine.result import EmbeddingResult, RerankResult, Result
from llamasrv.engine.slot import Slot
from llamasrv.engine.task import TaskType

#: llama_pooling_type
POOLING_NONE = 0


def read_output(backend: Backend, slot: Slot, parts: list[PromptPart], offset: int, end: int) -> Result:
    """Answer of an EMBEDDING or RERANK task whose last prompt token is in batch entries [offset, end)."""
    task = slot.task
    assert task is not None
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
