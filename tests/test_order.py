"""Who is served when: order of arrival, named slots, groups, and clients that leave."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from talk import all_idle, complete, metric, wait_for

from llamasrv.engine.queue import MAX_PASSED

#: A thread that has the number of its task may be late to post it, and others are served meanwhile.
LATE = 6


@pytest.fixture(scope="module")
def four(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_model_path, "-c", 4096, "-np", 4, "-kvu", "-t", 1, "--metrics") as server:
        yield server


@pytest.fixture(scope="module")
def single(tiny_model_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", tiny_model_path, "-c", 4096, "-np", 1, "-t", 1, "--metrics", "--context-shift") as server:
        yield server


def test_groups_and_named_slots_do_not_lock_up(four: ServerProcess) -> None:
    """Four requests at a time, each naming another slot and wanting two more, over and over."""

    def ask(number: int) -> Any:
        body = {"prompt": "Hello", "id_slot": number % 4, "n_cmpl": 3, "n_predict": 4}
        answers = complete(four, **body, temperature=1.0, seed=number)
        assert [answer["index"] for answer in answers] == [0, 1, 2]
        return [answer["generation_settings"]["seed"] for answer in answers]

    with ThreadPoolExecutor(4) as pool:
        for seeds in pool.map(ask, range(40)):
            assert len(set(seeds)) == 3
    assert all_idle(four)


@pytest.mark.parametrize("value", [0, -1, 5, 100_000])
def test_more_completions_than_slots_are_refused(four: ServerProcess, value: int) -> None:
    refused = four.post("/completion", {"prompt": "Hello", "n_cmpl": value})
    assert refused.status == 400
    assert "n_cmpl" in refused.json()["error"]["message"]


def test_a_group_whose_client_leaves_frees_all_its_slots(four: ServerProcess) -> None:
    body = {"prompt": "Hello", "n_cmpl": 4, "n_predict": 100_000, "ignore_eos": True, "stream": True}
    with four.stream("/completion", body) as stream:
        next(iter(stream))
        stream.hang_up()
    wait_for(lambda: all_idle(four))
    assert complete(four, prompt="Hello", n_predict=3, ignore_eos=True)["tokens_predicted"] == 3


def most_overtaken(server: ServerProcess, ask: Callable[[int], object]) -> int:
    """Four clients that ask anew as soon as they are answered: how many later tasks began before one of theirs."""
    n_before = len(started(server))
    stop = threading.Event()

    def client(number: int) -> None:
        while not stop.is_set():
            ask(number)

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        try:
            wait_for(lambda: len(started(server)) >= n_before + 80 or any(done.done() for done in clients))
        finally:
            stop.set()
        for done in clients:
            done.result()
    tasks = started(server)[n_before:]
    return max(sum(other > task for other in tasks[:place]) for place, task in enumerate(tasks))


def started(server: ServerProcess) -> list[int]:
    """Numbers of the tasks that got a slot, in that order; numbers are given by arrival."""
    return [int(number) for number in re.findall(r"launch_slot: id +\d+ \| task (\d+) \|", server.log)]


@pytest.mark.parametrize("named", [False, True])
def test_nobody_is_passed_over_under_steady_load(single: ServerProcess, named: bool) -> None:
    def ask(number: int) -> None:
        body: dict[str, Any] = {"prompt": f"Client {number}", "n_predict": 4, "ignore_eos": True}
        if named and number % 2:
            body["id_slot"] = 0
        complete(single, **body)

    # who names a slot may pass each of the two who name none so often
    allowed = 2 * MAX_PASSED if named else 0
    assert most_overtaken(single, ask) <= allowed + LATE


def test_no_embedding_is_passed_over_under_steady_load(tiny_models: dict[str, Path]) -> None:
    """Lists of inputs among single ones: a list takes the slot several times."""
    flags = ("--embeddings", "-c", 512, "-np", 1, "-t", 1)
    with ServerProcess("-m", tiny_models["tiny-embed"], *flags) as server:

        def ask(number: int) -> None:
            inputs = [f"Client {number}"] * (1 if number % 2 else 3)
            assert server.post("/v1/embeddings", {"input": inputs}).status == 200

        assert most_overtaken(server, ask) <= LATE


def test_waiting_requests_start_in_order_of_arrival(single: ServerProcess) -> None:
    n_before = len(started(single))
    body = {"prompt": "Long", "n_predict": -1, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(6) as pool:
        with single.stream("/completion", body) as busy:
            next(iter(busy))
            answers = []
            for number in range(6):
                answers.append(pool.submit(complete, single, prompt=f"Number {number}", n_predict=4))
                wait_for(lambda number=number: metric(single, "requests_deferred") == number + 1)
            busy.hang_up()
        for answer in answers:
            answer.result()
    order = started(single)[n_before:]
    assert len(order) == 7
    assert order == sorted(order)
