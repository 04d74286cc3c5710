"""What end-to-end tests say to a server, and how they wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from server_process import ServerProcess

#: How long a test waits for what must happen, seconds.
PATIENCE = 120.0
#: A call that must come back has so many seconds, on the busiest machine.
SOON = 60.0
#: Without flash attention and rounded cells, batches of other sizes give the same greedy text.
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Background:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except Exception as exc:
            self._result = exc

    def get(self) -> Any:
        """What it returned or raised."""
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "no answer"
        return self._result


def metric(server: ServerProcess, name: str) -> float:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith(f"llamacpp:{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def slots(server: ServerProcess) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = server.get("/slots").json()
    return out


def all_idle(server: ServerProcess) -> bool:
    return not any(slot["is_processing"] for slot in slots(server))


def complete(server: ServerProcess, **body: Any) -> Any:
    response = server.post("/completion", {"temperature": 0, "n_predict": 16, **body})
    assert response.status == 200, response.text
    return response.json()


def streamed(server: ServerProcess, **body: Any) -> list[Any]:
    body = {"temperature": 0, "n_predict": 16, **body, "stream": True}
    with server.stream("/completion", body, timeout=4 * PATIENCE) as stream:
        assert stream.status == 200
        return list(stream)


def joined(events: list[Any]) -> str:
    return "".join(event["content"] for event in events)


def words(n: int, seed: int = 0) -> str:
    """Text of ``n`` words that no other seed shares for long."""
    return " ".join(f"w{(seed * 7919 + i * 104729) % 9973}" for i in range(n))
