"""KV memory end to end: sizes, shared prefixes, the RAM cache, checkpoints, context shift."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from talk import EXACT, all_idle, complete, joined, metric, slots, streamed, wait_for, words


def tokens_of(server: ServerProcess, text: str) -> int:
    return len(server.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"])


# -- sizes


@pytest.mark.parametrize(
    ("flags", "n_slots", "n_ctx"),
    [
        (("-c", "1024"), 4, 1024),  # automatic: four slots in one buffer
        (("-c", "1024", "-np", "4", "-no-kvu"), 4, 256),
        (("-c", "1000", "-np", "3", "-no-kvu"), 3, 512),  # each padded to 256
        (("-c", "1024", "-np", "2", "-kvu"), 2, 1024),
        (("-c", "1024", "-np", "2", "-kvu", "--kv-unified-per-slot", "300"), 2, 300),
        (("-np", "2", "-kvu", "--kv-unified-per-slot", "256"), 2, 256),
    ],
)
def test_each_slot_has_its_share_of_the_context(
    tiny_model_path: Path, flags: tuple[str, ...], n_slots: int, n_ctx: int
) -> None:
    with ServerProcess("-m", tiny_model_path, "-t", 1, *flags) as server:
        assert [slot["n_ctx"] for slot in slots(server)] == [n_ctx] * n_slots
        assert f"n_slots = {n_slots}, n_ctx_slot = {n_ctx}" in server.log
        too_long = server.post("/completion", {"prompt": [5] * n_ctx, "n_predict": 1})
        assert too_long.status == 400
        error = too_long.json()["error"]
        assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", n_ctx)


# -- prefixes of other slots


@pytest.fixture(scope="module", params=["unified", "split"])
def sharing(request: pytest.FixtureRequest, tiny_model_path: Path) -> Iterator[ServerProcess]:
    kind = "-kvu" if request.param == "unified" else "-no-kvu"
    flags = (*("-c", 8192, "-np", 4, kind), *("-t", 1, "--metrics", "-b", 64, "-ub", 64), *EXACT)
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def alone(tiny_model_path: Path) -> Iterator[ServerProcess]:
    """Each request on this server is a run of its own."""
    with ServerProcess("-m", tiny_model_path, "-c", 2048, "-np", 1, "-t", 1, "--cache-ram", 0, *EXACT) as server:
        yield server


def cold(alone: ServerProcess, **body: Any) -> str:
    content: str = complete(alone, cache_prompt=False, **body)["content"]
    return content


def test_a_prefix_is_taken_from_another_slot(sharing: ServerProcess, alone: ServerProcess) -> None:
    shared = words(150, seed=1)
    n_shared = tokens_of(sharing, shared)
    complete(sharing, prompt=shared + " first", id_slot=0)
    answer = complete(sharing, prompt=shared + " second end", id_slot=1)
    assert answer["timings"]["cache_n"] >= n_shared - 2
    assert answer["content"] == cold(alone, prompt=shared + " second end")
    # the giver still has all of its own
    again = complete(sharing, prompt=shared + " first", id_slot=0)
    assert again["timings"]["prompt_n"] <= 2
    assert again["content"] == cold(alone, prompt=shared + " first")


def test_a_prefix_that_is_still_computed_is_waited_for_and_computed_once(
    sharing: ServerProcess, alone: ServerProcess
) -> None:
    shared = words(180, seed=2)
    prompts = [f"{shared} number {i}" for i in range(4)]
    before = metric(sharing, "prompt_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: complete(sharing, prompt=prompt), prompts))
    computed = metric(sharing, "prompt_tokens_total") - before
    n_shared = tokens_of(sharing, shared)
    assert computed < 2 * n_shared
    assert sum(answer["timings"]["cache_n"] >= n_shared - 2 for answer in answers) >= 3
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["content"] == cold(alone, prompt=prompt)
        assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == answer["tokens_evaluated"]


def test_who_waits_for_a_prefix_starts_by_itself_when_the_donor_leaves(
    sharing: ServerProcess, alone: ServerProcess
) -> None:
    shared = words(200, seed=3)
    with sharing.stream("/completion", {"prompt": shared + " a", "n_predict": 500, "stream": True}) as donor:
        answers: list[Any] = []
        waiter = threading.Thread(target=lambda: answers.append(complete(sharing, prompt=shared + " b")))
        waiter.start()
        donor.hang_up()
        waiter.join()
    assert answers[0]["content"] == cold(alone, prompt=shared + " b")


def test_sharing_can_be_turned_off(tiny_model_path: Path) -> None:
    flags = ("-c", 4096, "-np", 2, "-kvu", "-t", 1, "--no-share-prefix", "--no-cache-idle-slots", "--cache-ram", 0)
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        shared = words(100, seed=4)
        complete(server, prompt=shared + " first", id_slot=0)
        assert complete(server, prompt=shared + " second", id_slot=1)["timings"]["cache_n"] == 0


def test_several_completions_of_one_prompt_compute_it_once(sharing: ServerProcess) -> None:
    prompt = words(150, seed=5)
    before = metric(sharing, "prompt_tokens_total")
    answers = complete(sharing, prompt=prompt, n_cmpl=3, temperature=1.0, seed=7)
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["generation_settings"]["seed"] for answer in answers}) == 3
    computed = metric(sharing, "prompt_tokens_total") - before
    assert computed + answers[0]["timings"]["cache_n"] == tokens_of(sharing, prompt)


def test_an_evicted_prompt_comes_back_from_the_ram_cache(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, "-c", 1024, "-np", 1, "-t", 1, "--cache-ram", 64, *EXACT) as server:
        prompt = words(100, seed=6)
        first = complete(server, prompt=prompt)
        complete(server, prompt=words(100, seed=7))
        again = complete(server, prompt=prompt)
        assert again["timings"]["prompt_n"] == 1
        assert again["content"] == first["content"]
        # a named slot asks the cache as well
        complete(server, prompt=words(100, seed=8), id_slot=0)
        assert complete(server, prompt=prompt, id_slot=0)["timings"]["prompt_n"] == 1


def test_the_cache_can_be_refused_for_one_request(sharing: ServerProcess) -> None:
    prompt = words(60, seed=9)
    complete(sharing, prompt=prompt)
    assert complete(sharing, prompt=prompt, cache_prompt=False)["timings"]["cache_n"] == 0


# -- memories that cannot go back


@pytest.mark.parametrize("name", ["tiny-swa", "tiny-mamba"])
def test_an_answer_after_a_checkpoint_equals_a_cold_run(tiny_models: dict[str, Path], name: str) -> None:
    model = tiny_models[name]
    flags = ("-c", 2048, "-np", 1, "-t", 1, "-b", 64, "-ub", 32, "--cache-ram", 0, *EXACT)
    base = words(90, seed=10)
    # so long that the window has left the base behind
    longer = base + words(120, seed=11)

    with ServerProcess("-m", model, *flags, "--checkpoint-min-step", 0) as server:
        complete(server, prompt=base, n_predict=1)
        complete(server, prompt=longer, n_predict=1)
        warm = complete(server, prompt=base + " quite another one here", n_predict=12)
        assert warm["timings"]["cache_n"] > 0
        cold = complete(server, prompt=base + " quite another one here", n_predict=12, cache_prompt=False)
        assert cold["timings"]["cache_n"] == 0
        assert warm["content"] == cold["content"]
    with ServerProcess("-m", model, *flags, "--ctx-checkpoints", 0) as server:
        complete(server, prompt=base, n_predict=1)
        complete(server, prompt=longer, n_predict=1)
        without = complete(server, prompt=base + " quite another one here", n_predict=12)
        assert without["timings"]["cache_n"] == 0
        assert without["content"] == cold["content"]


# -- a full context


def test_without_a_shift_a_full_context_ends_the_answer(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, "-c", 256, "-np", 1, "-t", 1) as server:
        answer = complete(server, prompt=words(40), n_predict=-1, ignore_eos=True)
        assert (answer["truncated"], answer["stop_type"]) == (True, "limit")
        assert answer["tokens_cached"] == 255


@pytest.mark.parametrize("values", [{}, {"n_keep": 5}, {"n_keep": -1}, {"n_discard": 7}, {"n_keep": 1_000_000}])
def test_with_a_shift_generation_goes_on(tiny_model_path: Path, values: dict[str, int]) -> None:
    flags = ("-c", 256, "-np", 2, "-kvu", "-t", 1, "--context-shift")
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        prompt = words(20, seed=11)
        n_prompt = tokens_of(server, prompt)
        answer = complete(server, prompt=prompt, n_predict=400, ignore_eos=True, **values)
        assert (answer["truncated"], answer["tokens_predicted"]) == (True, 400)
        assert answer["tokens_cached"] < 256
        assert n_prompt < 256
        assert complete(server, prompt="and on", n_predict=4)["tokens_predicted"] == 4


@pytest.mark.parametrize(
    "flags", [("-c", 512, "-no-kvu"), ("-c", 1024, "-kvu", "--kv-unified-per-slot", 256)], ids=["split", "unified"]
)
def test_each_of_several_completions_is_shifted_by_itself(tiny_model_path: Path, flags: tuple[Any, ...]) -> None:
    prompt = words(20, seed=11)
    body = {"prompt": prompt, "n_predict": 400, "ignore_eos": True, "n_keep": 4, "temperature": 0.8, "seed": 3}
    with ServerProcess("-m", tiny_model_path, "-np", 2, "-t", 1, "--context-shift", *flags, *EXACT) as server:
        answers = complete(server, n_cmpl=2, **body)
        assert [(answer["truncated"], answer["tokens_predicted"]) for answer in answers] == [(True, 400)] * 2
        for number, answer in enumerate(answers):
            alone = complete(server, cache_prompt=False, **{**body, "seed": 3 + number})
            assert alone["content"] == answer["content"]


def test_shared_cells_are_not_shifted(tiny_model_path: Path, alone: ServerProcess) -> None:
    """One of two who share a prefix outgrows the context; the other's text must not change."""
    flags = ("-c", 512, "-np", 2, "-kvu", "-t", 1, "--context-shift", "--no-cache-idle-slots", *EXACT)
    shared = words(60, seed=12)
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        complete(server, prompt=shared + " quiet", id_slot=0, n_predict=2)
        grown = complete(server, prompt=shared + " loud", id_slot=1, n_predict=600, ignore_eos=True, n_keep=3)
        assert grown["truncated"]
        wait_for(lambda: all_idle(server))
        kept = complete(server, prompt=shared + " quiet", id_slot=0)
        assert kept["content"] == cold(alone, prompt=shared + " quiet")


