"""Visits that want something and wait for it."""

from __future__ import annotations

import json
from typing import Any

from loadgen import WORDS
from soaklib.dialects import CHAT, DIALECTS, NATIVE, Dialect
from soaklib.ledger import ANSWERED, BUSY
from soaklib.server import N_SLOTS
from soaklib.visit import Kind, Visit, is_busy, json_of, refused
from soaklib.wire import Connection, WrongError, ask

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["amber", "dune"]}, "good": {"type": "boolean"}},
    "required": ["name", "good"],
    "additionalProperties": False,
}


def words(visit: Visit, count: int) -> str:
    return " ".join(visit.chance.choices(WORDS.split(), k=count))


async def post(visit: Visit, path: str, body: object) -> Any:
    """The JSON of an answer, or None if the server is busy. Raises as ``wire`` does."""
    reply = await ask(visit.address, "POST", path, body)
    return None if is_busy(reply) else json_of(reply)


def text_visit(dialect: Dialect, stream: bool, weight: float) -> Kind:
    """A known prompt; the text must be the known one."""

    async def run(visit: Visit) -> str:
        known = visit.known(dialect)
        more = {"cache_prompt": visit.chance.random() < 0.7}
        connection = await Connection.open(visit.address)
        try:
            await connection.ask("POST", dialect.path, known.body(stream, **more))
            if await connection.head() == 200 and stream:
                text = dialect.joined([event async for event in connection.events()])
            else:
                reply = await connection.rest()
                if is_busy(reply):
                    return BUSY
                text = dialect.text(json_of(reply))
            await connection.end()
        finally:
            connection.close()
        known.check(text)
        return ANSWERED

    return Kind(f"{dialect.name}, {'stream' if stream else 'plain'}", weight, run)


async def sampled(visit: Visit) -> str:
    """No known text, but exactly as many tokens as asked for."""
    n_predict = visit.chance.randint(1, 40)
    body = {
        "prompt": words(visit, visit.chance.randint(1, 40)),
        "n_predict": n_predict,
        "ignore_eos": True,
        "temperature": visit.chance.choice([0.5, 1.0, 2.0]),
        "n_probs": visit.chance.choice([0, 0, 3]),
        "return_tokens": True,
    }
    answer = await post(visit, "/completion", body)
    if answer is None:
        return BUSY
    if answer["tokens_predicted"] != n_predict or len(answer["tokens"]) != n_predict:
        raise WrongError(f"{answer['tokens_predicted']} tokens instead of {n_predict}")
    return ANSWERED


async def several(visit: Visit) -> str:
    """Several answers to one prompt, all of them the known one."""
    known = visit.known(NATIVE)
    count = visit.chance.randint(2, N_SLOTS)
    answers = await post(visit, NATIVE.path, known.body(False, n_cmpl=count))
    if answers is None:
        return BUSY
    if [answer["index"] for answer in answers] != list(range(count)):
        raise WrongError(f"answers {[answer['index'] for answer in answers]} instead of {count}")
    for answer in answers:
        known.check(NATIVE.text(answer))
    return ANSWERED


async def pinned(visit: Visit) -> str:
    known = visit.known(NATIVE)
    slot = visit.chance.randrange(N_SLOTS)
    answer = await post(visit, NATIVE.path, known.body(False, id_slot=slot))
    if answer is None:
        return BUSY
    if answer["id_slot"] != slot:
        raise WrongError(f"slot {answer['id_slot']} instead of {slot}")
    known.check(NATIVE.text(answer))
    return ANSWERED


async def grammar(visit: Visit) -> str:
    body = {"prompt": words(visit, 5), "n_predict": 24, "grammar": 'root ::= "yes" | "no" | "may" "be"?'}
    answer = await post(visit, "/completion", {**body, "temperature": 1.5})
    if answer is None:
        return BUSY
    if answer["content"] not in ("yes", "no", "may", "maybe"):
        raise WrongError(f"the grammar does not allow {answer['content']!r}")
    return ANSWERED


