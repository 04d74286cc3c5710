"""GET and POST /lora-adapters."""

from __future__ import annotations

from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import INT32_MAX, FieldError
from llamasrv.api.handlers import lora_scales
from llamasrv.api.jsonio import to_text
from llamasrv.api.openapi_schema import NUMBER, array, integer, nullable, object_of
from llamasrv.engine.result import GetLoraResult

#: Body of POST.
BODY = array(object_of({"id": integer(-1, INT32_MAX), "scale": nullable(NUMBER)}, ["id"]))


def lora_json(result: GetLoraResult) -> list[dict[str, Any]]:
    """The adapters with the scales that a request gets if it names none itself."""
    out = []
    for info in result.loras:
        entry: dict[str, Any] = {
            "id": info.id,
            "path": info.path,
            "scale": info.scale,
            "task_name": info.task_name,
            "prompt_prefix": info.prompt_prefix,
        }
        if info.alora_invocation_tokens:
            entry["alora_invocation_string"] = to_text(info.alora_invocation_string)
            entry["alora_invocation_tokens"] = info.alora_invocation_tokens
        out.append(entry)
    return out


def parse_lora(value: Any) -> dict[int, float]:
    """Scales by adapter index from the body of a POST. Raises ApiError with status 400."""
    if not isinstance(value, list):
        raise invalid_request("Request body must be an array")
    try:
        return lora_scales(value)
    except FieldError as error:
        raise invalid_request(str(error)) from None
