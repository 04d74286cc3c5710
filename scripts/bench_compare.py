"""Speed of our server beside the genuine llama-server: same model, same flags, same load, in alternating rounds.

    python scripts/bench_compare.py --reference PATH -m MODEL.gguf [--clients 1,8] [--rounds 3] [-- SERVER FLAGS...]

Each round starts one server, makes the load of loadgen.py for every number of clients, and stops it; the rounds go
A B A B, so that a slow minute of the machine hits both. The table shows the median of the rounds and the ratio
ours / reference.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from loadgen import Figures, Load, run

ROOT = Path(__file__).resolve().parent.parent
OURS = (sys.executable, "-m", "llamasrv")
HOST = "127.0.0.1"
#: Column -> field of Figures.
COLUMNS = {
    "tokens/s": "tokens_per_s",
    "first p50 ms": "first_token_p50",
    "first p95 ms": "first_token_p95",
    "gap p50 ms": "gap_p50",
    "gap p95 ms": "gap_p95",
    "gap max ms": "gap_max",
    "CPU ms/token": "cpu_per_token",
    "RSS MiB": "rss_mib",
}
START_S = 180.0
STOP_S = 30.0


class BenchError(RuntimeError):
    """A server did not start or requests failed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_ready(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise BenchError(f"{process.args!r} did not start:\n{log.read().decode(errors='replace')[-2000:]}")
        time.sleep(0.05)


@contextmanager
def server(command: Sequence[str], flags: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Run a server; yields (port, process id)."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryFile() as log:
        full = [*command, "--host", HOST, "--port", str(port), *flags]
        process = subprocess.Popen(full, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            wait_ready(process, port, log)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(command: Sequence[str], flags: Sequence[str], loads: Sequence[Load]) -> list[Figures]:
    """One round: every load on one freshly started server, after a short warm-up. Raises BenchError."""
    out = []
    with server(command, flags) as (port, pid):
        run(HOST, port, Load(requests=1, n_predict=8, seed=99))
        for number, load in enumerate(loads):
            # other words for each load: nothing is in the prompt cache
            figures = run(HOST, port, replace(load, seed=load.seed + 10 * number), pid)
            if figures.failed:
                raise BenchError(f"{figures.failed} of {figures.requests} requests failed on {command[0]}")
            out.append(figures)
    return out


def median(figures: Sequence[Figures], name: str) -> float | None:
    values = [value for value in (getattr(each, name) for each in figures) if value is not None]
    return statistics.median(values) if values else None


def table(loads: Sequence[Load], theirs: Sequence[Sequence[Figures]], ours: Sequence[Sequence[Figures]]) -> str:
    """Markdown; ``theirs[i]`` and ``ours[i]`` are the rounds of ``loads[i]``."""
    lines = ["| clients | server | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for load, reference, own in zip(loads, theirs, ours, strict=True):
        rows: dict[str, list[str]] = {"reference": [], "ours": [], "ratio": []}
        for name in COLUMNS.values():
            a, b = median(reference, name), median(own, name)
            rows["reference"].append("-" if a is None else f"{a:.2f}")
            rows["ours"].append("-" if b is None else f"{b:.2f}")
            rows["ratio"].append(f"{b / a:.3f}" if a and b is not None else "-")
        lines += [f"| {load.clients} | {label} | " + " | ".join(cells) + " |" for label, cells in rows.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of our server beside the genuine llama-server.")
    parser.add_argument("--reference", default=os.environ.get("LLAMASRV_REFERENCE"), help="genuine llama-server")
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--clients", default="1,8", help="numbers of clients, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-per-client", type=int, default=4)
    parser.add_argument("--n-predict", type=int, default=64)
    parser.add_argument("--shared-words", type=int, default=0)
    parser.add_argument("--own-words", type=int, default=40)
    parser.add_argument("flags", nargs="*", help="flags for both servers, after --")
    given = parser.parse_args()
    if not given.reference:
        parser.error("--reference or LLAMASRV_REFERENCE must name the genuine llama-server")
    loads = [
        Load(
            clients=int(clients),
            requests=int(clients) * given.requests_per_client,
            n_predict=given.n_predict,
            shared_words=given.shared_words,
            own_words=given.own_words,
        )
        for clients in given.clients.split(",")
    ]
    most = max(load.clients for load in loads)
    flags = ["-m", str(given.model), *(given.flags or ["-c", str(1024 * most), "-np", str(most)])]
    rounds: dict[str, list[list[Figures]]] = {"reference": [], "ours": []}
    try:
        for number in range(given.rounds):
            for label, command in (("reference", (given.reference,)), ("ours", OURS)):
                print(f"round {number + 1} of {given.rounds}: {label}", file=sys.stderr)
                rounds[label].append(measure(command, flags, loads))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    theirs, ours = ([list(each) for each in zip(*rounds[label], strict=True)] for label in ("reference", "ours"))
    print(table(loads, theirs, ours))
    return 0


if __name__ == "__main__":
    sys.exit(main())
