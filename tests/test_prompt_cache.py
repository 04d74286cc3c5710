"""Which states the RAM cache keeps."""

from __future__ import annotations

import pytest

from llamasrv.engine.adapters import Adapters
from llamasrv.engine.prompt import Prompt
from llamasrv.engine.prompt_cache import PromptCache


def save(cache: PromptCache, n_tokens: int, n_exact: int | None = None) -> bool:
    prompt = Prompt(list(range(n_tokens)), n_exact=n_exact)
    return cache.save(prompt, Adapters(), 10, lambda: b"0123456789")


def kept(cache: PromptCache) -> list[tuple[int, int | None]]:
    return [(state.prompt.n_tokens, state.prompt.n_exact) for state in cache.states]


def test_a_prompt_that_is_held_is_not_saved_again() -> None:
    cache = PromptCache(-1, 0)
    assert save(cache, 20)
    assert not save(cache, 15)
    assert not save(cache, 20)
    assert kept(cache) == [(20, None)]


def test_a_longer_prompt_takes_the_place_of_its_beginning() -> None:
    cache = PromptCache(-1, 0)
    assert save(cache, 15)
    assert save(cache, 20)
    assert kept(cache) == [(20, None)]


def test_moved_cells_do_not_stand_for_exact_ones() -> None:
    cache = PromptCache(-1, 0)
    assert save(cache, 20, n_exact=5)
    assert save(cache, 15)
    assert kept(cache) == [(15, None)]


def test_moved_cells_do_not_displace_exact_ones() -> None:
    cache = PromptCache(-1, 0)
    assert save(cache, 15)
    assert not save(cache, 20, n_exact=5)
    assert kept(cache) == [(15, None)]


@pytest.mark.parametrize("n_exact", [0, 5])
def test_the_same_moved_cells_are_not_saved_twice(n_exact: int) -> None:
    cache = PromptCache(-1, 0)
    save(cache, 20, n_exact=n_exact)
    assert not save(cache, 20, n_exact=n_exact)
    assert len(cache.states) <= 1
