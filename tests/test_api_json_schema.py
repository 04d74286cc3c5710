"""JSON schemas that the converter could not survive; patterns put into its words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_fakes import FakeTools, FakeVocab

from llamasrv.api import json_schema
from llamasrv.api.grammar import GrammarUse
from llamasrv.api.pattern import rewrite


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(length: int) -> dict[str, Any]:
    links = {f"r{i}": {"items": {"$ref": f"#/$defs/r{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/r0", "$defs": {**links, f"r{length}": {"type": "null"}}}


def bare_chain(length: int) -> dict[str, Any]:
    links = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/r0", "$defs": {**links, f"r{length}": {"type": "null"}}}


def doubling(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "null"}}}
    for _ in range(depth):
        schema = {"type": ["object", "object"], "properties": {"a": schema}}
    return schema


CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (nested(json_schema.MAX_DEPTH + 1), "too deep"),
        (chain(5_000), "too deep"),
        (bare_chain(5_000), "too deep"),
        (CIRCLE, "circular $ref"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}, "circular $ref"),
        (doubling(30), "too large"),
        ({"properties": {f"p{i}": {} for i in range(json_schema.MAX_OPTIONAL + 1)}}, "optional properties"),
        ({"properties": {" " * 100_000: {}}}, "property name is too long"),
        ({"$ref": "#/" + " " * 100_000}, "$ref is too long"),
    ],
)
def test_schemas_that_would_end_the_process_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(json_schema.SchemaError) as caught:
        json_schema.check(schema)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        nested(50),
        chain(50),
        doubling(5),
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}},
        {"$ref": "http://example.com/x"},
        {"$ref": "#/nowhere/0"},
        {"properties": {f"p{i}": {} for i in range(2_000)}, "required": [f"p{i}" for i in range(2_000)]},
        {"enum": [[[[[1]]]]]},
    ],
)
def test_other_schemas_are_left_to_the_converter(schema: Any) -> None:
    json_schema.check(schema)


def test_patterns_are_found_where_they_count() -> None:
    used = {"type": "string", "pattern": "^a$"}
    schema = {
        "properties": {
            "used": used,
            "bare": {"pattern": "^b$"},
            "list": {"type": ["string", "null"], "pattern": "^c$"},
            "number": {"type": "number", "pattern": "^d$"},
            "fixed": {"enum": ["x"], "pattern": "^e$"},
        }
    }
    found = json_schema.check(schema)
    assert {path: node["pattern"] for path, node in found.items()} == {
        "#/properties/used": "^a$",
        "#/properties/bare": "^b$",
        "#/properties/list": "^c$",
    }
    assert found["#/properties/used"] is used


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^\d{4}-\d{2}$", "^[0-9]{4}-[0-9]{2}$"),
        (r"^[\w.+-]+@[\w-]+\.com$", r"^[A-Za-z0-9_.+-]+@[A-Za-z0-9_-]+\.com$"),
        (r"^ready\!$", "^ready!$"),
        (r"^a\\$", r"^a\\$"),
        (r"^\(x\)\s\/$", r"^\(x\)[ ]/$"),
        ("^a(b|c)$", "^a(b|c)$"),
        (r"^\bfoo$", r"^\bfoo$"),
    ],
)
def test_patterns_lose_what_the_converter_does_not_know(pattern: str, expected: str) -> None:
    assert rewrite(pattern) == expected


PLAIN = r'[^"\\\x00-\x1F]'


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a|b", f"^{PLAIN}*(a|b){PLAIN}*$"),
        ("^a", f"^(a){PLAIN}*$"),
        ("a$", f"^{PLAIN}*(a)$"),
        (r"^a\$", rf"^(a\$){PLAIN}*$"),
        ("", f"^{PLAIN}*$"),
        ("^.$", f"^{PLAIN}$"),
        ("^[^a-]$", r'^[^"\\\x00-\x1Fa-]$'),
    ],
)
def test_patterns_are_anchored_and_keep_to_plain_characters(pattern: str, expected: str) -> None:
    assert rewrite(pattern) == expected


class PatternTools(FakeTools):
    """As the library: a pattern that it cannot express becomes any string."""

    def json_schema_to_grammar(self, schema: str) -> str:
        super().json_schema_to_grammar(schema)
        return 'root ::= string\nstring ::= "x"' if r"\b" in schema or "(?=" in schema else 'root ::= "x"'


def test_a_pattern_that_would_be_ignored_is_refused_with_its_place() -> None:
    grammars = GrammarUse(PatternTools(), FakeVocab())
    schema = {"properties": {"when": {"type": "string", "pattern": "^(?=x)y$"}}}
    with pytest.raises(ValueError, match=r"'\^\(\?=x\)y\$' at #/properties/when is not supported"):
        grammars.from_json_schema(schema)


def test_the_clients_schema_is_not_changed_by_rewriting_its_patterns() -> None:
    tools = PatternTools()
    schema = {"type": "string", "pattern": r"^\d$"}
    GrammarUse(tools, FakeVocab()).from_json_schema(schema)
    assert schema == {"type": "string", "pattern": r"^\d$"}
    assert json.loads(tools.schemas[-1])["pattern"] == "^[0-9]$"


def test_equal_grammars_and_schemas_are_worked_on_once() -> None:
    tools = FakeTools()
    grammars = GrammarUse(tools, FakeVocab())
    for _ in range(3):
        grammars.check('root ::= "x"')
        grammars.from_json_schema({"type": "integer"})
    assert (len(tools.schemas), len(tools.grammars)) == (1, 2)
