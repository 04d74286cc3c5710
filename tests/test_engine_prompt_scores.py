"""Log-probabilities of a prompt's own tokens: every position is read, whatever batches it was computed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_driver import never, run, running
from fake_backend import BOS, FakeBackend, FakeSpec, Fault

from llamasrv.engine.backend import DecodeStatus
from llamasrv.engine.prompt_scores import MAX_OUTPUTS
from llamasrv.engine.result import FinalResult, PartialResult, PromptTokenProb, Result
from llamasrv.engine.task import SamplingParams, Task, TaskParams, TaskType

PROMPT = [BOS, *(3 + (7 * i) % 40 for i in range(90))]
GREEDY = TaskParams(n_predict=3, sampling=SamplingParams(temp=0.0))

SPECS = {
    "unified": FakeSpec(),
    "split": FakeSpec(unified=False, n_ctx=1024),
    "small batches": FakeSpec(n_batch=8, n_ubatch=4),
    "one big batch": FakeSpec(n_batch=256, n_ubatch=256),
    "window": FakeSpec(n_swa=8, can_shift=False),
    "recurrent": FakeSpec(unified=False, recurrent=True, can_shift=False, n_ctx=1024),
}


def task(tokens: Sequence[int] = PROMPT, n_top: int = 2, params: TaskParams = GREEDY) -> Task:
    return Task(id=-1, type=TaskType.COMPLETION, tokens=list(tokens), prompt_logprobs=n_top, params=params)


def by_hand(spec: FakeSpec, tokens: Sequence[int], n_top: int = 2) -> list[PromptTokenProb]:
    """One token at a time."""
    backend = FakeBackend(spec)
    batch = backend.new_batch(1)
    out = []
    for position in range(len(tokens) - 1):
        batch.clear()
        batch.add(tokens[position], position, 0, True)
        assert backend.decode(batch, 0, 1, True, 1) == 0
        [(value, top)] = backend.logprobs([0], [tokens[position + 1]], n_top)
        out.append(PromptTokenProb(tokens[position + 1], value, top))
    return out


def finals(results: object) -> list[FinalResult]:
    assert isinstance(results, list), results
    return [result for result in results if isinstance(result, FinalResult)]


@pytest.mark.parametrize("name", SPECS)
def test_every_token_but_the_first_has_a_score(name: str) -> None:
    spec = SPECS[name]
    backend = FakeBackend(spec)
    with running(backend) as context:
        plain = finals(run(context, Task(id=-1, type=TaskType.COMPLETION, tokens=PROMPT, params=GREEDY)))[0]
        # the slot holds the whole prompt already
        scored = finals(run(context, task()))[0]
    assert scored.prompt_probs == by_hand(spec, PROMPT)
    assert (scored.content, scored.stop, scored.n_decoded) == (plain.content, plain.stop, plain.n_decoded)
    assert scored.n_prompt_tokens_cache == 0
    assert plain.prompt_probs == []
    assert backend.n_outputs_most <= spec.n_seq_max + MAX_OUTPUTS


def test_several_prompts_at_once_stay_within_the_outputs_of_a_batch() -> None:
    spec = FakeSpec(n_ctx=1024, n_batch=256, n_ubatch=256)
    backend = FakeBackend(spec)
    prompts = [[BOS, *PROMPT[i:]] for i in range(1, 5)]
    with running(backend) as context:
        results = finals(run(context, *(task(tokens) for tokens in prompts)))
    assert [result.prompt_probs for result in results] == [by_hand(spec, tokens) for tokens in prompts]
    assert MAX_OUTPUTS <= backend.n_outputs_most <= spec.n_seq_max + MAX_OUTPUTS


def test_completions_of_one_prompt_have_the_same_scores() -> None:
    spec = FakeSpec(n_ctx=1024)
    first = task()
    first.add_child(-1)
    first.add_child(-1)
    with running(FakeBackend(spec)) as context:
        results = finals(run(context, first))
    assert [result.prompt_probs for result in results] == [by_hand(spec, PROMPT)] * 3


def test_without_candidates_and_without_new_tokens() -> None:
    with running(FakeBackend(FakeSpec())) as context:
        [result] = finals(run(context, task(n_top=0, params=replace(GREEDY, n_predict=0))))
    assert result.prompt_probs == by_hand(FakeSpec(), PROMPT, 0)
    assert result.n_decoded == 0


def test_a_prompt_of_one_token_has_no_scores() -> None:
    with running(FakeBackend(FakeSpec())) as context:
        [result] = finals(run(context, task([BOS])))
    assert result.prompt_probs == []
    assert result.n_decoded > 0


@pytest.mark.parametrize("n_predict", [0, 3])
def test_a_stream_gets_them_once_before_the_first_token(n_predict: int) -> None:
    with running(FakeBackend(FakeSpec())) as context, context.reader() as reader:
        one = task(params=replace(GREEDY, n_predict=n_predict, stream=True))
        one.id = reader.new_id()
        reader.post_task(one)
        results: list[Result] = []
        while reader.has_next():
            result = reader.next(never)
            assert result is not None
            results.append(result)
    kinds = [
        "begin" if part.is_begin else "scores" if part.prompt_probs is not None else "token"
        for part in results
        if isinstance(part, PartialResult)
    ]
    assert kinds[:2] == ["begin", "scores"]
    assert set(kinds[2:]) <= {"token"}
    assert bool(kinds[2:]) == (n_predict > 0)
    assert isinstance(results[1], PartialResult)
    assert results[1].prompt_probs == by_hand(FakeSpec(), PROMPT)
    assert isinstance(results[-1], FinalResult)
    assert results[-1].prompt_probs == []


@pytest.mark.parametrize("status", [DecodeStatus.ABORTED, DecodeStatus.NO_KV_SPACE])
@pytest.mark.parametrize("name", ["unified", "recurrent", "window"])
def test_a_decode_that_is_tried_again_changes_nothing(name: str, status: DecodeStatus) -> None:
    spec = SPECS[name]
    backend = FakeBackend(spec)
    backend.faults.extend([Fault(status, 0), Fault(status, 0)])
    with running(backend) as context:
        [result] = finals(run(context, task()))
    assert result.prompt_probs == by_hand(spec, PROMPT)


def test_others_may_begin_with_a_scored_prompt() -> None:
    backend = FakeBackend(FakeSpec(n_ctx=1024))
    with running(backend) as context:
        run(context, task())
        plain = Task(id=-1, type=TaskType.COMPLETION, tokens=PROMPT, params=GREEDY)
        [after] = finals(run(context, plain))
    assert after.n_prompt_tokens_cache == len(PROMPT) - 1
