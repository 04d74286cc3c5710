"""Watches a server from a process of its own, so that the load's own delays are not measured. As a program:

    python -m soaklib.probe HOST PORT PID

looks until its standard input ends, and then prints a :class:`Watched` as JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

#: Seconds between two looks at /health, and between two at everything else.
HEALTH_S, REST_S = 0.1, 1.0
#: Seconds that /health, /metrics and /slots may take.
PATIENCE_S = 120.0


@dataclass(slots=True)
class Sample:
    """The process at a moment: memory in MiB, threads, open files."""

    t: float
    rss: float
    threads: int
    files: int


@dataclass(slots=True)
class Watched:
    """``health``, ``metrics``, ``slots``: seconds that each took. ``faults``: what was wrong with an answer."""

    health: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    slots: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def sample(pid: int) -> Sample:
    """Raises OSError when there is no such process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Sample(
        t=time.monotonic(),
        rss=int(fields["VmRSS"].split()[0]) / 1024,
        threads=int(fields["Threads"]),
        files=len(os.listdir(f"/proc/{pid}/fd")),
    )


class Probe:
    def __init__(self, host: str, port: int, pid: int) -> None:
        self.host, self.port, self.pid = host, port, pid
        self.watched = Watched()

    def run(self) -> Watched:
        """Until standard input ends."""
        ended = threading.Event()
        looks = [(self._health, HEALTH_S), (self._rest, REST_S)]
        # side by side: a slow answer to one must not hide another
        threads = [threading.Thread(target=self._repeat, args=(*each, ended)) for each in looks]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        ended.set()
        for thread in threads:
            thread.join()
        return self.watched

    def _repeat(self, look: Callable[[], None], every: float, ended: threading.Event) -> None:
        while not ended.wait(every):
            look()

    def _get(self, path: str, times: list[float]) -> bytes | None:
        started = time.monotonic()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as exc:
            self.watched.faults.append(f"{path}: {exc!r} after {time.monotonic() - started:.1f} s")
            return None
        finally:
            connection.close()
        times.append(time.monotonic() - started)
        if response.status != 200:
            self.watched.faults.append(f"{path}: status {response.status}")
            return None
        return body

    def _health(self) -> None:
        body = self._get("/health", self.watched.health)
        if body is not None and json.loads(body) != {"status": "ok"}:
            self.watched.faults.append(f"/health: {body[:200]!r}")

    def _rest(self) -> None:
        try:
            self.watched.samples.append(sample(self.pid))
        except OSError as exc:
            self.watched.faults.append(f"the server process: {exc}")
            return
        body = self._get("/metrics", self.watched.metrics)
        if body is not None:
            try:
                names = {each.name for each in text_string_to_metric_families(body.decode())}
                if "llamacpp:requests_deferred" not in names:
                    self.watched.faults.append("/metrics: a figure is missing")
            except ValueError as exc:
                self.watched.faults.append(f"/metrics: {exc}")
        body = self._get("/slots", self.watched.slots)
        if body is not None and not isinstance(json.loads(body), list):
            self.watched.faults.append(f"/slots: {body[:200]!r}")


if __name__ == "__main__":
    print(json.dumps(asdict(Probe(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run())))
