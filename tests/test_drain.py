"""How a server ends: what runs may finish for a while, everything else is told at once."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, Stream, patched
from talk import SOON, Background, metric, wait_for, words

#: Far longer than any test may take: who waits for its end fails.
LONG_DRAIN = ("--drain-seconds", 600)
ENDLESS = {"prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": True}
FLAGS = ("-c", 2048, "-np", 1, "-t", 1, "--context-shift", "--metrics")


#: A decode takes at least 50 ms until the file that GATE names exists.
GATED_DECODE = """
import os, time
from llamasrv.engine.native import NativeBackend

decode = NativeBackend.decode

def gated(self, *args, **named):
    if not os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)
    return decode(self, *args, **named)

NativeBackend.decode = gated
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "open"


def gated_server(model: Path, gate: Path) -> ServerProcess:
    """A server that needs longer than any test for 1500 tokens, until the gate is opened."""
    return ServerProcess("-m", model, *FLAGS, *LONG_DRAIN, command=patched(GATED_DECODE), env={"GATE": str(gate)})


def end(server: ServerProcess) -> int:
    """Exit code after SIGTERM."""
    return server.stop(timeout=SOON)


def refuses(server: ServerProcess) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
    except OSError:
        return True
    return False


@contextlib.contextmanager
def running_stream(server: ServerProcess, **body: Any) -> Iterator[tuple[Stream, Iterator[Any]]]:
    """A stream that has begun, and the frames to come."""
    with server.stream("/completion", {**ENDLESS, **body}, timeout=SOON) as stream:
        frames = iter(stream)
        assert "content" in next(frames)
        yield stream, frames


def test_a_server_with_nothing_to_do_does_not_wait(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, *FLAGS, *LONG_DRAIN) as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON)
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        assert end(server) == 0
        assert idle.sock.recv(1) == b""
        idle.close()


def test_what_runs_may_finish_while_all_else_is_refused(tiny_model_path: Path, gate: Path) -> None:
    with gated_server(tiny_model_path, gate) as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON)
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        half = socket.create_connection(("127.0.0.1", server.port), timeout=SOON)
        half.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with running_stream(server, n_predict=1500) as (_, frames):
            queued = [
                Background(lambda body=body: server.post("/completion", body, timeout=SOON))
                for body in ({"prompt": "b"}, {"prompt": "c", "stream": True})
            ]
            wait_for(lambda: metric(server, "requests_deferred") == 2)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: refuses(server))
            for waiting in queued:
                answer = waiting.get()
                assert answer.status == 503
                assert answer.json()["error"]["type"] == "unavailable_error"
            assert kept.sock.recv(1) == b""
            half.sendall(b"\r\n")
            assert b" 503 " in half.recv(1000)
            gate.touch()
            last = list(frames)[-1]
        assert last["stop"] is True
        assert last["tokens_predicted"] == 1500
        assert server.process.wait(SOON) == 0
        kept.close()
        half.close()


def test_a_plain_answer_under_way_is_given(tiny_model_path: Path, gate: Path) -> None:
    with gated_server(tiny_model_path, gate) as server:
        body = {"prompt": ["Once", "Twice"], "n_predict": 1500, "ignore_eos": True}
        answer = Background(lambda: server.post("/completion", body, timeout=SOON))
        wait_for(lambda: metric(server, "requests_processing") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: refuses(server))
        gate.touch()
        assert server.process.wait(SOON) == 0
        # both prompts belong to a request that has started
        assert [part["tokens_predicted"] for part in answer.get().json()] == [1500, 1500]


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000, "ignore_eos": True, "stream": True}
DIALECTS = [
    ("/completion", ENDLESS, "data: "),
    ("/v1/completions", {**ENDLESS, "max_tokens": 100_000}, "data: "),
    ("/v1/chat/completions", CHAT, "data: "),
    # knows no ignore_eos: greedily the tiny model never comes to an end
    ("/v1/messages", {**CHAT, "temperature": 0, "top_k": 1}, "event: error"),
    (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 100_000, "ignore_eos": True, "stream": True},
        "event: error",
    ),
]


