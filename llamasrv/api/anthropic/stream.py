"""The events of a streamed message."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, cast

from llamasrv.api import sse
from llamasrv.api.anthropic.format import empty_block_json, stop_json, usage_json
from llamasrv.api.chat_blocks import BlockEvent, BlockKind, Blocks, Step
from llamasrv.api.chat_state import ChatState
from llamasrv.api.errors import ApiError
from llamasrv.engine.result import FinalResult, PartialResult, Result

_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class AnthropicStream:
    """``message_start``, then each block from its start to its stop, then ``message_delta`` and ``message_stop``."""

    def __init__(self, state: ChatState, id_: str, model: str, stop_sequences: Collection[str]) -> None:
        self._state = state
        self._id = id_
        self._model = model
        self._stop_sequences = stop_sequences
        self._blocks = Blocks()
        self._has_begun = False

    def frame(self, result: Result) -> bytes:
        if isinstance(result, PartialResult):
            if result.is_begin:
                return b""  # how much of the prompt is cached is not known yet
            return self._begin(result) + self._tell(self._blocks.feed(self._state.update(result)))
        return self._final(cast(FinalResult, result))

    def error(self, error: ApiError) -> bytes:
        return _frame("error", error=error.body()["error"])

    def end(self) -> bytes:
        return b""

    def _begin(self, result: PartialResult | FinalResult) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(result.n_prompt_tokens, result.n_prompt_tokens_cache, 0),
        }
        return _frame("message_start", message=message)

    def _final(self, result: FinalResult) -> bytes:
        begin = self._begin(result)
        blocks = self._tell(self._blocks.feed(self._state.finish(result))) + self._tell(self._blocks.close())
        stop = stop_json(result, self._state.message, self._stop_sequences)
        usage = usage_json(result.n_prompt_tokens, result.n_prompt_tokens_cache, result.n_decoded)
        return begin + blocks + _frame("message_delta", delta=stop, usage=usage) + _frame("message_stop")

    def _tell(self, changes: Iterable[BlockEvent]) -> bytes:
        frames = []
        for step, block, text in changes:
            index = block.index
            if step is Step.OPEN:
                frames.append(_frame("content_block_start", index=index, content_block=empty_block_json(block)))
            elif step is Step.ADD:
                kind, name = _DELTAS[block.kind]
                frames.append(_frame("content_block_delta", index=index, delta={"type": kind, name: text}))
            else:
                if block.kind is BlockKind.REASONING:
                    signature = {"type": "signature_delta", "signature": ""}  # clients wait for it
                    frames.append(_frame("content_block_delta", index=index, delta=signature))
                frames.append(_frame("content_block_stop", index=index))
        return b"".join(frames)


def _frame(name: str, /, **members: Any) -> bytes:
    return sse.named_frame(name, {"type": name, **members})
