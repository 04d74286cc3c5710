"""The events of a streamed response."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from llamasrv.api import sse
from llamasrv.api.chat_blocks import BlockEvent, BlockKind, Blocks, Step
from llamasrv.api.chat_state import ChatState
from llamasrv.api.errors import ApiError
from llamasrv.api.format_native import progress_json
from llamasrv.api.responses.format import Item, Reply, is_cut_off
from llamasrv.api.responses.logprobs import TokenTrail, logprobs_json
from llamasrv.api.timings import timings
from llamasrv.engine.result import FinalResult, PartialResult, Result

Event = dict[str, Any]


class ResponsesStream:
    """Numbered events from ``response.created`` to ``response.completed`` or ``response.incomplete``.

    An item is complete before the next one begins; the response at the end holds the same items. ``has_extras``: the
    request asks for progress or times, which only the original's clients do: they know one last event,
    ``response.completed``, and the status within tells the rest.
    """

    def __init__(self, reply: Reply, state: ChatState, has_extras: bool = False) -> None:
        self._reply = reply
        self._state = state
        self._name_of_cut_off = "response.completed" if has_extras else "response.incomplete"
        self._blocks = Blocks()
        self._items: list[Item] = []
        self._trail = TokenTrail()
        self._n_events = 0

    def frame(self, result: Result) -> bytes:
        events: list[Event] = []
        if self._n_events == 0:
            events.append(self._event("response.created", response=self._reply.in_progress()))
            events.append(self._event("response.in_progress", response=self._reply.in_progress()))
        if isinstance(result, PartialResult):
            self._partial(result, events)
        else:
            self._final(cast(FinalResult, result), events)
        return b"".join(sse.named_frame(event["type"], event) for event in events)

    def error(self, error: ApiError) -> bytes:
        body = error.body()["error"]
        # both what the API's error event has and the object that the other streams of the server end with
        event = self._event("error", code=body["type"], message=body["message"], param=None, error=body)
        return sse.named_frame("error", event)

    def end(self) -> bytes:
        return b""

    def _partial(self, result: PartialResult, events: list[Event]) -> None:
        if result.progress is not None and not events:
            events.append(self._event("response.in_progress", response=self._reply.in_progress()))
        if result.prob is not None and self._reply.n_top is not None:
            self._trail.add(result.prob)
        self._tell(self._blocks.feed(self._state.update(result)), events)
        if events:
            if result.stats is not None and result.stats.is_set:
                events[-1]["timings"] = timings(result.stats)
            if result.progress is not None:
                events[-1]["prompt_progress"] = progress_json(result.progress)

    def _final(self, result: FinalResult, events: list[Event]) -> None:
        self._tell(self._blocks.feed(self._state.finish(result)), events)
        if is_cut_off(result) and self._items:
            self._items[-1].is_complete = False
        self._tell(self._blocks.close(), events)
        name = self._name_of_cut_off if is_cut_off(result) else "response.completed"
        events.append(self._event(name, response=self._reply.ended(result, self._items)))
        if result.stats.is_set:
            events[-1]["timings"] = timings(result.stats)

    def _tell(self, changes: Iterable[BlockEvent], events: list[Event]) -> None:
        for step, block, text in changes:
            if step is Step.OPEN:
                self._items.append(Item(block))
            item = self._items[block.index]
            if step is Step.OPEN:
                self._open(item, events)
            elif step is Step.ADD:
                self._add(item, text, events)
            else:
                self._close(item, events)

    def _open(self, item: Item, events: list[Event]) -> None:
        index = item.block.index
        events.append(self._event("response.output_item.added", output_index=index, item=item.begun()))
        if item.block.kind is not BlockKind.CALL:
            events.append(self._of("response.content_part.added", item, part=item.part("")))

    def _add(self, item: Item, text: str, events: list[Event]) -> None:
        kind = item.block.kind
        if kind is BlockKind.REASONING:
            events.append(self._of("response.reasoning_text.delta", item, delta=text))
        elif kind is BlockKind.TEXT:
            n_top = self._reply.n_top
            logprobs = [] if n_top is None else logprobs_json(self._trail.take(text), n_top)
            item.logprobs += logprobs
            events.append(self._of("response.output_text.delta", item, delta=text, logprobs=logprobs))
        else:
            events.append(self._of("response.function_call_arguments.delta", item, delta=text))

    def _close(self, item: Item, events: list[Event]) -> None:
        block = item.block
        if block.kind is BlockKind.CALL:
            name = "response.function_call_arguments.done"
            events.append(self._of(name, item, arguments=block.text, name=block.name))
        else:
            if block.kind is BlockKind.REASONING:
                events.append(self._of("response.reasoning_text.done", item, text=block.text))
            else:
                events.append(self._of("response.output_text.done", item, text=block.text, logprobs=item.logprobs))
            events.append(self._of("response.content_part.done", item, part=item.part(block.text)))
        events.append(self._event("response.output_item.done", output_index=block.index, item=item.done()))

    def _of(self, name: str, item: Item, /, **members: Any) -> Event:
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.block.index}
        if item.block.kind is not BlockKind.CALL:
            where["content_index"] = 0
        return self._event(name, **where, **members)

    def _event(self, name: str, /, **members: Any) -> Event:
        event = {"type": name, "sequence_number": self._n_events, **members}
        self._n_events += 1
        return event
