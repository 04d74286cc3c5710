"""Answers as objects of the Messages API."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import orjson

from llamasrv.api.chat_blocks import Block, BlockKind, blocks_of
from llamasrv.api.chat_state import ChatState
from llamasrv.binding import ChatMessage
from llamasrv.engine.result import FinalResult, StopType


def message_json(
    state: ChatState, result: FinalResult, id_: str, model: str, stop_sequences: Collection[str]
) -> dict[str, Any]:
    """The message of a request that is not streamed."""
    state.finish(result)
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "content": [block_json(block) for block in blocks_of(state.message)],
        "model": model,
        **stop_json(result, state.message, stop_sequences),
        "usage": usage_json(result.n_prompt_tokens, result.n_prompt_tokens_cache, result.n_decoded),
    }


def block_json(block: Block) -> dict[str, Any]:
    """A content block, complete."""
    out = empty_block_json(block)
    if block.kind is BlockKind.REASONING:
        out["thinking"] = block.text
    elif block.kind is BlockKind.TEXT:
        out["text"] = block.text
    else:
        out["input"] = _arguments(block.text)
    return out


def empty_block_json(block: Block) -> dict[str, Any]:
    """A content block before anything is in it. Nobody signs what a model here thinks."""
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def stop_json(result: FinalResult, message: ChatMessage, stop_sequences: Collection[str]) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``, which is one of the request's own."""
    word = None
    if result.stop not in (StopType.WORD, StopType.EOS):
        reason = "max_tokens"
    elif message.tool_calls:
        reason = "tool_use"
    elif result.stopping_word in stop_sequences:
        reason, word = "stop_sequence", result.stopping_word
    else:
        reason = "end_turn"
    return {"stop_reason": reason, "stop_sequence": word}


def usage_json(n_prompt: int, n_cached: int, n_decoded: int) -> dict[str, int]:
    """Tokens; ``input_tokens`` are those that were not cached."""
    return {"cache_read_input_tokens": n_cached, "input_tokens": n_prompt - n_cached, "output_tokens": n_decoded}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments of a call; empty where it was cut off."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
