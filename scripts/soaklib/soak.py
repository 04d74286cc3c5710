"""One run: rounds of load, each with a burst, and a look at the server at rest after each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soaklib import abuse, friendly, named, resumed, slot_files
from soaklib.burst import Burst
from soaklib.known import learn
from soaklib.ledger import Ledger
from soaklib.probe import Sample, Watched, sample
from soaklib.server import OURS, Server
from soaklib.verdict import Limits, Run, judge
from soaklib.visit import Kind, Scene, Visit
from soaklib.wire import LostError, WrongError, ask

KINDS: tuple[Kind, ...] = (*friendly.KINDS, *resumed.KINDS, *named.KINDS, *abuse.KINDS, *slot_files.KINDS)
#: Without flash attention and rounded cells, batches of other sizes give the same greedy text, near ties apart.
#: What the prompt cache may keep in memory is bounded, so that it is full after the first round. One thread computes:
#: the load needs a processor, too.
FLAGS = ("-t", "1", "-c", "8192", "-cram", "32", "-fa", "off", "-ctk", "f32", "-ctv", "f32")


@dataclass(frozen=True, slots=True)
class Options:
    """``without``: names of kinds to leave out. ``flags``: more flags of the server.

    ``rest_s``: for how long the number of the server's threads must not change before it counts as at rest.
    """

    model: Path
    minutes: float = 10.0
    seed: int = 1
    server: Sequence[str] = OURS
    clients: int = 24
    burst: int = 1000
    rounds: int = 5
    rest_s: float = 6.0
    patience_s: float = 600.0
    known: int = 8
    without: frozenset[str] = frozenset()
    flags: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)


def raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


@contextlib.contextmanager
def watching(server: Server, run: Run) -> Iterator[None]:
    """A probe looks at the server meanwhile; what it saw is in ``run`` afterwards."""
    command = [sys.executable, "-m", "soaklib.probe", server.address.host, str(server.address.port), str(server.pid)]
    folder = Path(__file__).resolve().parent.parent
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, text=True)
    try:
        yield
    finally:
        out, _ = probe.communicate()
        found = json.loads(out)
        found["samples"] = [Sample(**each) for each in found["samples"]]
        run.watched = Watched(**found)


async def at_rest(server: Server, patience: float) -> str:
    """Wait until no slot works and nothing waits; "" or what is still going on after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        left = ""
        slots = (await ask(server.address, "GET", "/slots")).json()
        if busy := [slot["id"] for slot in slots if slot["is_processing"]]:
            left = f"slots {busy} still work"
        figures = dict(
            line.rsplit(" ", 1)
            for line in (await ask(server.address, "GET", "/metrics")).body.decode().splitlines()
            if line.startswith(("llamacpp:requests_processing ", "llamacpp:requests_deferred "))
        )
        if len(figures) != 2:
            left = left or "/metrics does not tell"
        for name, value in figures.items():
            if float(value):
                left = left or f"{name} is {value}"
        requests = await ask(server.address, "GET", "/v1/requests")
        if requests.status == 200 and (others := [each["path"] for each in requests.json()["data"]]):
            left = left or f"requests for {others} are listed"
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