async def schema(visit: Visit) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    body = {**CHAT.body(words(visit, 5), 80, stream=False), "response_format": form}
    answer = await post(visit, CHAT.path, body)
    if answer is None:
        return BUSY
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        found = json.loads(choice["message"]["content"])
        if set(found) != {"name", "good"} or found["name"] not in ("amber", "dune") or type(found["good"]) is not bool:
            raise WrongError(f"the schema does not allow {found!r}")
    return ANSWERED


async def tokens(visit: Visit) -> str:
    text = words(visit, visit.chance.randint(1, 200))
    found = await post(visit, "/tokenize", {"content": text})
    if found is None:
        return BUSY
    back = await post(visit, "/detokenize", {"tokens": found["tokens"]})
    if back is None:
        return BUSY
    if back["content"].strip() != text:
        raise WrongError(f"{text[:80]!r} came back as {back['content'][:80]!r}")
    return ANSWERED


async def embeddings(visit: Visit) -> str:
    """This server makes text, no embeddings: always refused."""
    reply = await ask(visit.address, "POST", "/v1/embeddings", {"input": words(visit, 5), "model": "any"})
    return refused(reply, 501)


async def long_prompt(visit: Visit) -> str:
    """A prompt of a good part of a slot's context, or one that is too long for it."""
    if visit.chance.random() < 0.3:
        body = {"prompt": [7] * (visit.scene.n_ctx + 1), "n_predict": 4}
        reply = await ask(visit.address, "POST", "/completion", body)
        outcome = refused(reply, 400)
        if outcome != BUSY and reply.json()["error"]["type"] != "exceed_context_size_error":
            raise WrongError(f"an error of another type: {reply.body[:200]!r}")
        return outcome
    n_prompt = visit.chance.randint(visit.scene.n_ctx // 8, visit.scene.n_ctx // 3)
    prompt = [visit.chance.randrange(10, 250) for _ in range(n_prompt)]
    answer = await post(visit, "/completion", {"prompt": prompt, "n_predict": 4, "ignore_eos": True})
    if answer is None:
        return BUSY
    if answer["tokens_predicted"] != 4 or answer["truncated"]:
        raise WrongError(f"{answer['tokens_predicted']} tokens instead of 4")
    return ANSWERED


async def several_on_one_connection(visit: Visit) -> str:
    """Three requests one after the other, the second and third sent before the first is answered."""
    known = [visit.known() for _ in range(3)]
    connection = await Connection.open(visit.address)
    try:
        for i, each in enumerate(known):
            await connection.ask("POST", each.dialect.path, each.body(False), keep=i < 2)
        for each in known:
            reply = await connection.reply()
            if is_busy(reply):
                return BUSY
            each.check(each.dialect.text(json_of(reply)))
        await connection.end()
    finally:
        connection.close()
    return ANSWERED


async def monitor(visit: Visit) -> str:
    """What people look at meanwhile."""
    for path in ("/health", "/v1/models", "/props", "/slots"):
        json_of(await ask(visit.address, "GET", path))
    return ANSWERED


KINDS = (
    *(text_visit(dialect, False, 6 if dialect in (NATIVE, CHAT) else 3) for dialect in DIALECTS),
    *(text_visit(dialect, True, 6 if dialect in (NATIVE, CHAT) else 3) for dialect in DIALECTS),
    Kind("sampled", 4, sampled),
    Kind("n_cmpl", 3, several),
    Kind("pinned slot", 3, pinned),
    Kind("grammar", 2, grammar),
    Kind("schema", 2, schema),
    Kind("tokenize, detokenize", 3, tokens),
    Kind("embeddings refused", 1, embeddings),
    Kind("long prompt", 1, long_prompt),
    Kind("pipelined", 2, several_on_one_connection),
    Kind("health, models, props, slots", 2, monitor),
)
