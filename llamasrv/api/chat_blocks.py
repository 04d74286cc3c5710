"""An answer as blocks, one after the other: reasoning, text, tool calls."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from llamasrv.binding import ChatDelta, ChatMessage


class BlockKind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class Step(enum.Enum):
    """What happens to a block."""

    OPEN = enum.auto()
    ADD = enum.auto()
    CLOSE = enum.auto()


@dataclass(slots=True)
class Block:
    """A run of one kind; of a call the text is its arguments. ``index``: its place in the answer."""

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockEvent(NamedTuple):
    """``text`` is what an ADD brings."""

    step: Step
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer as it grows. At most one is open, the last of :attr:`all`."""

    __slots__ = ("_calls", "_open", "all")

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}

    def feed(self, deltas: Iterable[ChatDelta]) -> Iterator[BlockEvent]:
        """What the deltas change, in order; nothing happens before it is iterated."""
        for delta in deltas:
            if delta.reasoning_content:
                yield from self._text(BlockKind.REASONING, delta.reasoning_content)
            if delta.content:
                yield from self._text(BlockKind.TEXT, delta.content)
            if delta.index >= 0:
                yield from self._call(delta)

    def close(self) -> Iterator[BlockEvent]:
        """Close what is open."""
        block, self._open = self._open, None
        if block is not None:
            yield BlockEvent(Step.CLOSE, block)

    def _text(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        block = self._open
        if block is None or block.kind is not kind:
            yield from self.close()
            block = self._new(kind)
            yield BlockEvent(Step.OPEN, block)
        block.parts.append(text)
        yield BlockEvent(Step.ADD, block, text)

    def _call(self, delta: ChatDelta) -> Iterator[BlockEvent]:
        # only the last call of an answer grows
        block = self._calls.get(delta.index)
        if block is None:
            yield from self.close()
            block = self._calls[delta.index] = self._new(BlockKind.CALL, delta.id, delta.name)
            yield BlockEvent(Step.OPEN, block)
        if delta.arguments:
            block.parts.append(delta.arguments)
            yield BlockEvent(Step.ADD, block, delta.arguments)

    def _new(self, kind: BlockKind, id_: str = "", name: str = "") -> Block:
        block = self._open = Block(kind, len(self.all), id_, name)
        self.all.append(block)
        return block


def blocks_of(message: ChatMessage) -> list[Block]:
    """The blocks of an answer that is complete."""
    blocks: list[Block] = []
    if message.reasoning_content:
        blocks.append(Block(BlockKind.REASONING, len(blocks), parts=[message.reasoning_content]))
    if message.content:
        blocks.append(Block(BlockKind.TEXT, len(blocks), parts=[message.content]))
    for call in message.tool_calls:
        blocks.append(Block(BlockKind.CALL, len(blocks), call.id, call.name, [call.arguments]))
    return blocks