def after_the_drain(model: Path) -> tuple[bool, list[tuple[list[str], Any]], int]:
    """Whether the server ended before it was out of time; lines and last frame of each stream; status of a plain one.

    The streams are read side by side: a worker has to hand over all that came before its last words.
    """
    flags = ("-m", model, "-c", 8192, "-np", 6, "-t", 1, "--context-shift", "--drain-seconds", 0.5)
    with ServerProcess(*flags) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(server.stream(path, body, timeout=SOON)) for path, body, _ in DIALECTS]
        plain = Background(lambda: server.post("/completion", {**ENDLESS, "stream": False}, timeout=SOON).status)
        readers = [Background(lambda stream=stream: list(stream)[-1]) for stream in streams]
        wait_for(lambda: sum(slot["is_processing"] for slot in server.get("/slots").json()) == 6)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON) == 0
        if "did not end in time" in server.log:
            return False, [], 0
        return (
            True,
            [(stream.lines, reader.get()) for stream, reader in zip(streams, readers, strict=True)],
            plain.get(),
        )


def test_after_the_drain_every_dialect_is_told_in_its_own_words(tiny_model_path: Path) -> None:
    for _ in range(5):  # a machine that is too busy for the limit of time says nothing about words
        in_time, ends, status = after_the_drain(tiny_model_path)
        if in_time:
            break
    assert in_time
    assert status == 503
    for (path, _, marker), (lines, last) in zip(DIALECTS, ends, strict=True):
        assert last["error"]["type"] == "unavailable_error", path
        assert "shutting down" in last["error"]["message"], path
        name = lines[-2] if marker.startswith("event") else lines[-1]
        assert name.startswith(marker), path


def test_without_a_drain_it_ends_at_once(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, *FLAGS, env={"LLAMASRV_DRAIN_SECONDS": "0"}) as server:
        with running_stream(server) as (_, frames):
            server.process.send_signal(signal.SIGTERM)
            assert list(frames)[-1]["error"]["code"] == 503
        assert server.process.wait(SOON) == 0


def test_a_second_signal_ends_a_drain(tiny_model_path: Path) -> None:
    flags = ("-m", tiny_model_path, *FLAGS, *LONG_DRAIN)
    with ServerProcess(*flags, command=patched("")) as server, running_stream(server):
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: refuses(server))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON) == 1


def test_a_stream_that_lost_its_client_is_ended_with_the_drain_and_so_are_its_readers(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, *FLAGS, "--drain-seconds", 1) as server:
        with server.stream("/completion", ENDLESS, {"X-Conversation-Id": "left"}) as stream:
            next(iter(stream))
            stream.hang_up()
        reader = server._request("GET", "/v1/stream?conv_id=left", None, None, SOON)
        frames = iter(reader)
        next(frames)
        server.process.send_signal(signal.SIGTERM)
        assert list(frames)[-1]["error"]["type"] == "unavailable_error"
        assert server.process.wait(SOON) == 0
        reader.hang_up()


@pytest.mark.slow
def test_a_long_prompt_is_left_when_the_drain_is_over(demo_model_path: Path) -> None:
    flags = ("-m", demo_model_path, "-c", 8192, "-np", 1, "-t", 1, "-b", 2048, "-ub", 2048, "--metrics")
    with ServerProcess(*flags, "--drain-seconds", 1) as server:
        body = {"prompt": words(1200)}
        answer = Background(lambda: server.post("/completion", body, timeout=2 * SOON))
        wait_for(lambda: metric(server, "requests_processing") == 1)
        assert end(server) == 0
        assert answer.get().status == 503
        assert "shutting down" in answer.get().text


# -- states in which the main thread cannot look

#: Wait in C for a mutex that the thread itself holds: no signal ends that.
STUCK = """
import ctypes

def get_stuck():
    print("stuck", flush=True)
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""

STUCK_DECODE = """
from llamasrv.engine.native import NativeBackend

decode = NativeBackend.decode

def stuck(self, batch, offset, n_tokens, *rest, **named):
    if n_tokens > 100:
        get_stuck()
    return decode(self, batch, offset, n_tokens, *rest, **named)

NativeBackend.decode = stuck
"""


def test_a_main_thread_that_never_returns_is_left_behind_after_the_drain(tiny_model_path: Path) -> None:
    command = patched(STUCK + STUCK_DECODE)
    with ServerProcess("-m", tiny_model_path, *FLAGS, "--drain-seconds", 1, command=command) as server:
        answer = Background(lambda: server.post("/completion", {"prompt": words(150)}, timeout=SOON))
        wait_for(lambda: "stuck" in server.log)
        assert end(server) == 0
        assert answer.get().status == 503
        assert "the server did not end in time, leaving" in server.log


#: As warm-up and the making of a context are: nothing asks whether to go on.
STUCK_LOAD = """
from llamasrv.engine.server_context import ServerContext

