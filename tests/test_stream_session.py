"""The ring of a resumable stream and the table of conversations, without HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from http_harness import wait_for
from hypothesis import given
from hypothesis import strategies as st

from llamasrv.stream.session import OffsetLostError, StreamSession
from llamasrv.stream.sessions import TTL_S, StreamSessions


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def never() -> bool:
    return False


@pytest.fixture
def sessions() -> Iterator[StreamSessions]:
    made = StreamSessions()
    yield made
    made.close()


def test_what_was_written_is_read_from_any_offset() -> None:
    session = StreamSession("a")
    for frame in (b"data: 1\n\n", b"data: 22\n\n", b""):
        assert session.append(frame)
    session.finalize()
    whole = b"data: 1\n\ndata: 22\n\n"
    assert [session.read(offset, never) for offset in range(len(whole) + 2)] == [
        *(whole[offset:] for offset in range(len(whole))),
        b"",
        b"",
    ]
    assert session.total_bytes == len(whole)


def test_the_end_refuses_more_frames() -> None:
    clock = Clock()
    session = StreamSession("a", clock=clock)
    assert (session.is_done, session.completed_at, session.started_at) == (False, 0, 1000)
    clock.now += 5
    session.finalize()
    clock.now += 5
    session.finalize()
    assert not session.append(b"x")
    assert (session.is_done, session.completed_at, session.total_bytes) == (True, 1005, 0)


def test_a_reader_waits_for_bytes_and_for_the_end() -> None:
    session = StreamSession("a")
    got: list[bytes] = []

    def read() -> None:
        offset = 0
        while data := session.read(offset, never):
            offset += len(data)
            got.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    for text in (b"one", b"two"):
        session.append(text)
        assert wait_for(lambda text=text: b"".join(got).endswith(text))
    assert reader.is_alive()
    session.finalize()
    reader.join(10)
    assert not reader.is_alive()
    assert b"".join(got) == b"onetwo"


def test_a_reader_that_is_woken_may_give_up() -> None:
    session = StreamSession("a")
    gone = threading.Event()
    asked = threading.Event()

    def is_gone() -> bool:
        asked.set()
        return gone.is_set()

    reader = threading.Thread(target=session.read, args=(0, is_gone))
    reader.start()
    assert asked.wait(10)
    gone.set()
    session.wake()
    reader.join(10)
    assert not reader.is_alive()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60), limit=st.integers(1, 100))
def test_only_whole_frames_are_dropped(sizes: list[int], limit: int) -> None:
    session = StreamSession("a", max_bytes=limit)
    starts = [0]
    for i, size in enumerate(sizes):
        session.append(bytes([i % 251]) * size)
        starts.append(starts[-1] + size)
        first = session.n_dropped
        assert first in starts[:-1]
        kept = session.total_bytes - first
        assert kept <= limit or first == starts[-2]
        # nothing that would have fitted is gone
        if first > 0:
            before = starts[starts.index(first) - 1]
            assert session.total_bytes - before > limit
    whole = b"".join(bytes([i % 251]) * size for i, size in enumerate(sizes))
    session.finalize()
    for offset in range(len(whole) + 1):
        if offset < session.n_dropped:
            with pytest.raises(OffsetLostError):
                session.read(offset, never)
            with pytest.raises(OffsetLostError):
                session.frame_start(offset)
        else:
            assert session.read(offset, never) == whole[offset:]
            aligned = max(start for start in starts if start <= offset)
            assert session.frame_start(offset) == aligned


def test_thousands_of_dropped_frames_are_forgotten() -> None:
    session = StreamSession("a", max_bytes=100)
    for i in range(10_000):
        session.append(b"%010d" % i)
    assert session.n_dropped == 99_900
    assert session.read(99_950, never) == b"".join(b"%010d" % i for i in range(9995, 10_000))
    assert len(session._frames) < 3000


def test_a_conversation_has_one_session(sessions: StreamSessions) -> None:
    first = sessions.create_or_replace("a")
    other = sessions.create_or_replace("b")
    second = sessions.create_or_replace("a")
    assert sessions.get("a") is second
    assert (first.is_cancelled, first.is_done) == (True, True)
    assert (second.is_cancelled, second.is_done, other.is_done) == (False, False, False)
    # who was replaced does not take the new one away
    sessions.evict(first)
    assert sessions.get("a") is second
    sessions.evict(second)
    assert sessions.get("a") is None
    assert second.is_done
    assert not second.is_cancelled


def test_cancel_stops_the_writer_and_forgets(sessions: StreamSessions) -> None:
    session = sessions.create_or_replace("a")
    sessions.cancel("a")
    sessions.cancel("a")
    assert session.is_cancelled
    assert session.is_done
    assert sessions.get("a") is None


def test_find_takes_variants_of_a_model(sessions: StreamSessions) -> None:
    made = [sessions.create_or_replace(name) for name in ("a", "a::m/x", "ab", "b::y")]
    assert sessions.find(["a"]) == made[:2]
    assert sessions.find(["b", "nothing"]) == made[3:]
    assert sessions.find([]) == []


def test_ended_streams_are_kept_for_a_while() -> None:
    clock = Clock()
    sessions = StreamSessions(clock=clock)
    done, running = sessions.create_or_replace("done"), sessions.create_or_replace("running")
    done.finalize()
    clock.now += TTL_S - 1
    sessions.collect()
    assert sessions.get("done") is done
    clock.now += 1
    sessions.collect()
    assert sessions.get("done") is None
    clock.now += 10 * TTL_S
    sessions.collect()
    assert sessions.get("running") is running
    sessions.close()


def test_the_collector_runs_by_itself_and_ends_with_the_table() -> None:
    clock = Clock()
    sessions = StreamSessions(gc_s=0.01, clock=clock)
    sessions.create_or_replace("a").finalize()
    clock.now += TTL_S
    assert wait_for(lambda: sessions.get("a") is None)
    sessions.close()
    assert sessions._gc is not None
    sessions._gc.join(10)
    assert not sessions._gc.is_alive()


def test_closing_ends_every_reader(sessions: StreamSessions) -> None:
    session = sessions.create_or_replace("a")
    reader = threading.Thread(target=session.read, args=(0, never))
    reader.start()
    sessions.close()
    reader.join(10)
    assert not reader.is_alive()
    assert sessions.create_or_replace("b").is_done
    assert sessions.get("b") is None
