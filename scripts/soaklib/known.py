"""Prompts whose greedy answers were taken from the quiet server before the load.

A text counts as known if no token of it was a close decision: batches of other sizes compute with other rounding, and
a near tie may fall either way without anybody being at fault.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadgen import WORDS
from soaklib.dialects import DIALECTS, Dialect
from soaklib.wire import Address, Connection, WrongError, ask

#: Distance of the two most likely tokens below which a decision is close, in logits.
CLOSE = 0.1
N_PREDICT = (2, 6, 12)


@dataclass(frozen=True, slots=True)
class Known:
    """What ``dialect`` answers to this prompt."""

    dialect: Dialect
    prompt: str
    n_predict: int
    text: str

    def body(self, stream: bool, **more: Any) -> dict[str, Any]:
        return {**self.dialect.body(self.prompt, self.n_predict, stream), **more}

    def check(self, text: str) -> None:
        if text != self.text:
            raise WrongError(f"{self.dialect.name} of {self.prompt[:60]!r}: {text!r} instead of {self.text!r}")


def _prompts(chance: random.Random) -> Iterator[str]:
    words = WORDS.split()
    while True:
        # some begin alike, so that prefixes are shared
        begin = chance.choice(("", "", "Tell me about the ", "Once upon a time there was an "))
        yield begin + " ".join(chance.choices(words, k=chance.choice((1, 3, 8, 30))))


async def streamed(address: Address, dialect: Dialect, body: object) -> str:
    """Text of a stream that is read to its end. Raises as ``wire`` does."""
    connection = await Connection.open(address)
    try:
        await connection.ask("POST", dialect.path, body)
        if await connection.head() != 200:
            raise WrongError(f"status {connection.status} for a stream: {(await connection.body())[:200]!r}")
        events = [event async for event in connection.events()]
        await connection.end()
        return dialect.joined(events)
    finally:
        connection.close()


async def plain(address: Address, dialect: Dialect, body: object) -> str:
    reply = await ask(address, "POST", dialect.path, body)
    if reply.status != 200:
        raise WrongError(f"status {reply.status} for {dialect.name}: {reply.body[:200]!r}")
    return dialect.text(reply.json())


async def learn(address: Address, chance: random.Random, per_dialect: int) -> list[Known]:
    """Ask the quiet server. Raises WrongError if too few prompts have an answer that is no matter of rounding."""
    out: list[Known] = []
    for dialect in DIALECTS:
        found = 0
        for prompt, _ in zip(_prompts(chance), range(20 * per_dialect), strict=False):
            if found == per_dialect:
                break
            n_predict = chance.choice(N_PREDICT)
            if not await _is_clear(address, dialect, prompt, n_predict):
                continue
            body = dialect.body(prompt, n_predict, stream=False)
            text = await plain(address, dialect, {**body, "cache_prompt": False})
            # an incomplete character at the end may be shown in different ways
            if text and "\ufffd" not in text:
                out.append(Known(dialect, prompt, n_predict, text))
                found += 1
        if found < per_dialect:
            raise WrongError(f"only {found} prompts of {dialect.name} have an answer that rounding cannot change")
    return out


async def _is_clear(address: Address, dialect: Dialect, prompt: str, n_predict: int) -> bool:
    """Whether no token of the answer is a close decision, as the native route tells."""
    if dialect.path not in ("/completion", "/v1/completions"):
        messages = [{"role": "user", "content": prompt}]
        prompt = (await ask(address, "POST", "/apply-template", {"messages": messages})).json()["prompt"]
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "n_probs": 2, "cache_prompt": False}
    answer = (await ask(address, "POST", "/completion", body)).json()
    for token in answer["completion_probabilities"]:
        first, second = (entry["logprob"] for entry in token["top_logprobs"])
        if first - second < CLOSE:
            return False
    return bool(answer["completion_probabilities"]) and json.dumps(answer["content"]).isascii()