# -- prompts beside running streams


def test_a_running_stream_gets_tokens_while_a_long_prompt_is_computed(tiny_model_path: Path) -> None:
    """Counted in tokens: with a small bound the stream has one for each piece of the prompt."""
    seen = {}
    for gap in (1, 0):
        flags = ("-c", 8192, "-np", 2, "-kvu", "-t", 1, "--stream-gap", gap, "-b", 2048, "-ub", 512)
        with ServerProcess("-m", tiny_model_path, *flags) as server:
            body = {"prompt": "Once", "n_predict": 100_000, "stream": True, "ignore_eos": True}
            with server.stream("/completion", body) as stream:
                frames = iter(stream)
                next(frames)
                events = streamed(server, prompt=[7] * 2000, n_predict=1, return_progress=True)
                progress = [event for event in events if "prompt_progress" in event]
                seen[gap] = len(progress)
                stream.hang_up()
            wait_for(lambda server=server: all_idle(server))
    assert seen[0] <= 4
    assert seen[1] >= 20


def test_a_prompt_alone_gets_whole_batches(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, "-c", 8192, "-np", 2, "-t", 1, "--stream-gap", 1) as server:
        events = streamed(server, prompt=[7] * 2000, n_predict=1, return_progress=True)
        assert len([event for event in events if "prompt_progress" in event]) <= 3


def test_a_full_buffer_ends_the_largest_request_and_no_other(tiny_model_path: Path) -> None:
    flags = ("-c", 256, "-np", 2, "-kvu", "-t", 1, "--cache-ram", 0)
    with ServerProcess("-m", tiny_model_path, *flags) as server, ThreadPoolExecutor(2) as pool:
        large = pool.submit(
            server.post, "/completion", {"prompt": [9] * 150, "n_predict": -1, "ignore_eos": True, "temperature": 0}
        )
        # it may be over before it is seen
        wait_for(lambda: large.done() or any(slot["is_processing"] for slot in slots(server)))
        small = complete(server, prompt=[8] * 20, n_predict=150, ignore_eos=True)
        assert small["tokens_predicted"] == 150
        assert large.result().status in (200, 500)
        assert joined(streamed(server, prompt="again", n_predict=3, ignore_eos=True))
