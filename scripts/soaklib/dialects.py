"""The ways of asking for text, and what a complete answer looks like in each."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from soaklib.wire import TwiceError, WrongError

DONE = "[DONE]"


class Dialect(ABC):
    """One route that makes text. All requests are greedy, so that the text is known."""

    name: str
    path: str

    @abstractmethod
    def body(self, prompt: str, n_predict: int, stream: bool) -> dict[str, Any]: ...

    @abstractmethod
    def text(self, answer: Any) -> str:
        """Text of a plain answer. Raises WrongError if it is not complete."""

    @abstractmethod
    def joined(self, events: list[str]) -> str:
        """Text of a whole stream. Raises WrongError unless it has exactly one end, where it ends."""


def parsed(events: list[str]) -> list[Any]:
    """The JSON of each event. Raises WrongError for one that is none, or an error."""
    out = []
    for event in events:
        try:
            out.append(json.loads(event))
        except ValueError as exc:
            raise WrongError(f"an event that is no JSON: {event[:200]!r}") from exc
        if "error" in out[-1] and out[-1]["error"]:
            raise WrongError(f"an error within a stream: {event[:300]}")
    return out


def undone(events: list[str]) -> list[str]:
    """The events before the one and last ``[DONE]``."""
    if events.count(DONE) > 1:
        raise TwiceError("a stream ended more than once")
    if not events or events[-1] != DONE:
        raise WrongError(f"a stream without its end; the last event: {events[-1:]}"[:300])
    return events[:-1]


def one_end(ends: list[int], count: int) -> None:
    """``ends``: indices of the events that end a stream of ``count`` events."""
    if len(ends) > 1:
        raise TwiceError(f"a stream with {len(ends)} ends")
    if ends != [count - 1]:
        raise WrongError(f"a stream of {count} events whose end is at {ends}")


class Native(Dialect):
    name = "completion"
    path = "/completion"

    def body(self, prompt: str, n_predict: int, stream: bool) -> dict[str, Any]:
        return {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "stream": stream}

    def text(self, answer: Any) -> str:
        if answer.get("stop") is not True:
            raise WrongError("an answer that is not the last")
        return str(answer["content"])

    def joined(self, events: list[str]) -> str:
        found = parsed(events)
        one_end([i for i, event in enumerate(found) if event["stop"]], len(found))
        return "".join(event["content"] for event in found)


class OpenAi(Dialect):
    name = "v1/completions"
    path = "/v1/completions"

    def body(self, prompt: str, n_predict: int, stream: bool) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": n_predict, "temperature": 0, "stream": stream}

    def text(self, answer: Any) -> str:
        choice = answer["choices"][0]
        if not choice["finish_reason"]:
            raise WrongError("a choice without finish_reason")
        return str(choice["text"])

    def joined(self, events: list[str]) -> str:
        choices = [event["choices"][0] for event in parsed(undone(events)) if event["choices"]]
        one_end([i for i, choice in enumerate(choices) if choice["finish_reason"]], len(choices))
        return "".join(choice["text"] for choice in choices)


class Chat(Dialect):
    name = "chat"
    path = "/v1/chat/completions"

    def body(self, prompt: str, n_predict: int, stream: bool) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"messages": messages, "max_tokens": n_predict, "temperature": 0, "stream": stream}

    def text(self, answer: Any) -> str:
        choice = answer["choices"][0]
        if not choice["finish_reason"]:
            raise WrongError("a choice without finish_reason")
        return str(choice["message"]["content"] or "").strip()

    def joined(self, events: list[str]) -> str:
        choices = [event["choices"][0] for event in parsed(undone(events)) if event["choices"]]
        one_end([i for i, choice in enumerate(choices) if choice["finish_reason"]], len(choices))
        return "".join(choice["delta"].get("content") or "" for choice in choices).strip()


class Messages(Dialect):
    name = "messages"
    path = "/v1/messages"

    def body(self, prompt: str, n_predict: int, stream: bool) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": "any", "messages": messages, "max_tokens": n_predict, "temperature": 0, "stream": stream}

    def text(self, answer: Any) -> str:
        if not answer["stop_reason"]:
            raise WrongError("a message without stop_reason")
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text").strip()

    def joined(self, events: list[str]) -> str:
        found = parsed(events)
        one_end([i for i, event in enumerate(found) if event["type"] == "message_stop"], len(found))
        if [event["type"] for event in found].count("message_start") != 1:
            raise TwiceError("a message that did not start once")
        deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
        return "".join(delta.get("text", "") for delta in deltas).strip()


class Responses(Dialect):
    name = "responses"
    path = "/v1/responses"

    def body(self, prompt: str, n_predict: int, stream: bool) -> dict[str, Any]:
        return {"model": "any", "input": prompt, "max_output_tokens": n_predict, "temperature": 0, "stream": stream}

    def text(self, answer: Any) -> str:
        if answer["status"] not in ("completed", "incomplete"):
            raise WrongError(f"a response that is {answer['status']!r}")
        parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts).strip()

    def joined(self, events: list[str]) -> str:
        found = parsed([event for event in events if event != DONE])
        ends = ("response.completed", "response.incomplete")
        one_end([i for i, event in enumerate(found) if event["type"] in ends], len(found))
        return "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta").strip()


NATIVE = Native()
CHAT = Chat()
DIALECTS: tuple[Dialect, ...] = (NATIVE, OpenAi(), CHAT, Messages(), Responses())
