"""Whoever watches a server is answered at once, whatever it is doing."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, patched
from talk import SOON, Background, metric, wait_for, words

WATCHED: list[tuple[str, str, Any]] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/props", None),
    ("GET", "/metrics", None),
    ("GET", "/slots", None),
    ("GET", "/v1/requests", None),
    ("POST", "/tokenize", {"content": "Once"}),
]

#: A call of the native side, named by its method, comes back only once the file that GATE names exists.
GATED = """
import os, time
from llamasrv.engine.native import NativeBackend

method = getattr(NativeBackend, {method!r})

def gated(self, *args, **named):
    if {method!r} != "decode" or args[2] > 100:
        print("inside", flush=True)
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
    return method(self, *args, **named)

NativeBackend.{method} = gated
"""


def gated(method: str) -> tuple[str, ...]:
    return patched(GATED.format(method=method))


def watch(server: ServerProcess) -> None:
    for method, path, body in WATCHED:
        assert server.request(method, path, body, timeout=SOON).status == 200, path


def send_request(server: ServerProcess, stack: contextlib.ExitStack, body: Any, headers: str = "") -> None:
    """Post a completion and leave the connection open."""
    data = json.dumps(body).encode()
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=SOON))
    sock.sendall(
        f"POST /completion HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data
    )


def test_with_two_hundred_streams_during_a_long_decode(tiny_model_path: Path, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    flags = ("-m", tiny_model_path, "-c", 2048, "-np", 1, "-t", 1, "--metrics", "--threads-http", 2)
    with (
        ServerProcess(*flags, command=gated("decode"), env={"GATE": str(gate)}) as server,
        contextlib.ExitStack() as stack,
    ):
        long = {"prompt": words(150), "n_predict": 1, "stream": True}
        send_request(server, stack, long, "X-Conversation-Id: talk\r\n")
        wait_for(lambda: "inside" in server.log)
        for i in range(200):
            send_request(server, stack, {"prompt": f"Tale {i}", "n_predict": 1, "stream": True})
        wait_for(lambda: len(server.get("/v1/requests", timeout=SOON).json()["data"]) > 200)
        watch(server)
        assert server.request("DELETE", "/v1/stream?conv_id=talk", timeout=SOON).status == 204
        assert metric(server, "requests_processing") == 1, "the decode has ended, nothing was proved"
        gate.touch()
        wait_for(lambda: metric(server, "requests_deferred") == 0 and metric(server, "requests_processing") == 0)


@pytest.mark.parametrize("method", ["state_save_file", "new_sampler"])
def test_while_the_main_loop_does_what_nobody_may_interrupt(method: str, tiny_model_path: Path, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    flags = ("-m", tiny_model_path, "-c", 512, "-np", 2, "-t", 1, "--metrics", "--slot-save-path", tmp_path)
    with ServerProcess(*flags, command=gated(method), env={"GATE": str(gate)}) as server:
        if method == "new_sampler":
            call = Background(lambda: server.post("/completion", {"prompt": "Once", "n_predict": 1}, timeout=SOON))
        else:
            call = Background(lambda: server.post("/slots/0?action=save", {"filename": "a.bin"}, timeout=SOON))
        wait_for(lambda: "inside" in server.log)
        watch(server)
        gate.touch()
        assert call.get().status == 200
