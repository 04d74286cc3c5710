"""A short soak of the server, and the soak's own eyes: what it must see when a server is at fault."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from soaklib import ledger as outcomes
from soaklib.burst import KIND as BURST
from soaklib.burst import Burst, Turn
from soaklib.dialects import CHAT, NATIVE, Dialect
from soaklib.known import Known, plain, streamed
from soaklib.ledger import Ledger
from soaklib.probe import Sample, Watched
from soaklib.soak import KINDS, Options, soak
from soaklib.verdict import Limits, Run, figures, judge, report
from soaklib.wire import Address, LostError, TwiceError, WrongError

#: On a busy machine everything takes its time; what is lost stays lost.
LIMITS = Limits(rss_mib=96.0, late_s=20.0, health_s=60.0, stop_s=60.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_in_a_short_soak(tiny_model_path: Path) -> None:
    sizes: dict[str, Any] = {"minutes": 0.3, "rounds": 2, "clients": 16, "burst": 200, "known": 4}
    run = soak(Options(tiny_model_path, seed=5, patience_s=300, limits=LIMITS, **sizes))
    found = figures(run)
    assert run.is_good, f"{report(found)}\n{run.log[-2000:]}"
    # and it was a soak
    assert set(found["kinds"]) == {kind.name for kind in KINDS} | {BURST}
    assert found["bursts"]["served"] > 300
    assert found["outcomes"][outcomes.LEFT] > 10
    assert found["outcomes"][outcomes.REFUSED] > 5
    assert found["exit_code"] == 0
    assert min(found[name]["count"] for name in ("health_ms", "metrics_ms", "slots_ms")) > 5
    json.dumps(found)


# -- servers at fault

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def with_length(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def in_chunks(*pieces: bytes) -> bytes:
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)


PLAIN = with_length(b'{"content": "yes", "stop": true}')
FRAME = b'data: {"content": "yes", "stop": false}\n\n'
LAST = b'data: {"content": "", "stop": true}\n\n'
END = b"0\r\n\r\n"


def answered_with(data: bytes, ask: Callable[[Address], Awaitable[str]]) -> str:
    """What ``ask`` makes of a server that answers every request with these bytes and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(data)
        await writer.drain()
        writer.close()

    async def run() -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()[:2]
            return await ask(Address(host, port))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", LostError),
        (HEAD, LostError),
        (PLAIN[:-1], LostError),
        (in_chunks(b'{"content": "yes", "stop": true}'), LostError),
        (PLAIN + b"\n", TwiceError),
        (PLAIN + PLAIN, TwiceError),
        (with_length(b'{"content": "yes", "stop": false}'), WrongError),
        (with_length(b"yes"), WrongError),
        (b"hello\r\n\r\n", WrongError),
        (PLAIN.replace(b"200 OK", b"500 Error"), WrongError),
    ],
)
def test_a_plain_answer_at_fault_is_seen(data: bytes, error: type[Exception]) -> None:
    assert answered_with(PLAIN, lambda address: plain(address, NATIVE, {})) == "yes"
    with pytest.raises(error) as caught:
        answered_with(data, lambda address: plain(address, NATIVE, {}))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (in_chunks(FRAME), LostError),
        (in_chunks(FRAME, LAST), LostError),
        (in_chunks(FRAME) + END, WrongError),
        (in_chunks(FRAME, LAST[:-1]) + END, WrongError),
        (in_chunks(FRAME, LAST, FRAME) + END, WrongError),
        (in_chunks(b'data: {"error": {"code": 500, "message": "x"}}\n\n') + END, WrongError),
        (in_chunks(FRAME, LAST, LAST) + END, TwiceError),
        (in_chunks(FRAME, LAST) + END + b"x", TwiceError),
    ],
)
def test_a_stream_at_fault_is_seen(data: bytes, error: type[Exception]) -> None:
    whole = in_chunks(FRAME[:9], FRAME[9:] + LAST) + END
    assert answered_with(whole, lambda address: streamed(address, NATIVE, {})) == "yes"
    with pytest.raises(error) as caught:
        answered_with(data, lambda address: streamed(address, NATIVE, {}))
    assert type(caught.value) is error