def load_model(self, params, progress=None, options=None):
    get_stuck()

ServerContext.load_model = load_model
"""


def test_a_start_that_nothing_interrupts_does_not_keep_the_process(tiny_model_path: Path) -> None:
    server = ServerProcess("-m", tiny_model_path, *LONG_DRAIN, command=patched(STUCK + STUCK_LOAD))
    try:
        server.start(wait=False)
        wait_for(lambda: "stuck" in server.log)
        assert end(server) == 0
    finally:
        server.kill()


#: Loading the model again takes for ever, unless it is told to stop.
SLOW_WAKE = """
import time
from llamasrv.engine.server_context import LoadError, ServerContext

load = ServerContext._load
n_loads = 0

def slow(params, progress=None):
    global n_loads
    n_loads += 1
    if n_loads == 1:
        return load(params, progress)
    print("waking", flush=True)
    while progress is None or progress(0.5):
        time.sleep(0.01)
    raise LoadError("loading was stopped")

ServerContext._load = staticmethod(slow)
"""


def test_a_server_that_wakes_up_ends_and_tells_those_who_woke_it(tiny_model_path: Path) -> None:
    flags = ("-m", tiny_model_path, *FLAGS, *LONG_DRAIN, "--sleep-idle-seconds", 1)
    with ServerProcess(*flags, command=patched(SLOW_WAKE)) as server:
        wait_for(lambda: server.get("/props").json()["is_sleeping"])
        answer = Background(lambda: server.post("/completion", {"prompt": "a"}, timeout=SOON))
        wait_for(lambda: "waking" in server.log)
        assert end(server) == 0
        assert answer.get().status == 503


def test_a_sleeping_server_ends(tiny_model_path: Path) -> None:
    with ServerProcess("-m", tiny_model_path, *FLAGS, *LONG_DRAIN, "--sleep-idle-seconds", 1) as server:
        wait_for(lambda: server.get("/props").json()["is_sleeping"])
        assert end(server) == 0
        assert server.log.count("exiting sleeping state") == 0


#: Saving a slot takes a while.
SLOW_SAVE = """
import time
from llamasrv.engine.native import NativeBackend

save = NativeBackend.state_save_file

def slow(self, *args):
    print("saving", flush=True)
    time.sleep(2)
    return save(self, *args)

NativeBackend.state_save_file = slow
"""


def test_a_slot_file_under_way_is_finished(tiny_model_path: Path, tmp_path: Path) -> None:
    flags = ("-m", tiny_model_path, *FLAGS, *LONG_DRAIN, "--slot-save-path", tmp_path)
    with ServerProcess(*flags, command=patched(SLOW_SAVE)) as server:
        assert server.post("/completion", {"prompt": words(50), "n_predict": 1}).status == 200
        save = {"filename": "a.bin"}
        first = Background(lambda: server.post("/slots/0?action=save", save, timeout=SOON))
        wait_for(lambda: "saving" in server.log)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON) == 0
        assert first.get().status == 200
        assert (tmp_path / "a.bin").stat().st_size == first.get().json()["n_written"]


#: A batch of embeddings takes a while.
SLOW_BATCH = """
import time
from llamasrv.engine.native import NativeBackend

decode = NativeBackend.decode

def slow(self, *args, **named):
    print("computing", flush=True)
    time.sleep(2)
    return decode(self, *args, **named)

NativeBackend.decode = slow
"""


def test_an_embedding_batch_under_way_is_finished_and_the_next_refused(tiny_models: dict[str, Path]) -> None:
    flags = ("-m", tiny_models["tiny-embed"], "--embedding", "-np", 1, "-t", 1, "--metrics", *LONG_DRAIN)
    with ServerProcess(*flags, command=patched(SLOW_BATCH)) as server:
        first = Background(lambda: server.post("/embedding", {"content": "a"}, timeout=SOON))
        wait_for(lambda: "computing" in server.log)
        second = Background(lambda: server.post("/embedding", {"content": "b"}, timeout=SOON))
        assert end(server) == 0
        assert first.get().status == 200
        answer = second.get()
        assert isinstance(answer, OSError) or answer.status == 503
