"""The answers to one chat request while they grow, in the terms of no dialect."""

from __future__ import annotations

from collections.abc import Iterator

from llamasrv.api.jsonio import to_text
from llamasrv.binding import ChatDelta, ChatMessage, ChatSession
from llamasrv.engine.result import FinalResult, PartialResult


class ChatState:
    """One answer: its text is read as it comes, ids of tool calls stay what they were when first seen.

    Belongs to one thread. :meth:`update` and :meth:`finish` raise :class:`~llamasrv.binding.ChatFormatError` when the
    text fits no answer of the format that the request asked for.
    """

    __slots__ = ("_message", "_session", "is_finished")

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._message: ChatMessage | None = None
        self.is_finished = False

    @property
    def message(self) -> ChatMessage:
        """The answer so far, with what it continues if the request asked for an echo."""
        if self._message is None:
            self._message = self._session.message
        return self._message

    def update(self, result: PartialResult) -> list[ChatDelta]:
        """What a piece of a stream adds to the answer; nothing for the mark that work has begun."""
        if result.is_begin or not result.content:
            return []
        self._message = None
        return self._session.feed(result.content)

    def finish(self, result: FinalResult) -> list[ChatDelta]:
        """What the last result adds: what waited for more text is decided. The session is closed.

        A text that gives no message, for example because there is none, is the content as it stands.
        """
        self._message = None
        deltas = self._session.finish(result.content)
        message = self.message
        if not (message.content or message.reasoning_content or message.tool_calls):
            self._message = ChatMessage(content=to_text(result.content))
        self.is_finished = True
        self._session.close()
        return deltas


class ChatStates:
    """The answers to one request, by ``Result.index``; all begin as ``session`` does, which itself stays as it is."""

    __slots__ = ("_session", "_states")

    def __init__(self, session: ChatSession) -> None:
        self._session = session
        self._states: dict[int, ChatState] = {}

    def __getitem__(self, index: int) -> ChatState:
        state = self._states.get(index)
        if state is None:
            state = self._states[index] = ChatState(self._session.clone())
        return state

    def __iter__(self) -> Iterator[ChatState]:
        """The answers that have begun, in their order."""
        return iter([self._states[index] for index in sorted(self._states)])
