"""Values of JSON schemas, as far as the server's own document uses the language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

_KNOWN = {
    "type", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items", "prefixItems",
    "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "minProperties", "maxProperties", "pattern",
    "description", "default", "x-content-checked", "$ref",
}  # fmt: skip

_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
#: What stands where a schema says nothing.
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)


def values(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """``schemas``: those that a ``$ref`` may name."""
    unknown = set(schema) - _KNOWN
    assert not unknown, f"no values can be made for {unknown}"
    if "$ref" in schema:
        return values(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema and "type" not in schema:
        return st.one_of([values(part, schemas) for part in schema["anyOf"]])
    kinds = schema.get("type")
    if kinds is None:
        return _ANY
    return st.one_of([_of_type(kind, schema, schemas) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _of_type(kind: str, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**64 - 1)
            return st.integers(low, high) | st.sampled_from([low, high])
        case "number":
            low, high = schema.get("minimum"), schema.get("maximum")
            return st.floats(low, high, allow_nan=False, allow_infinity=False)
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", 8)
            return st.text(st.characters(codec="utf-8"), min_size=least, max_size=max(least, min(most, 8)))
        case "array":
            return _array(schema, schemas)
    return _object(schema, schemas)


def _array(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "prefixItems" in schema:
        return st.tuples(*(values(item, schemas) for item in schema["prefixItems"])).map(list)
    least = schema.get("minItems", 0)
    items = values(schema.get("items", {}), schemas)
    return st.lists(items, min_size=least, max_size=min(schema.get("maxItems", 3), least + 3))


def _object(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    required = schema.get("required", ())
    properties = {name: values(of, schemas) for name, of in schema.get("properties", {}).items()}
    known = st.fixed_dictionaries(
        {name: properties[name] for name in required},
        optional={name: of for name, of in properties.items() if name not in required},
    )
    least = schema.get("minProperties", 0)
    others = st.dictionaries(
        _TEXT.filter(lambda name: name not in properties),
        values(schema.get("additionalProperties", {}), schemas),
        min_size=least,
        max_size=least + 2,
    )
    return st.builds(lambda more, own: {**more, **own}, others, known)
