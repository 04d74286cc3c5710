"""Adapters: under which of them each token is computed, and what that means for reuse."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_driver import run, running
from fake_backend import BOS, FakeBackend, FakeSpec
from hypothesis import given
from hypothesis import strategies as st

from llamasrv.engine.adapters import Adapters, find_last, resolve
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.result import (
    ErrorResult,
    ErrorType,
    FinalResult,
    GetLoraResult,
    RerankResult,
    SlotSaveLoadResult,
)
from llamasrv.engine.server_context import ServerContext
from llamasrv.engine.task import SamplingParams, SlotAction, Task, TaskParams, TaskType

#: Adapters 0 and 1 are ordinary, 2 is an aLoRA.
INVOCATION = (40, 41)
SPEC = FakeSpec(n_ctx=400, n_batch=64, n_ubatch=16, invocation=INVOCATION)

BEFORE = [BOS, *(3 + (7 * i) % 30 for i in range(40))]
PROMPT = [*BEFORE, *INVOCATION, 5, 6, 7]
#: As in the original the adapter begins with the token before the invocation.
START = len(BEFORE) - 1

BASE, ORDINARY, ALORA = ((), ((0, 1.0),), ((2, 0.5),))


def complete(
    context: ServerContext, tokens: Sequence[int], lora: dict[int, float] | None, **fields: int
) -> FinalResult:
    params = TaskParams(n_predict=6, lora=lora, sampling=SamplingParams(temp=0.0))
    results = run(context, Task(id=-1, type=TaskType.COMPLETION, tokens=list(tokens), params=params, **fields))  # type: ignore[arg-type]
    assert isinstance(results, list), results
    [result] = results
    assert isinstance(result, FinalResult)
    return result


# -- the arithmetic


@pytest.mark.parametrize(
    ("scales", "tokens", "expected"),
    [
        ((0.0, 0.0, 0.0), PROMPT, Adapters((0.0, 0.0, 0.0))),
        ((1.0, 0.0, 0.0), PROMPT, Adapters((1.0, 0.0, 0.0))),
        ((0.0, 0.0, 0.5), PROMPT, Adapters((0.0, 0.0, 0.5), START)),
        ((0.0, 0.0, 0.5), BEFORE, Adapters((0.0, 0.0, 0.0))),
        ((0.0, 0.0, -0.5), PROMPT, Adapters((0.0, 0.0, -0.5), START)),
        # beside an ordinary adapter it is always on
        ((1.0, 0.0, 0.5), PROMPT, Adapters((1.0, 0.0, 0.5))),
        ((0.0, 0.0, 0.5), [40, 41, 5], Adapters((0.0, 0.0, 0.5), 0)),
        ((0.0, 0.0, 0.5), [5, 40, 41], Adapters((0.0, 0.0, 0.5), 0)),
        # the last occurrence counts, also one that begins like an earlier part of itself
        ((0.0, 0.0, 0.5), [40, 41, 5, 5, 40, 40, 41, 5], Adapters((0.0, 0.0, 0.5), 4)),
        ((0.0, 0.0, 0.5), [40, 5, 41], Adapters((0.0, 0.0, 0.0))),
    ],
)
def test_what_a_prompt_is_computed_under(scales: Sequence[float], tokens: Sequence[int], expected: Adapters) -> None:
    assert resolve(scales, [(), (), INVOCATION], tokens) == expected


def test_two_aloras_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="Cannot run multiple aLoRAs in a single request"):
        resolve((1.0, 1.0), [(1,), (2,)], [1, 2])


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=3))
def test_the_last_occurrence_is_found(tokens: list[int], wanted: list[int]) -> None:
    text = "".join(map(str, tokens))
    assert find_last(tokens, wanted) == text.rfind("".join(map(str, wanted)))


ADAPTERS = st.builds(
    lambda scales, start: Adapters(scales, start if any(scales) else 0),
    st.sampled_from([(0.0, 0.0), (1.0, 0.0), (0.0, 0.5)]),
    st.integers(0, 6),
)


@given(ADAPTERS, ADAPTERS)
def test_sequences_are_alike_as_long_as_every_token_is_computed_alike(a: Adapters, b: Adapters) -> None:
    expected = next((position for position in range(20) if a.at(position) != b.at(position)), 20)
    assert min(a.n_alike(b), 20) == min(b.n_alike(a), 20) <= expected
    if a.scales != b.scales or a == b:
        assert min(a.n_alike(b), 20) == expected


@given(ADAPTERS, st.integers(0, 8), st.integers(0, 8))
def test_removed_cells_move_the_start(adapters: Adapters, first: int, size: int) -> None:
    held = [adapters.at(position) for position in range(20)]
    del held[first : first + size]
    after = adapters.without(first, first + size)
    assert [after.at(position) for position in range(len(held))] == held


# -- in the engine


def test_cells_before_the_invocation_are_those_of_the_bare_model() -> None:
    backend = FakeBackend(SPEC)
    with running(backend) as context:
        complete(context, PROMPT, {2: 0.5}, id_slot=1)
        used = backend.adapters_of(1)
    assert used[:START] == [BASE] * START
    assert set(used[START:]) == {ALORA}


def test_a_prompt_without_invocation_is_one_of_the_bare_model() -> None:
    backend = FakeBackend(SPEC)
    with running(backend) as context:
        plain = complete(context, BEFORE, {}, id_slot=0)
        again = complete(context, BEFORE, {2: 0.5}, id_slot=0)
        assert again.content == plain.content
        assert again.n_prompt_tokens_cache == len(BEFORE) - 1
        assert set(backend.adapters_of(0)) == {BASE}


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("id_slot", [0, 1])
def test_the_bare_beginning_is_shared_with_the_bare_model(id_slot: int, kv_unified: bool) -> None:
    spec = FakeSpec(n_ctx=400, unified=kv_unified, invocation=INVOCATION)
    with running(FakeBackend(spec)) as context:
        expected = complete(context, PROMPT, {2: 0.5}, id_slot=3).content
    backend = FakeBackend(spec)
    with running(backend) as context:
        complete(context, PROMPT, {}, id_slot=0)
        under = complete(context, PROMPT, {2: 0.5}, id_slot=id_slot)
        assert under.content == expected
        assert under.n_prompt_tokens_cache == START
        # and back again
        bare = complete(context, PROMPT, {}, id_slot=id_slot)
        assert bare.n_prompt_tokens_cache >= START
        assert set(backend.adapters_of(id_slot)) == {BASE}


def test_another_scale_shares_only_the_bare_beginning() -> None:
    with running(FakeBackend(SPEC)) as context:
        complete(context, PROMPT, {2: 0.5}, id_slot=0)
        assert complete(context, PROMPT, {2: 0.5}, id_slot=0).n_prompt_tokens_cache == len(PROMPT) - 1
        assert complete(context, PROMPT, {2: 1.0}, id_slot=0).n_prompt_tokens_cache == START
        # a later invocation: what lies between the two was computed differently
        assert complete(context, [*PROMPT, *INVOCATION, 9], {2: 1.0}, id_slot=0).n_prompt_tokens_cache == START


def test_ordinary_adapters_share_nothing_with_the_bare_model() -> None:
    backend = FakeBackend(SPEC)
    with running(backend) as context:
        complete(context, PROMPT, {}, id_slot=0)
        assert complete(context, PROMPT, {0: 1.0}, id_slot=1).n_prompt_tokens_cache == 0
        assert set(backend.adapters_of(1)) == {ORDINARY}
        assert complete(context, PROMPT, {0: 0.5}, id_slot=0).n_prompt_tokens_cache == 0


def test_memory_that_cannot_drop_a_part_starts_over() -> None:
    backend = FakeBackend(FakeSpec(unified=False, recurrent=True, n_ctx=400, invocation=INVOCATION))
    with running(backend) as context:
        complete(context, PROMPT, {}, id_slot=0)
        assert complete(context, PROMPT, {2: 0.5}, id_slot=0).n_prompt_tokens_cache == 0
        assert backend.adapters_of(0)[START - 1 : START + 1] == [BASE, ALORA]


def test_a_saved_slot_remembers_where_the_adapter_begins(tmp_path: Path) -> None:
    backend = FakeBackend(SPEC)
    config = EngineConfig(n_parallel=4, kv_unified=True, lora=[0.0, 0.0, 0.5], share_prefix=False, cache_ram_mib=0)
    action = SlotAction(0, "a.bin", str(tmp_path / "a.bin"))
    with running(backend, config) as context:
        complete(context, PROMPT, None, id_slot=0)
        for type_, id_slot in ((TaskType.SLOT_SAVE, 0), (TaskType.SLOT_RESTORE, 1)):
            moved = SlotAction(id_slot, action.filename, action.filepath)
            results = run(context, Task(id=-1, type=type_, slot_action=moved))
            assert isinstance(results, list), results
            assert isinstance(results[0], SlotSaveLoadResult)
        # the bare model can use the beginning only
        assert complete(context, PROMPT, {}, id_slot=1).n_prompt_tokens_cache == START


def test_several_aloras_are_the_callers_mistake() -> None:
    class TwoAloras(FakeBackend):
        def adapter_infos(self):  # type: ignore[no-untyped-def]
            return super().adapter_infos()[-1:] * 2

    with running(TwoAloras(SPEC)) as context:
        params = TaskParams(lora={0: 1.0, 1: 1.0})
        error = run(context, Task(id=-1, type=TaskType.COMPLETION, tokens=PROMPT, params=params))
        assert isinstance(error, ErrorResult)
        assert error.type is ErrorType.INVALID_REQUEST
        assert error.message == "Cannot run multiple aLoRAs in a single request"
        assert complete(context, PROMPT, {0: 1.0}).n_decoded == 6


def test_a_prompt_in_one_piece_cannot_have_an_alora_in_the_middle() -> None:
    spec = FakeSpec(has_memory=False, n_batch=64, n_ubatch=64, pooling_type=4, invocation=INVOCATION)
    with running(FakeBackend(spec)) as context:
        rank = TaskParams(lora={2: 1.0})
        error = run(context, Task(id=-1, type=TaskType.RERANK, tokens=PROMPT, params=rank))
        assert isinstance(error, ErrorResult)
        assert error.type is ErrorType.INVALID_REQUEST
        results = run(context, Task(id=-1, type=TaskType.RERANK, tokens=BEFORE, params=rank))
        assert isinstance(results, list)
        assert isinstance(results[0], RerankResult)


def test_adapters_are_described() -> None:
    backend = FakeBackend(SPEC)
    config = EngineConfig(n_parallel=1, lora=[1.0, 0.0, 0.5])
    with running(backend, config) as context:
        [result] = run(context, Task(id=-1, type=TaskType.GET_LORA))  # type: ignore[misc]
        run(context, Task(id=-1, type=TaskType.SET_LORA, set_lora={1: 0.25}))
        [after] = run(context, Task(id=-1, type=TaskType.GET_LORA))  # type: ignore[misc]
    assert isinstance(result, GetLoraResult)
    assert isinstance(after, GetLoraResult)
    assert [info.scale for info in result.loras] == [1.0, 0.0, 0.5]
    # adapters left out are off
    assert [info.scale for info in after.loras] == [0.0, 0.25, 0.0]
    last = result.loras[2]
    assert (last.id, last.path, last.task_name, last.prompt_prefix) == (2, "alora.gguf", "task", "prefix")
    assert last.alora_invocation_tokens == list(INVOCATION)
    assert last.alora_invocation_string == b"".join(backend.piece(token, True) for token in INVOCATION)
    assert result.loras[0].alora_invocation_tokens == []


@pytest.mark.parametrize(("is_off", "expected"), [(True, [0.0, 0.0]), (False, [1.0, 0.5])])
def test_adapters_loaded_but_not_applied_are_off(is_off: bool, expected: list[float]) -> None:
    adapters = [{"path": "a", "scale": 1.0}, {"path": "b", "scale": 0.5}]
    config = EngineConfig.from_params({"lora_adapters": adapters, "lora_init_without_apply": is_off})
    assert config.lora == expected
