"""Decision tasks: what is read where, and what may be in one batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from engine_driver import run, running
from fake_backend import BOS, FakeBackend, FakeSpec

from llamasrv.engine.config import EngineConfig
from llamasrv.engine.result import DecisionResult, ErrorResult, ErrorType
from llamasrv.engine.task import Decision, Task, TaskType

ENCODER = FakeSpec(has_memory=False, n_batch=64, n_ubatch=64)
DECODER = FakeSpec(n_batch=16, n_ubatch=8, n_embd_out=4)
RECURRENT = FakeSpec(unified=False, recurrent=True)
SPLIT = FakeSpec(unified=False)

PROMPT = [BOS, *(3 + (7 * i) % 40 for i in range(30))]


def task(decision: Decision, tokens: Sequence[int] = PROMPT, **fields: object) -> Task:
    return Task(id=-1, type=TaskType.DECISION, tokens=list(tokens), decision=decision, **fields)  # type: ignore[arg-type]


def scores(results: object) -> list[list[float]]:
    assert isinstance(results, list), results
    assert all(isinstance(result, DecisionResult) for result in results)
    return [result.scores for result in results]


def by_hand(spec: FakeSpec, tokens: Sequence[int], labels: Sequence[int] = ()) -> np.ndarray:
    """Embeddings of every position, or the logits of these tokens at the last, by the plainest possible loop."""
    backend = FakeBackend(spec)
    backend.set_embeddings(not labels)
    batch = backend.new_batch(len(tokens))
    if spec.has_memory:
        rows = []
        for position, token in enumerate(tokens):
            batch.clear()
            batch.add(token, position, 0, True)
            assert backend.decode(batch, 0, 1, True, 1) == 0
            rows.append(backend.logits_at(0, labels) if labels else backend.embeddings_at([0])[0])
        return rows[-1] if labels else np.array(rows)
    batch.extend(tokens, 0, 0, True)
    assert backend.decode(batch, 0, len(tokens), True, 1) == 0
    return backend.embeddings_at(range(len(tokens)))


def test_labels_are_logits_at_the_end_of_the_prompt() -> None:
    expected = by_hand(DECODER, PROMPT, labels=(5, 9, 7))
    with running(FakeBackend(DECODER)) as context:
        assert scores(run(context, task(Decision(labels=(5, 9, 7))))) == [pytest.approx(expected.tolist())]


def test_of_a_group_of_labels_the_best_counts() -> None:
    logits = by_hand(DECODER, PROMPT, labels=(5, 9, 7, 8)).tolist()
    with running(FakeBackend(DECODER)) as context:
        results = run(context, task(Decision(labels=(5, 9, 7, 8), label_groups=(1, 3))))
    assert scores(results) == [pytest.approx([logits[0], max(logits[1:])])]


@pytest.mark.parametrize("spec", [ENCODER, DECODER])
def test_markers_are_one_column_of_the_embeddings(spec: FakeSpec) -> None:
    expected = by_hand(spec, PROMPT)
    with running(FakeBackend(spec)) as context:
        for _ in range(2):
            # the second time most of the prompt is known, but what is read has to be computed again
            results = run(context, task(Decision(markers=(20, 25, 29), column=2)))
            assert scores(results) == [pytest.approx([expected[i][2] for i in (20, 25, 29)])]


def test_a_pointer_is_compared_with_each_marker() -> None:
    rows = by_hand(DECODER, PROMPT)
    expected = [float(rows[30][:2] @ rows[i][2:]) / 2**0.5 for i in (18, 22)]
    with running(FakeBackend(DECODER)) as context:
        results = run(context, task(Decision(markers=(18, 22), pointer=30)))
    assert scores(results) == [pytest.approx(expected)]


def test_what_is_read_comes_out_of_one_batch() -> None:
    backend = FakeBackend(DECODER)
    # 31 tokens in batches of 16: the second batch has to begin at 17 at the latest
    with running(backend) as context:
        run(context, task(Decision(markers=(17, 30))))
    by_call = itertools.groupby(backend.log, key=lambda entry: entry.serial)
    positions = [[entry.pos for entry in entries] for _, entries in by_call]
    assert positions[-1][0] <= 17
    assert positions[-1][-1] == 30


def test_markers_further_apart_than_a_batch_are_refused() -> None:
    with running(FakeBackend(DECODER)) as context:
        error = run(context, task(Decision(markers=(14, 29))))
    assert isinstance(error, ErrorResult)
    assert error.type is ErrorType.INVALID_REQUEST
    assert error.message == (
        "the question and its options (17 tokens) are too large to process. increase the batch size "
        "(current batch size: 16)"
    )


def test_an_encoder_takes_the_prompt_in_one_piece() -> None:
    with running(FakeBackend(ENCODER)) as context:
        error = run(context, task(Decision(markers=(1,)), [BOS, *([5] * 64)]))
    assert isinstance(error, ErrorResult)
    assert (error.type, "65 tokens" in error.message) == (ErrorType.INVALID_REQUEST, True)


def test_a_joint_head_has_the_batch_for_itself() -> None:
    backend = FakeBackend(ENCODER)
    seen: list[tuple[set[int], dict[int, int]]] = []
    decode = backend.decode

    def spy(batch, offset, n_tokens, sync, serial):  # type: ignore[no-untyped-def]
        seen.append(({entry[2] for entry in batch.entries}, dict(batch.orders)))
        return decode(batch, offset, n_tokens, sync, serial)

    backend.decode = spy  # type: ignore[method-assign]
    order = (0, 1, 1, 0, 4, 0, 4)
    joint = Decision(order=order, n_scores=2)
    rows = by_hand(ENCODER, PROMPT[:7])
    with running(backend) as context:
        results = run(context, *(task(joint, PROMPT[:7]) for _ in range(3)))
    assert scores(results) == [pytest.approx(rows[:2, 0].tolist())] * 3
    assert [len(slots) for slots, _ in seen] == [1, 1, 1]
    assert [orders for _, orders in seen] == [{1: 1, 2: 1, 4: 4, 6: 4}] * 3


@pytest.mark.parametrize("spec", [DECODER, SPLIT, RECURRENT], ids=["unified", "split", "recurrent"])
def test_a_shared_beginning_is_computed_once(spec: FakeSpec) -> None:
    backend = FakeBackend(spec)
    prompts = [[*PROMPT[:20], *(3 + k + i for i in range(5))] for k in range(4)]
    decision = Decision(labels=(5, 9))
    expected = [by_hand(spec, tokens, (5, 9)).tolist() for tokens in prompts]
    for _ in range(2):
        with running(backend) as context:
            parent = task(decision, prompts[0], n_tokens_shared=20)
            parent.child_tasks = [task(decision, tokens) for tokens in prompts[1:]]
            results = run(context, parent)
            assert scores(results) == [pytest.approx(row) for row in expected]
            assert sum(entry.pos < 20 for entry in backend.log) == 20
            assert context.metrics.n_prompt_cached == 60
        backend = FakeBackend(spec)


@pytest.mark.parametrize("spec", [DECODER, SPLIT], ids=["unified", "split"])
def test_a_beginning_that_the_parent_holds_already_goes_to_the_children(spec: FakeSpec) -> None:
    config = EngineConfig(
        n_parallel=4, kv_unified=spec.unified, share_prefix=False, cache_idle_slots=False, cache_ram_mib=0
    )
    backend = FakeBackend(spec)
    with running(backend, config) as context:
        found = []
        for _ in range(2):
            parent = task(Decision(labels=(5, 9)), n_tokens_shared=20)
            parent.child_tasks = [task(Decision(labels=(5, 9)), [*PROMPT[:20], 3 + k]) for k in range(3)]
            found.append(scores(run(context, parent)))
    assert found[0] == found[1]
    assert sum(entry.pos < 20 for entry in backend.log) == 20


def test_a_group_whose_parent_is_refused_ends_and_leaves_the_slots_free() -> None:
    decision = Decision(labels=(5,))
    with running(FakeBackend(SPLIT)) as context:
        parent = task(decision, PROMPT * 3, n_tokens_shared=20)
        parent.child_tasks = [task(decision, PROMPT) for _ in range(3)]
        error = run(context, parent)
        assert isinstance(error, ErrorResult)
        assert error.type is ErrorType.EXCEED_CONTEXT_SIZE
        parent = task(decision, PROMPT, n_tokens_shared=20)
        parent.child_tasks = [task(decision, PROMPT) for _ in range(3)]
        first, *others = scores(run(context, parent))
        assert others == [first] * 3
