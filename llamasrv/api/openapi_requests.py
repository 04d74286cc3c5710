"""Schemas of request bodies, made from the declarations of their members."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llamasrv.api import chat_control, chat_params, completion, embeddings, infill, lora, rerank, slot_actions, tokenize
from llamasrv.api.anthropic import request as anthropic
from llamasrv.api.chat_messages import MESSAGE
from llamasrv.api.chat_tools import TOOL
from llamasrv.api.decision import question
from llamasrv.api.fields import INT32_MAX, Field, Kind, load
from llamasrv.api.openapi_schema import (
    BOOLEAN,
    OBJECT,
    STRING,
    STRINGS,
    Member,
    Schema,
    array,
    body,
    checked,
    integer,
    nullable,
    object_of,
)
from llamasrv.api.responses import request as responses
from llamasrv.api.schema import FIELDS
from llamasrv.api.timeout import TIMEOUT
from llamasrv.engine.task import TaskParams

#: Fields of a completion that mean nothing where a chat is answered, or are given by its template.
_NOT_IN_CHATS = frozenset({"prompt", "grammar_lazy", "grammar_triggers", "preserved_tokens"})
#: Kinds whose defaults are plain values.
_PLAIN = (Kind.BOOL, Kind.INT, Kind.FLOAT)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the document says of the running server; None before the model is loaded."""

    n_slots: int = 1
    n_vocab: int | None = None
    n_embd: int | None = None
    defaults: TaskParams | None = None


def request_schemas(facts: Facts) -> dict[str, Schema]:
    """Name -> schema of every request, and of what they share."""
    fields = [*completion_members(facts), TIMEOUT]
    token = integer(0, None if facts.n_vocab is None else facts.n_vocab - 1)
    one_of = {"anyOf": [{"required": ["input"]}, {"required": ["content"]}]}
    documents = {"anyOf": [{"required": ["documents"]}, {"required": ["texts"]}]}
    vectors = body((*embeddings.MEMBERS, TIMEOUT))
    if facts.n_embd:
        vectors["properties"]["dimensions"]["maximum"] = facts.n_embd
    for_chats = [member for member in fields if member.name not in _NOT_IN_CHATS]
    for_responses = [member for member in for_chats if member.name not in responses.CONSUMED]
    return {
        "Token": {**token, "description": "Id of a token of the vocabulary."},
        "ChatMessage": MESSAGE,
        "ChatTool": TOOL,
        "CompletionRequest": body(_merged(completion.MEMBERS, fields)),
        "InfillRequest": body(_merged(infill.MEMBERS, completion.MEMBERS, fields)),
        "ChatRequest": body(_merged(chat_params.MEMBERS, completion.MEMBERS[1:2], for_chats)),
        "ResponsesRequest": body(_merged(responses.MEMBERS, completion.MEMBERS[1:2], for_responses)),
        "MessagesRequest": body((*anthropic.MEMBERS, TIMEOUT)),
        "EmbeddingsRequest": {**vectors, **one_of},
        "RerankRequest": {**body((*rerank.MEMBERS, TIMEOUT)), **documents},
        "DecisionRequest": body((*question.MEMBERS, TIMEOUT)),
        "TokenizeRequest": body(tokenize.TOKENIZE_MEMBERS),
        "DetokenizeRequest": body(tokenize.DETOKENIZE_MEMBERS),
        "LoraAdaptersRequest": lora.BODY,
        "SlotActionRequest": body(slot_actions.MEMBERS),
        "ControlRequest": body(chat_control.MEMBERS),
        "LookupRequest": object_of({"conversation_ids": STRINGS}),
        "PropsRequest": OBJECT,
        "PredictRequest": object_of(
            {"instances": array(object_of({"@requestFormat": checked(STRING)}, ["@requestFormat"]), maxItems=128)},
            ["instances"],
        ),
    }


def completion_members(facts: Facts) -> Iterable[Member]:
    """The declared fields, each under all of its names; those that lie in an object in one member for it."""
    groups: dict[str, dict[str, Schema]] = {}
    for field in FIELDS:
        schema, about = field_schema(field, facts), _description(field)
        if field.group:
            groups.setdefault(field.group, {})[field.name] = {**nullable(schema), "description": about}
            continue
        yield Member(field.name, schema, about)
        for alias in field.aliases:
            yield Member(alias, schema, f"Another name of `{field.name}`, which goes before.")
    for group, properties in groups.items():
        yield Member(group, object_of(properties), "")


def field_schema(field: Field, facts: Facts) -> Schema:
    """Schema of the values that a field takes, without null. A clamped field takes whatever is out of bounds."""
    schema = dict(field.schema) if field.schema is not None else _by_kind(field, facts)
    default = _default(field, facts)
    return schema if default is None else {**schema, "default": default}


def _by_kind(field: Field, facts: Facts) -> Schema:
    if field.kind is Kind.BOOL:
        return dict(BOOLEAN)
    schema: Schema = {"type": field.kind.value}
    limits = field.limits_of(facts.n_slots) if field.limits_of is not None else field.limits
    if limits is None and field.kind is Kind.INT and field.handler is None:
        return integer(-INT32_MAX - 1, INT32_MAX)
    if limits is not None and not limits.clamp:
        schema.update(minimum=limits.low, maximum=limits.high)
    return schema


def _default(field: Field, facts: Facts) -> Any:
    """The server's own setting, where it is plain."""
    if facts.defaults is None or not field.target or field.kind not in _PLAIN:
        return None
    value = load(facts.defaults, field.target)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _description(field: Field) -> str:
    limits = field.limits
    if limits is None or not limits.clamp:
        return field.description
    return f"{field.description} Values outside of {limits.low:g} to {limits.high:g} become the bound."


def _merged(*parts: Iterable[Member]) -> list[Member]:
    """Members by name; what comes first counts."""
    found: dict[str, Member] = {}
    for part in parts:
        for member in part:
            found.setdefault(member.name, member)
    return list(found.values())
