"""Sleeping: the model goes after a while without work and comes back for the next request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, patched
from talk import complete, wait_for, words


@pytest.fixture
def server(tiny_model_path: Path) -> Iterator[ServerProcess]:
    flags = ("-c", 2048, "-np", 2, "-t", 1, "--metrics", "--sleep-idle-seconds", 1)
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        yield server


def asleep(server: ServerProcess) -> bool:
    value: bool = server.get("/props").json()["is_sleeping"]
    return value


def wakes(server: ServerProcess) -> int:
    return server.log.count("server is exiting sleeping state")


def test_looking_neither_wakes_nor_keeps_awake(server: ServerProcess) -> None:
    complete(server, prompt="Once", n_predict=4, ignore_eos=True)
    deadline = time.monotonic() + 30
    while not asleep(server):
        assert time.monotonic() < deadline, "kept awake by looking"
        for path in ("/metrics", "/health", "/v1/models", "/models", "/props"):
            assert server.get(path).status == 200
        time.sleep(0.05)
    for _ in range(20):
        for path in ("/health", "/v1/models", "/models", "/props"):
            assert server.get(path).status == 200
        metrics = server.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(metrics.text)
            for sample in family.samples
        }
        assert values["llamacpp:tokens_predicted_total"] == 4
    assert values["llamacpp:predicted_tokens_seconds"] == 0
    assert asleep(server)
    assert wakes(server) == 0


#: Waking takes until the file that GATE names exists.
SLOW_WAKE = """
import os, time
from llamasrv.engine.server_context import ServerContext

load = ServerContext._load
n_loads = 0

def slow(params, progress=None):
    global n_loads
    n_loads += 1
    while n_loads > 1 and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.01)
    return load(params, progress)

ServerContext._load = staticmethod(slow)
"""


def test_many_requests_wake_it_once(tiny_model_path: Path, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    flags = ("-m", tiny_model_path, "-c", 2048, "-np", 2, "-t", 1, "--sleep-idle-seconds", 1)
    with (
        ServerProcess(*flags, command=patched(SLOW_WAKE), env={"GATE": str(gate)}) as server,
        ThreadPoolExecutor(10) as pool,
    ):
        wait_for(lambda: asleep(server))
        answers = [pool.submit(complete, server, prompt=f"Tale {i}", n_predict=4) for i in range(10)]
        # each of them keeps it awake from here on, so that it cannot fall asleep between two
        wait_for(lambda: len(server.get("/v1/requests").json()["data"]) == 10)
        gate.touch()
        assert len([answer.result() for answer in answers]) == 10
        assert wakes(server) == 1


def test_what_the_slots_held_survives_in_ram(server: ServerProcess) -> None:
    prompt = words(60)
    first = complete(server, prompt=prompt)
    wait_for(lambda: asleep(server))
    again = complete(server, prompt=prompt)
    assert again["timings"]["prompt_n"] == 1
    assert again["content"] == first["content"]


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"content": "Once"}), ("/detokenize", {"tokens": [5]}), ("/slots", None)]
)
def test_what_needs_the_model_wakes_it(server: ServerProcess, path: str, body: Any) -> None:
    wait_for(lambda: asleep(server))
    response = server.get(path) if body is None else server.post(path, body)
    assert response.status == 200
    assert wakes(server) == 1


def test_a_running_stream_is_no_idleness(tiny_model_path: Path) -> None:
    flags = ("-c", 2048, "-np", 1, "-t", 1, "--context-shift", "--sleep-idle-seconds", 1)
    body = {"prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": True}
    with ServerProcess("-m", tiny_model_path, *flags) as server, server.stream("/completion", body) as stream:
        frames = iter(stream)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            next(frames)
        assert not asleep(server)
        stream.hang_up()


def test_it_can_be_ended_while_asleep(server: ServerProcess) -> None:
    wait_for(lambda: asleep(server))
    assert server.stop() == 0


def test_adapters_keep_their_scales(tiny_models: dict[str, Path], tiny_model_path: Path) -> None:
    flags = ("-c", 1024, "-np", 1, "-t", 1, "--sleep-idle-seconds", 1, "--lora", tiny_models["tiny-lora-a"])
    with ServerProcess("-m", tiny_model_path, *flags) as server:
        assert server.post("/lora-adapters", [{"id": 0, "scale": 0.5}]).status == 200
        before = complete(server, prompt="Once upon a time", cache_prompt=False)["content"]
        wait_for(lambda: asleep(server))
        assert server.get("/lora-adapters").json()[0]["scale"] == 0.5
        assert complete(server, prompt="Once upon a time", cache_prompt=False)["content"] == before
        assert wakes(server) >= 1
