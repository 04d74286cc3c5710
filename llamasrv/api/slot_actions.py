"""POST /slots/{id}?action=save|restore|erase."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.openapi_schema import STRING, Member, checked
from llamasrv.engine.result import ErrorType, Result, SlotEraseResult, SlotSaveLoadResult
from llamasrv.engine.task import SlotAction, TaskType

_TASKS = {"save": TaskType.SLOT_SAVE, "restore": TaskType.SLOT_RESTORE, "erase": TaskType.SLOT_ERASE}

#: Characters no file name may have: controls, path separators and their look-alikes, what Windows refuses,
#: surrogates, U+FFFD and the byte order mark.
_BAD_CHARACTERS = re.compile('[\x00-\x1f\x7f-\x9f/\\\\:*?"<>|\u2215\u2216\uff0e\ufffd\ufeff\ud800-\udfff]')
#: Names that are devices on Windows, with any extension.
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_MAX_BYTES = 255
#: Beside a slot file stands its record, whose name ends so.
_RECORD = ".llamasrv.json"


MEMBERS = (Member("filename", checked(STRING), "File in the folder of --slot-save-path; not for `erase`.", null=False),)


def is_valid_filename(name: str) -> bool:
    """Whether ``name`` is a plain file name on every system: no path, no device, no record, nothing stripped."""
    if not name or _BAD_CHARACTERS.search(name) or _DEVICES.fullmatch(name):
        return False
    if len(name.encode()) + len(_RECORD) > _MAX_BYTES or name.lower().endswith(_RECORD):
        return False
    return not (name[0] == " " or name[-1] in " ." or ".." in name)


def slot_task(action: str, id_slot: str, folder: str, data: Mapping[str, Any]) -> tuple[TaskType, SlotAction]:
    """What the query and body of a request ask for. ``folder``: that of --slot-save-path. Raises ApiError."""
    if not folder:
        message = "This server does not support slots action. Start it with `--slot-save-path`"
        raise ApiError(ErrorType.NOT_SUPPORTED, message)
    if not re.fullmatch(r"[0-9]{1,9}", id_slot):
        raise invalid_request("Invalid slot ID")
    type_ = _TASKS.get(action)
    if type_ is None:
        raise invalid_request("Invalid action")
    if type_ is TaskType.SLOT_ERASE:
        return type_, SlotAction(int(id_slot))
    name = data.get("filename")
    if not isinstance(name, str):
        raise invalid_request('"filename" must be a string')
    if not is_valid_filename(name):
        raise invalid_request("Invalid filename")
    return type_, SlotAction(int(id_slot), name, folder + name)


def slot_action_json(result: Result) -> dict[str, Any]:
    """The answer to a slot action that succeeded."""
    if isinstance(result, SlotEraseResult):
        return {"id_slot": result.id_slot, "n_erased": result.n_erased}
    assert isinstance(result, SlotSaveLoadResult)
    out: dict[str, Any] = {"id_slot": result.id_slot, "filename": result.filename}
    if result.is_save:
        out.update(n_saved=result.n_tokens, n_written=result.n_bytes, timings={"save_ms": result.t_ms})
    else:
        out.update(n_restored=result.n_tokens, n_read=result.n_bytes, timings={"restore_ms": result.t_ms})
    return out
