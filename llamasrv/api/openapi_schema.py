"""JSON schemas in the words of OpenAPI 3.1, and members of requests that are no fields of a completion.

A parser's module declares what it reads as a tuple of :class:`Member`, beside the code that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

#: Keyword of a value that is looked at beyond what its schema says, such as the text of a grammar.
CHECKED = "x-content-checked"

ANY: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
STRINGS: Schema = {"type": "array", "items": STRING}
TOKEN: Schema = {"$ref": "#/components/schemas/Token"}
TOKENS: Schema = {"type": "array", "items": TOKEN}


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a request's object, or of an object in it.

    One that may be absent may be null as well, which means the same; ``null`` says otherwise.
    """

    name: str
    schema: Schema
    description: str
    required: bool = False
    null: bool | None = None

    def property(self) -> Schema:
        takes_null = not self.required if self.null is None else self.null
        schema = nullable(self.schema) if takes_null else dict(self.schema)
        return {**schema, "description": self.description} if self.description else schema


def body(members: Iterable[Member], description: str = "") -> Schema:
    """The object with these members; others are passed over."""
    members = list(members)
    return object_of(
        {member.name: member.property() for member in members},
        [member.name for member in members if member.required],
        description,
    )


def object_of(properties: Mapping[str, Schema], required: Iterable[str] = (), description: str = "") -> Schema:
    schema: Schema = {"type": "object"}
    if description:
        schema["description"] = description
    if properties:
        schema["properties"] = dict(properties)
    names = list(required)
    if names:
        schema["required"] = names
    return schema


def every(**properties: Schema) -> Schema:
    """An object that has all these members."""
    return object_of(properties, properties)


def array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def integer(low: int | None = None, high: int | None = None) -> Schema:
    """A whole number within inclusive bounds."""
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}


def enum(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    """The schema of this name among the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def checked(schema: Schema) -> Schema:
    return {**schema, CHECKED: True}


def nullable(schema: Schema) -> Schema:
    """``schema`` or null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    kind = schema.get("type")
    if kind is None:
        return dict(schema)
    out = {**schema, "type": [kind, "null"] if isinstance(kind, str) else [*kind, "null"]}
    if "enum" in schema:
        out["enum"] = [*schema["enum"], None]
    return out
