"""Looks through a JSON schema before libllama turns it into a grammar.

The converter recurses over the schema and its references, multiplies out lists of types and takes cubic time in the
optional properties of an object; a circle of references ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Schemas within schemas, references followed.
MAX_DEPTH = 128
#: Schemas after lists of types are multiplied out.
MAX_NODES = 20_000
#: Properties of one object that are not required.
MAX_OPTIONAL = 500
#: Values of all lists "enum" together.
MAX_VALUES = 100_000
#: Entries of a list of types.
MAX_TYPES = 64
#: Characters of a property name or a reference; the converter's regular expressions recurse over them.
MAX_NAME = 1000

_SINGLE = ("items", "prefixItems", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "items", "prefixItems")


class SchemaError(ValueError):
    """The schema cannot be used; the text says why and where."""


def check(schema: Any) -> dict[str, dict[str, Any]]:
    """Raises :class:`SchemaError` if converting ``schema`` could overtax libllama.

    What is merely wrong in it is left to the converter's own message. Returns path -> schema of those whose member
    ``pattern`` the converter would use.
    """
    walk = _Walk(schema)
    walk.count(schema, "#", 0)
    return walk.patterns


class _Walk:
    def __init__(self, root: Any) -> None:
        self.patterns: dict[str, dict[str, Any]] = {}
        self._root = root
        self._refs: set[str] = set()
        self._n_values = 0

    def count(self, node: Any, path: str, depth: int) -> int:
        """Number of schemas that the converter makes of ``node``."""
        if not isinstance(node, dict):
            return 1
        if depth > MAX_DEPTH:
            raise SchemaError(f"the schema is too deep: more than {MAX_DEPTH} levels")
        if isinstance(node.get("$ref"), str):
            return self._count_target(node["$ref"], path, depth)
        total = 1
        for child_path, child in self._children(node, path):
            total += self.count(child, child_path, depth + 1)
        self._check_values(node, path)
        types = node.get("type")
        if isinstance(types, list):
            if len(types) > MAX_TYPES:
                raise SchemaError(f"a list of types is too long (limit {MAX_TYPES}) at {path}")
            total *= max(1, len(types))
        if total > MAX_NODES:
            raise SchemaError(f"the schema is too large (limit {MAX_NODES} schemas)")
        self._note_pattern(node, path)
        return total

    def _check_values(self, node: dict[str, Any], path: str) -> None:
        values = node.get("enum")
        if isinstance(values, list):
            self._n_values += len(values)
            if self._n_values > MAX_VALUES:
                raise SchemaError(f"the schema lists too many values (limit {MAX_VALUES}) at {path}")

    def _count_target(self, ref: str, path: str, depth: int) -> int:
        if len(ref) > MAX_NAME:
            raise SchemaError(f"a $ref is too long (limit {MAX_NAME} characters) at {path}")
        if ref in self._refs:
            return 1
        self._refs.add(ref)
        target = self._resolve(ref)
        passed = {ref}
        while isinstance(target, dict) and isinstance(target.get("$ref"), str):
            ref = target["$ref"]
            if ref in passed:
                raise SchemaError(f"circular $ref {ref} at {path}")
            passed.add(ref)
            depth += 1
            if depth > MAX_DEPTH:
                raise SchemaError(f"the schema is too deep: more than {MAX_DEPTH} levels")
            target = self._resolve(ref)
        return 1 + self.count(target, ref, depth + 1)

    def _resolve(self, ref: str) -> Any:
        """What ``ref`` points to, None if nothing."""
        target = self._root
        if not ref.startswith("#/"):
            return None
        for part in ref[2:].split("/"):
            if isinstance(target, dict):
                target = target.get(part)
            elif isinstance(target, list) and part.isascii() and part.isdigit() and len(part) < 10:
                target = target[int(part)] if int(part) < len(target) else None
            else:
                return None
        return target

    def _children(self, node: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for key in _SINGLE:
            if isinstance(node.get(key), dict):
                yield f"{path}/{key}", node[key]
        for key in _LISTS:
            if isinstance(node.get(key), list):
                for index, child in enumerate(node[key]):
                    yield f"{path}/{key}/{index}", child
        properties = node.get("properties")
        if isinstance(properties, dict):
            self._check_properties(node, properties, path)
            for name, child in properties.items():
                yield f"{path}/properties/{name}", child

    def _check_properties(self, node: dict[str, Any], properties: dict[str, Any], path: str) -> None:
        if any(len(name) > MAX_NAME for name in properties):
            raise SchemaError(f"a property name is too long (limit {MAX_NAME} characters) at {path}")
        required = node.get("required")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if sum(name not in names for name in properties) > MAX_OPTIONAL:
            raise SchemaError(f"an object has too many optional properties (limit {MAX_OPTIONAL}) at {path}")

    def _note_pattern(self, node: dict[str, Any], path: str) -> None:
        """Remember the pattern where the converter would use it."""
        pattern = node.get("pattern")
        if not isinstance(pattern, str) or not pattern:
            return
        if any(key in node for key in ("anyOf", "oneOf", "allOf", "const", "enum")):
            return
        if "type" not in node and any(key in node for key in ("properties", "items", "prefixItems")):
            return
        types = node.get("type", "string")
        if types == "string" or (isinstance(types, list) and "string" in types):
            self.patterns[path] = node
