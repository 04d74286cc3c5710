"""Closed-loop load on one /completion server: each client sends its next request when the last one has ended.

    python scripts/loadgen.py --port 8080 --clients 8 --requests 32 --pid PID

Prints one JSON object. Raw sockets and no JSON parsing of the answers, so that the generator costs little of the
processors it shares with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WORDS = """
    amber basket canyon drizzle ember falcon glacier hollow indigo jasmine kettle lantern meadow nectar orchard pebble
    quarry ripple saddle timber umbrella velvet willow yonder zephyr anchor bramble cedar dune echo
"""


@dataclass(frozen=True, slots=True)
class Load:
    """``shared_words`` begin every prompt, ``own_words`` follow; both are drawn with fixed seeds."""

    clients: int = 1
    requests: int = 8
    n_predict: int = 64
    shared_words: int = 0
    own_words: int = 40
    stream: bool = True
    seed: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Figures:
    """Times in milliseconds, processor time in milliseconds per generated token, memory in MiB; None: not measured."""

    clients: int
    requests: int
    failed: int
    wall_s: float
    tokens_per_s: float
    first_token_p50: float | None
    first_token_p95: float | None
    gap_p50: float | None
    gap_p95: float | None
    gap_max: float | None
    cpu_per_token: float | None
    rss_mib: float | None


@dataclass(slots=True)
class _Request:
    started: float
    status: int = 0
    #: When each SSE frame with a token arrived.
    frames: list[float] = field(default_factory=list)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of values in any order; None if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def processes(pid: int) -> list[int]:
    """The process and all its descendants."""
    out, todo = [], [pid]
    while todo:
        current = todo.pop()
        out.append(current)
        for children in Path(f"/proc/{current}/task").glob("*/children"):
            todo += map(int, children.read_text().split())
    return out


def cpu_seconds(pid: int) -> float:
    """User and system time of the process and its descendants."""
    ticks = 0
    for each in processes(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_rss_mib(pid: int) -> float:
    """Sum of the peak resident memory of the process and its descendants."""
    kib = 0
    for each in processes(pid):
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                kib += int(line.split()[1])
    return kib / 1024


def prompts(load: Load) -> list[str]:
    words = WORDS.split()
    shared = random.Random(load.seed).choices(words, k=load.shared_words)
    own = random.Random(load.seed + 1)
    return [" ".join(shared + own.choices(words, k=load.own_words)) for _ in range(load.requests)]


async def _send(host: str, port: int, body: bytes) -> _Request:
    request = _Request(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, port)
    head = (
        f"POST /completion HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    tail = b""
    while chunk := await reader.read(65536):
        now = time.perf_counter()
        if not request.status:
            request.status = int(chunk.split(b" ", 2)[1])
        # a frame's head may be cut in two by the socket
        text = tail + chunk
        request.frames += [now] * (text.count(b"data: {") - tail.count(b"data: {"))
        tail = text[-6:]
    writer.close()
    return request


async def _run(host: str, port: int, load: Load) -> tuple[list[_Request], float]:
    bodies = [
        json.dumps(
            {
                "prompt": prompt,
                "n_predict": load.n_predict,
                "stream": load.stream,
                "ignore_eos": True,
                "seed": load.seed,
                **load.extra,
            }
        ).encode()
        for prompt in prompts(load)
    ]
    done: list[_Request] = []

    async def client() -> None:
        while bodies:
            done.append(await _send(host, port, bodies.pop()))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    return done, time.perf_counter() - started


def run(host: str, port: int, load: Load, pid: int | None = None) -> Figures:
    """Make the load and measure; with ``pid`` also what it costs the server. Raises OSError if there is no server."""
    before = cpu_seconds(pid) if pid is not None else 0.0
    done, wall = asyncio.run(_run(host, port, load))
    good = [request for request in done if request.status == 200]
    n_tokens = load.n_predict * len(good)
    streams = [request for request in good if len(request.frames) > 1]
    first = [1e3 * (request.frames[0] - request.started) for request in streams]
    # the last frame has no token
    gaps = [1e3 * (b - a) for request in streams for a, b in itertools.pairwise(request.frames[:-1])]
    cpu = rss = None
    if pid is not None:
        cpu = 1e3 * (cpu_seconds(pid) - before) / max(1, n_tokens)
        rss = peak_rss_mib(pid)
    return Figures(
        clients=load.clients,
        requests=len(done),
        failed=len(done) - len(good),
        wall_s=wall,
        tokens_per_s=n_tokens / wall,
        first_token_p50=percentile(first, 0.5),
        first_token_p95=percentile(first, 0.95),
        gap_p50=percentile(gaps, 0.5),
        gap_p95=percentile(gaps, 0.95),
        gap_max=max(gaps, default=None),
        cpu_per_token=cpu,
        rss_mib=rss,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Closed-loop load on one /completion server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, help="process of the server, for processor time and memory")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--n-predict", type=int, default=64)
    parser.add_argument("--shared-words", type=int, default=0, help="words that all prompts begin with")
    parser.add_argument("--own-words", type=int, default=40, help="words of each prompt's own")
    parser.add_argument("--no-stream", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON object merged into each request")
    given = parser.parse_args()
    load = Load(
        clients=given.clients,
        requests=given.requests,
        n_predict=given.n_predict,
        shared_words=given.shared_words,
        own_words=given.own_words,
        stream=not given.no_stream,
        seed=given.seed,
        extra=given.extra,
    )
    figures = run(given.host, given.port, load, given.pid)
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(figures).items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
