"""POST /v1/chat/completions/control: to act on a completion while it is generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.openapi_schema import Member, enum
from llamasrv.api.protocols import TaskIds
from llamasrv.engine.result import ControlResult
from llamasrv.engine.task import Task, TaskType

_ACTIONS = frozenset({"reasoning_end"})


MEMBERS = (
    Member("id", {"type": "string", "minLength": 1}, "The completion's `id`.", True),
    Member("action", enum(*sorted(_ACTIONS)), "`reasoning_end` ends the reasoning.", True),
)


def control_task(data: Mapping[str, Any], ids: TaskIds) -> Task:
    """The task for ``{"id": name of the completion, "action"}``. Raises ApiError with status 400."""
    cmpl_id, action = data.get("id"), data.get("action")
    if not isinstance(cmpl_id, str) or not cmpl_id:
        raise invalid_request("missing completion id")
    if not isinstance(action, str) or action not in _ACTIONS:
        raise invalid_request("unknown control action")
    return Task(id=ids.new_id(), type=TaskType.CONTROL, control_cmpl_id=cmpl_id, control_action=action)


def control_json(result: ControlResult) -> dict[str, Any]:
    out: dict[str, Any] = {"success": result.success}
    if result.message:
        out["message"] = result.message
    return out
