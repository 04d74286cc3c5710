"""The streams that can be resumed, by conversation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from llamasrv.engine.log import srv_trc, srv_wrn
from llamasrv.stream.session import MAX_BYTES, StreamSession

#: Seconds for which an ended stream is kept.
TTL_S = 300
#: Seconds between two looks for streams that are too old.
GC_S = 60.0


class StreamSessions:
    """At most one session per conversation. Thread-safe.

    A thread of its own, begun with the first session, forgets those that ended more than ``TTL_S`` seconds ago.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, gc_s: float = GC_S, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._gc_s = gc_s
        self._clock = clock
        self._lock = threading.Condition()
        self._sessions: dict[str, StreamSession] = {}
        self._gc: threading.Thread | None = None
        self._is_closed = False

    def create_or_replace(self, conversation_id: str) -> StreamSession:
        """A new session; the conversation's previous one is cancelled."""
        session = StreamSession(conversation_id, self._max_bytes, self._clock)
        with self._lock:
            previous = self._sessions.get(conversation_id)
            is_closed = self._is_closed
            if not is_closed:
                self._sessions[conversation_id] = session
                if self._gc is None:
                    self._gc = threading.Thread(target=self._collect, name="stream-gc", daemon=True)
                    self._gc.start()
        if previous is not None:
            previous.cancel()
        if is_closed:
            session.finalize()
        return session

    def get(self, conversation_id: str) -> StreamSession | None:
        with self._lock:
            return self._sessions.get(conversation_id)

    def find(self, conversation_ids: Iterable[str]) -> list[StreamSession]:
        """Sessions of these conversations, and of their variants ``<id>::<model>``."""
        with self._lock:
            known = list(self._sessions.values())
        out = []
        for wanted in conversation_ids:
            prefix = wanted + "::"
            out += [s for s in known if s.conversation_id == wanted or s.conversation_id.startswith(prefix)]
        return out

    def evict(self, session: StreamSession) -> None:
        """Forget this session, unless another has taken its place already."""
        with self._lock:
            if self._sessions.get(session.conversation_id) is session:
                del self._sessions[session.conversation_id]
        session.finalize()

    def cancel(self, conversation_id: str) -> None:
        """Stop the generation of a conversation and forget what it wrote. Nothing happens if there is none."""
        with self._lock:
            session = self._sessions.pop(conversation_id, None)
        if session is None:
            srv_wrn("stream", "stop on unknown stream session, conv_id=%s", conversation_id)
        else:
            srv_trc("stream", "cancelled the stream of conv_id=%s", conversation_id)
            session.cancel()

    def collect(self) -> None:
        """Forget the sessions that ended too long ago."""
        cutoff = self._clock() - TTL_S
        with self._lock:
            for session in list(self._sessions.values()):
                if session.is_done and session.completed_at <= cutoff:
                    del self._sessions[session.conversation_id]

    def close(self) -> None:
        """End all sessions, for good, so that no reader waits any longer."""
        with self._lock:
            self._is_closed = True
            sessions = list(self._sessions.values())
            self._sessions.clear()
            self._lock.notify_all()
        for session in sessions:
            session.finalize()

    def _collect(self) -> None:
        while True:
            with self._lock:
                if self._lock.wait_for(lambda: self._is_closed, self._gc_s):
                    return
            self.collect()
