"""The OpenAPI document as one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from llamasrv.api.openapi import resolve
from llamasrv.api.openapi_schema import CHECKED

_STYLE = """\
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: var(--soft); padding: .75rem; overflow-x: auto; border-radius: .3rem; }
details { border: 1px solid var(--line); border-radius: .3rem; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 4.5rem; }
summary span { opacity: .75; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid var(--line); padding: .25rem .5rem; text-align: left; vertical-align: top; }
"""


def page(document: Mapping[str, Any], origin: str) -> str:
    """``origin``: scheme and host of the server, for the commands."""
    info = document["info"]
    base = origin + document["servers"][0]["url"].rstrip("/")
    return "".join(
        [
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>",
            "<meta name=viewport content='width=device-width, initial-scale=1'>",
            f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
            f"<p>{_marked(info['description'])}</p>",
            f"<p>The same for programs: <a href='{escape(base)}/openapi.json'>openapi.json</a></p>",
            *_tags(document, base),
            "<h2>Objects</h2>",
            *_objects(document),
            "</body></html>\n",
        ]
    )


def _tags(document: Mapping[str, Any], base: str) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2><p>{_marked(tag['description'])}</p>"
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(document, base, path, method, operation)


def _operation(
    document: Mapping[str, Any], base: str, path: str, method: str, operation: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<details id='{operation['operationId']}'><summary><b>{method.upper()}</b><code>{escape(path)}</code> "
    yield f"<span>{_marked(operation['summary'])}</span></summary>"
    parameters = operation.get("parameters", ())
    if parameters:
        yield "<table><tr><th>parameter<th>in<th>type<th>meaning"
        for parameter in parameters:
            name = escape(parameter["name"]) + ("" if parameter["required"] else " (optional)")
            kind = _type(parameter["schema"])
            yield f"<tr><td><code>{name}</code><td>{parameter['in']}<td>{kind}<td>{_marked(parameter['description'])}"
        yield "</table>"
    example: Any = None
    if "requestBody" in operation:
        [(_, content)] = operation["requestBody"]["content"].items()
        example = content.get("example")
        yield f"<p>Body: {_type(content['schema'])}</p>"
    needs_key = bool(document.get("security")) and operation.get("security") != []
    yield f"<pre>{escape(_curl(base, path, method, example, needs_key))}</pre><table><tr><th>status<th>content"
    for status, response in operation["responses"].items():
        contents = resolve(document, response).get("content", {})
        shown = "<br>".join(f"{escape(kind)}: {_type(made['schema'])}" for kind, made in contents.items())
        yield f"<tr><td>{status}<td>{shown or 'none'}"
    yield "</table></details>"


def _curl(base: str, path: str, method: str, example: Any, needs_key: bool) -> str:
    path = path.replace("{id_slot}", "0?action=save").replace("{", "").replace("}", "")
    parts = ["curl -s"]
    if method.upper() not in ("GET", "POST"):
        parts.append(f"-X {method.upper()}")
    if needs_key:
        parts.append('-H "Authorization: Bearer $KEY"')
    parts.append(f"{base}{path}")
    if example is not None:
        text = json.dumps(example, ensure_ascii=False).replace("'", "'\\''")
        parts.append(f"-H 'Content-Type: application/json' -d '{text}'")
    elif method == "post":
        parts.append("-X POST")
    return " ".join(parts)


def _objects(document: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        yield f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary>"
        if "description" in schema:
            yield f"<p>{_marked(schema['description'])}</p>"
        properties = schema.get("properties")
        if properties:
            required = set(schema.get("required", ()))
            yield "<table><tr><th>member<th>type<th>meaning"
            for member, of in properties.items():
                star = " *" if member in required else ""
                yield f"<tr><td><code>{escape(member)}</code>{star}<td>{_type(of)}<td>{_meaning(of)}"
            yield "</table>"
        else:
            yield f"<p>{_type(schema)}</p>"
        yield "</details>"


def _meaning(schema: Mapping[str, Any]) -> str:
    text = _marked(schema.get("description", ""))
    if "default" in schema:
        text += f" Default: <code>{escape(json.dumps(schema['default']))}</code>."
    return text


def _type(schema: Mapping[str, Any]) -> str:
    """A few words of HTML; null is left out, as every optional member may be it."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema and "properties" not in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part != {"type": "null"})
    if "enum" in schema:
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kinds = schema.get("type", "any value")
    words = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    text = " or ".join(words)
    if words == ["array"] and schema.get("items"):
        text = f"array of ({_type(schema['items'])})"
    elif words == ["object"] and schema.get("properties"):
        inner = ", ".join(f"{escape(name)}: {_type(of)}" for name, of in schema["properties"].items())
        text = f"{{{inner}}}"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None or high is not None:
        text += f" {'' if low is None else low} to {'' if high is None else high}".rstrip()
    return f"{text} (content checked)" if schema.get(CHECKED) else text


def _marked(text: str) -> str:
    """Escaped, with code between backquotes."""
    parts = escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))