def chat_frame(text: str, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish}]})


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([chat_frame("a"), chat_frame("", "stop")], WrongError),
        ([chat_frame("a"), "[DONE]"], WrongError),
        ([chat_frame("a"), chat_frame("", "stop"), "[DONE]", "[DONE]"], TwiceError),
        ([chat_frame("a", "stop"), chat_frame("", "stop"), "[DONE]"], TwiceError),
        ([], WrongError),
    ],
)
def test_a_chat_that_does_not_end_once_is_seen(events: list[str], error: type[Exception]) -> None:
    assert CHAT.joined([chat_frame("a"), chat_frame("b"), chat_frame("", "stop"), "[DONE]"]) == "ab"
    with pytest.raises(error):
        CHAT.joined(events)


def test_what_became_of_a_visit_is_written_down() -> None:
    ledger = Ledger()

    async def visit(end: Exception | str, wait: float = 0.0) -> str:
        await asyncio.sleep(wait)
        if isinstance(end, Exception):
            raise end
        return end

    def wrong(dialect: Dialect = NATIVE) -> WrongError:
        with pytest.raises(WrongError) as caught:
            Known(dialect, "p", 1, "yes").check("no")
        return caught.value

    async def all_of_them() -> None:
        for end in (outcomes.ANSWERED, outcomes.LEFT, LostError("x"), TwiceError("x"), wrong(), KeyError("content")):
            await ledger.note("kind", visit(end), 30.0)
        await ledger.note("kind", visit(outcomes.ANSWERED, wait=60.0), 0.01)

    asyncio.run(all_of_them())
    assert ledger.table() == {"kind": {"answered": 1, "left": 1, "lost": 2, "twice": 1, "wrong": 2}}
    assert ledger.n_violations == 5


# -- the verdict


def good_run() -> Run:
    rest = [Sample(t=100.0 * i, rss=200.0, threads=10, files=9) for i in range(4)]
    burst = Burst(3, [Turn(0.0, 1.0), Turn(0.1, 1.1), Turn(0.2, 1.2)])
    watched = Watched(health=[0.01], metrics=[0.01], slots=[0.01], samples=rest)
    return Run(Ledger(), at_rest=rest, bursts=[burst], watched=watched, exit_code=0, stop_s=0.5)


def faults(run: Run) -> list[str]:
    judge(run, Limits())
    return [text.partition(":")[0] for text in run.ledger.violations]


def test_a_good_run_has_no_fault() -> None:
    run = good_run()
    # what comes before the end of the first round is growth to size
    run.at_rest[0] = Sample(t=0.0, rss=50.0, threads=5, files=5)
    assert faults(run) == []
    assert "nothing lost" in report(figures(run))


@pytest.mark.parametrize(
    ("rss", "threads", "files", "fault"),
    [(300.0, 10, 9, "memory"), (200.0, 11, 9, "threads"), (200.0, 10, 10, "open files")],
)
def test_growth_is_seen(rss: float, threads: int, files: int, fault: str) -> None:
    run = good_run()
    run.at_rest[-1] = Sample(t=400.0, rss=rss, threads=threads, files=files)
    assert faults(run) == [fault]


def test_an_end_that_is_no_end_is_seen() -> None:
    changes: list[dict[str, float | None]] = [{"exit_code": None}, {"exit_code": -6}, {"stop_s": 50.0}]
    for change in changes:
        run = good_run()
        for name, value in change.items():
            setattr(run, name, value)
        assert faults(run) == ["SIGTERM"]
    run = good_run()
    run.ended_early = -6
    assert faults(run) == ["the server"]


def test_a_monitor_that_fails_or_hangs_is_seen() -> None:
    run = good_run()
    run.watched.faults.append("/metrics: status 500")
    run.watched.health.append(60.0)
    assert faults(run) == ["watching", "/health"]
    run = good_run()
    run.watched = Watched()
    assert faults(run) == ["watching"]


def test_who_is_served_before_an_earlier_comer_is_seen() -> None:
    chance = random.Random(1)
    turns = [Turn(sent=i / 100, served=10 + i / 10) for i in range(200)]
    chance.shuffle(turns)
    burst = Burst(200, turns)
    assert (max(burst.late()), burst.overtaken()) == (0.0, 0)
    first = min(burst.turns, key=lambda turn: turn.sent)
    first.served = 100.0
    assert max(burst.late()) == pytest.approx(1.99)
    assert burst.overtaken() == 199 - 4
    run = good_run()
    run.bursts.append(burst)
    assert faults(run) == ["order"]