class Soak:
    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.chance = random.Random(options.seed)
        self.ledger = Ledger()
        self.run = Run(self.ledger)
        self.server = Server(options.server, ["-m", str(options.model), *FLAGS, *options.flags], folder)
        self._count = 0
        self._kinds = [kind for kind in KINDS if kind.name not in options.without]
        self._weights = [kind.weight for kind in self._kinds]

    async def go(self) -> Run:
        """The whole run. Raises RuntimeError if the server does not start."""
        options, server, run = self.options, self.server, self.run
        await server.ready(120.0)
        n_ctx = (await ask(server.address, "GET", "/slots")).json()[0]["n_ctx"]
        scene = Scene(server, await learn(server.address, random.Random(options.seed), options.known), n_ctx)
        run.at_rest.append(sample(server.pid))
        with watching(server, run):
            for number in range(options.rounds):
                await self._round(scene, options.minutes * 60 / options.rounds)
                self._say(number)
                if server.exit_code() is not None:
                    break
        if server.exit_code() is None:
            await self._compare(scene)
        return run

    async def _round(self, scene: Scene, seconds: float) -> None:
        burst = Burst(self.options.burst)
        self.run.bursts.append(burst)
        until = time.monotonic() + seconds
        visitors = [self._visitor(scene, until) for _ in range(self.options.clients)]
        await asyncio.gather(*visitors, self._burst(scene, burst, seconds / 4))
        if self.server.exit_code() is not None:
            return
        try:
            left = await at_rest(self.server, 60.0)
        except (LostError, WrongError) as exc:
            left = str(exc)
        if left:
            self.ledger.violation("at rest", left)
        with contextlib.suppress(OSError):  # it has just ended
            self.run.at_rest.append(await self._settled())

    def _say(self, number: int) -> None:
        """How far the run is, for who waits for it."""
        n_requests, n_wrong = sum(self.ledger.counts.values()), self.ledger.n_violations
        rss = self.run.at_rest[-1].rss
        rounds = f"round {number + 1} of {self.options.rounds}"
        text = f"{rounds}: {n_requests} requests, {n_wrong} violations, {rss:.1f} MiB"
        print(text, file=sys.stderr, flush=True)

    async def _settled(self) -> Sample:
        """The process once it is at rest: threads that came for the crowd go after a while.

        Its files are the fewest it had, without those of the probe's own connections.
        """
        last = sample(self.server.pid)
        since = started = time.monotonic()
        files = last.files
        while (now := time.monotonic()) < min(since + self.options.rest_s, started + 60.0):
            await asyncio.sleep(0.25)
            found = sample(self.server.pid)
            if found.threads != last.threads:
                since = now
                files = found.files
            files = min(files, found.files)
            last = found
        last.files = files
        return last

    async def _burst(self, scene: Scene, burst: Burst, delay: float) -> None:
        await asyncio.sleep(delay)
        await burst.run(scene, self.ledger, random.Random(self.chance.random()), self.options.patience_s)

    async def _visitor(self, scene: Scene, until: float) -> None:
        """Visits one after the other."""
        # the first round is over when each kind has been there
        while self.server.exit_code() is None and (time.monotonic() < until or self._count < len(self._kinds)):
            number = self._count
            self._count += 1
            chance = random.Random(f"{self.options.seed} {number}")
            (kind,) = self._kinds[number : number + 1] or chance.choices(self._kinds, self._weights)
            if kind in slot_files.KINDS and scene.disk.locked() and number >= len(self._kinds):
                continue
            await self.ledger.note(kind.name, kind.run(Visit(scene, chance, number)), self.options.patience_s)
            if self.server.exit_code() is not None:
                return
            await asyncio.sleep(chance.random() * 0.05)

    async def _compare(self, scene: Scene) -> None:
        """The quiet server answers as it did before the load."""
        for known in scene.known:
            try:
                reply = await ask(self.server.address, "POST", known.dialect.path, known.body(False))
                known.check(known.dialect.text(reply.json()))
            except (LostError, WrongError) as exc:
                self.ledger.violation("after the load", str(exc))


def soak(options: Options) -> Run:
    """Start a server, load it, end it, judge it."""
    raise_file_limit(options.burst + options.clients + 512)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        made = Soak(options, Path(folder))
        server, run = made.server, made.run
        run.command = shlex.join(options.server)
        started = time.monotonic()
        try:
            asyncio.run(made.go())
            run.ended_early = server.exit_code()
            if server.exit_code() is None:
                stopping = time.monotonic()
                run.exit_code = server.stop(60.0)
                run.stop_s = time.monotonic() - stopping
        finally:
            server.close()
            run.log = server.log
            run.seconds = time.monotonic() - started
    judge(run, options.limits)
    return run
