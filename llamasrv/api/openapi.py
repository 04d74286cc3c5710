"""The OpenAPI document of the server, made from the declarations of routes, members and fields."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from llamasrv.api.openapi_requests import Facts, request_schemas
from llamasrv.api.openapi_responses import response_schemas
from llamasrv.api.openapi_routes import JSON, OPERATIONS, Operation, Parameter, predictions
from llamasrv.api.openapi_schema import OBJECT, Schema, ref

VERSION = "3.1.0"
_ABOUT = """\
The endpoints of llama-server. Members that a request may leave out may be null as well; unknown members are passed
over. Values marked `x-content-checked` are looked at beyond their schema, for example whether a grammar can be parsed.
Every response has the header `X-Request-Id`: what the request had in it, or a new name.
Every error is JSON of the form `{"error": {"code", "message", "type"}}`."""
_TAGS = {
    "Completions": "Text that goes on where a prompt ends.",
    "Chats": "Answers to messages, in the dialects of OpenAI and Anthropic.",
    "Vectors": "Embeddings and the rating of documents.",
    "Decisions": "Typed questions to decision models.",
    "Tokens": "Text to tokens and back.",
    "Adapters": "LoRA adapters.",
    "Streams": "Streams that outlive their connection.",
    "Server": "State, health, figures.",
    "Page": "For the web page alone.",
    "Manual": "What you are reading.",
    "Vertex AI": "Predictions.",
}
#: Statuses of every route: a body too large, headers too large, and while the model loads or the server ends.
_ALWAYS = (503,)
_WITH_BODY = (413,)
_PARAMETER = re.compile(r"<(?:\w+:)?(\w+)>")


def operations_of(
    registered: Collection[tuple[str, str]], vertex: tuple[str, str] | None = None
) -> tuple[list[Operation], list[tuple[str, str]]]:
    """The declarations of the registered ``(method, path)``, in their own order, and those that have none.

    ``vertex``: its path of predictions and of health.
    """
    declared = (*OPERATIONS, *(predictions(*vertex) if vertex is not None else ()))
    known = {(operation.method, operation.path) for operation in declared}
    found = [operation for operation in declared if (operation.method, operation.path) in registered]
    return found, [route for route in registered if route not in known]


def document(operations: Iterable[Operation], facts: Facts, version: str, prefix: str, has_keys: bool) -> Schema:
    """``prefix``: before every path. ``has_keys``: whether requests need one."""
    operations = list(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        item = paths.setdefault(openapi_path(operation.path), {})
        item[operation.method.lower()] = _operation(operation, has_keys)
    schemas = {**request_schemas(facts), **response_schemas(), "Document": OBJECT}
    statuses = sorted({status for operation in operations for status in _statuses(operation, has_keys)})
    components: dict[str, Any] = {
        "schemas": dict(sorted(schemas.items())),
        "responses": {_status_name(status): _error(status) for status in statuses},
    }
    out: dict[str, Any] = {
        "openapi": VERSION,
        "info": {"title": "llamasrv", "version": version, "description": _ABOUT, "license": {"name": "MIT"}},
        "servers": [{"url": prefix or "/"}],
        "tags": [
            {"name": name, "description": about}
            for name, about in _TAGS.items()
            if any(operation.tag == name for operation in operations)
        ],
        "paths": paths,
        "components": components,
    }
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        out["security"] = [{"bearer": []}, {"key": []}]
    return out


def openapi_path(path: str) -> str:
    """``/slots/{id_slot}`` of ``/slots/<id_slot>``."""
    return _PARAMETER.sub(r"{\1}", path)


def _operation(operation: Operation, has_keys: bool) -> Schema:
    out: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "tags": [operation.tag],
        "summary": operation.summary,
    }
    if operation.description:
        out["description"] = operation.description
    if operation.parameters:
        out["parameters"] = [_parameter(parameter) for parameter in operation.parameters]
    if operation.body:
        content: dict[str, Any] = {"schema": ref(operation.body)}
        if operation.example is not None:
            content["example"] = operation.example
        out["requestBody"] = {"required": operation.needs_body, "content": {JSON: content}}
    out["responses"] = {
        str(operation.status): _success(operation),
        **{
            str(status): {"$ref": f"#/components/responses/{_status_name(status)}"}
            for status in _statuses(operation, has_keys)
        },
    }
    if has_keys and operation.is_public:
        out["security"] = []
    return out


def _operation_id(operation: Operation) -> str:
    words = re.findall(r"[A-Za-z0-9]+", operation.path)
    return "_".join([operation.method.lower(), *words])


def _parameter(parameter: Parameter) -> Schema:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.description,
        "required": parameter.required,
        "schema": parameter.schema,
    }


def _success(operation: Operation) -> Schema:
    out: dict[str, Any] = {"description": HTTPStatus(operation.status).phrase}
    content: dict[str, Any] = {}
    if operation.answer:
        content[JSON] = {"schema": ref(operation.answer)}
    content.update((kind, {"schema": schema}) for kind, schema in operation.other)
    if content:
        out["content"] = content
    return out


def _statuses(operation: Operation, has_keys: bool) -> list[int]:
    """Statuses of its errors."""
    statuses = {*operation.errors, *_ALWAYS}
    if operation.body:
        statuses.update(_WITH_BODY)
    if has_keys and not operation.is_public:
        statuses.add(401)
    return sorted(statuses)


def _status_name(status: int) -> str:
    return HTTPStatus(status).name.title().replace("_", "")


def _error(status: int) -> Schema:
    return {"description": HTTPStatus(status).phrase, "content": {JSON: {"schema": ref("Error")}}}


def resolve(found: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a ``$ref`` within the document ``found`` points to; any other schema itself."""
    name = schema.get("$ref")
    if not isinstance(name, str):
        return schema
    target: Any = found
    for part in name.removeprefix("#/").split("/"):
        target = target[part]
    return dict(target)
