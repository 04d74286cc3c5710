"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamasrv.api.chat_state import ChatStates
from llamasrv.api.openai.common import Request, final_logprobs, finish_reason
from llamasrv.binding import ChatDelta, ChatMessage
from llamasrv.engine.result import FinalResult


def chat_json(request: Request, states: ChatStates, results: Sequence[FinalResult]) -> dict[str, Any]:
    """The answer in one piece, one choice per result.

    Raises :class:`~llamasrv.binding.ChatFormatError` when a text does not fit the format that the request asked for.
    """
    out = request.body("chat.completion", [_choice(states, result) for result in results])
    out["usage"] = request.usage(results)
    request.add_final_extras(out, results[0])
    return out


def _choice(states: ChatStates, result: FinalResult) -> dict[str, Any]:
    state = states[result.index]
    state.finish(result)
    choice: dict[str, Any] = {
        "finish_reason": chat_finish_reason(result, state.message),
        "index": result.index,
        "message": message_json(state.message),
    }
    logprobs = final_logprobs(result)
    if logprobs is not None:
        choice["logprobs"] = logprobs
    return choice


def chat_finish_reason(result: FinalResult, message: ChatMessage) -> str:
    reason = finish_reason(result)
    return "tool_calls" if reason == "stop" and message.tool_calls else reason


def message_json(message: ChatMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}, "id": call.id}
            for call in message.tool_calls
        ]
    return out


def delta_json(delta: ChatDelta) -> dict[str, Any]:
    """Member ``delta`` of a chunk."""
    out: dict[str, Any] = {}
    if delta.reasoning_content:
        out["reasoning_content"] = delta.reasoning_content
    if delta.content:
        out["content"] = delta.content
    if delta.index >= 0:
        call: dict[str, Any] = {"index": delta.index}
        if delta.id:
            call["id"] = delta.id
            call["type"] = "function"
        function = {}
        if delta.name:
            function["name"] = delta.name
        if delta.arguments:
            function["arguments"] = delta.arguments
        if function:
            call["function"] = function
        out["tool_calls"] = [call]
    return out
