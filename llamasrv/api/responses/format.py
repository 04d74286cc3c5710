"""Answers as objects of the Responses API."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from llamasrv.api.chat_blocks import Block, BlockKind, blocks_of
from llamasrv.api.chat_state import ChatState
from llamasrv.api.context import ApiContext
from llamasrv.api.ids import random_string
from llamasrv.api.responses.logprobs import TokenTrail, logprobs_json
from llamasrv.api.responses.request import ResponsesRequest
from llamasrv.engine.result import FinalResult, StopType
from llamasrv.engine.task import TaskParams

_PREFIXES = {BlockKind.REASONING: "rs_", BlockKind.TEXT: "msg_"}


class Item:
    """A block with the id that it has in every event and object."""

    __slots__ = ("block", "id", "is_complete", "logprobs")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.id = f"fc_{block.id}" if block.kind is BlockKind.CALL else _PREFIXES[block.kind] + random_string()
        self.is_complete = True
        #: One entry per token of a text, where the request asks for them.
        self.logprobs: list[dict[str, Any]] = []

    def part(self, text: str) -> dict[str, Any]:
        """The content part of reasoning and of text."""
        if self.block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs if text else [], "text": text}

    def begun(self) -> dict[str, Any]:
        """The item before there is anything in it."""
        return self._json("in_progress", [], "")

    def done(self) -> dict[str, Any]:
        text = self.block.text
        return self._json("completed" if self.is_complete else "incomplete", [self.part(text)], text)

    def _json(self, status: str, content: list[dict[str, Any]], arguments: str) -> dict[str, Any]:
        block = self.block
        if block.kind is BlockKind.REASONING:
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": "",
                "status": status,
            }
        if block.kind is BlockKind.TEXT:
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "arguments": arguments,
            "call_id": f"call_{block.id}",
            "name": block.name,
        }


class Reply:
    """The response object of one request, in all its states. ``n_top``: as in the request."""

    def __init__(self, context: ApiContext, request: ResponsesRequest, params: TaskParams) -> None:
        self._context = context
        self.n_top = request.n_top
        self._head = {
            "id": "resp_" + random_string(),
            "object": "response",
            "created_at": int(time.time()),
            "model": context.meta.model_name,
        }
        self._tail = {
            "background": False,
            "previous_response_id": None,
            "temperature": params.sampling.temp,
            "top_p": params.sampling.top_p,
            "truncation": "disabled",
            **request.repeated,
        }

    def in_progress(self) -> dict[str, Any]:
        return self._json("in_progress", [], None, {"usage": None})

    def ended(self, result: FinalResult, items: Iterable[Item]) -> dict[str, Any]:
        """The whole answer; of one that was cut off the last item is incomplete, and the response too."""
        all_items = list(items)
        rest: dict[str, Any] = {"usage": self._usage(result, all_items)}
        if is_cut_off(result):
            if all_items:
                all_items[-1].is_complete = False
            details = {"reason": "max_output_tokens"}
            return self._json("incomplete", [item.done() for item in all_items], details, rest)
        rest["completed_at"] = int(time.time())
        return self._json("completed", [item.done() for item in all_items], None, rest)

    def _json(
        self, status: str, output: list[dict[str, Any]], details: dict[str, Any] | None, rest: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": output,
            **self._tail,
            **rest,
        }

    def _usage(self, result: FinalResult, items: list[Item]) -> dict[str, Any]:
        n_prompt, n_cached = result.n_prompt_tokens, result.n_prompt_tokens_cache
        vocab = self._context.vocab
        reasoning = [item.block.text for item in items if item.block.kind is BlockKind.REASONING]
        return {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": n_prompt - n_cached},
            "output_tokens": result.n_decoded,
            "output_tokens_details": {"reasoning_tokens": sum(len(vocab.tokenize(x, False, True)) for x in reasoning)},
            "total_tokens": n_prompt + result.n_decoded,
        }


def is_cut_off(result: FinalResult) -> bool:
    """Whether the answer ended because there was no more room for it."""
    return result.stop is StopType.LIMIT


def response_json(reply: Reply, state: ChatState, result: FinalResult) -> dict[str, Any]:
    """The response to a request that is not streamed."""
    state.finish(result)
    items = [Item(block) for block in blocks_of(state.message)]
    if reply.n_top is not None:
        trail = TokenTrail(result.probs)
        for item in items:
            if item.block.kind is not BlockKind.CALL:
                probs = trail.take(item.block.text)
                if item.block.kind is BlockKind.TEXT:
                    item.logprobs = logprobs_json(probs, reply.n_top)
    return reply.ended(result, items)
