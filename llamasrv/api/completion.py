"""Tasks of a completion request in the native dialect."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamasrv.api.context import ApiContext
from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import FieldError, as_int
from llamasrv.api.ids import new_completion_id
from llamasrv.api.jsonio import dumps
from llamasrv.api.openapi_schema import INTEGER, STRING, Member
from llamasrv.api.prompt import PROMPT, tokenize_prompts
from llamasrv.api.protocols import TaskIds
from llamasrv.api.sizes import check_prompt_sizes
from llamasrv.engine.log import srv_err
from llamasrv.engine.task import Task, TaskType

#: Members of a request beside the fields of :mod:`llamasrv.api.schema`.
MEMBERS = (
    Member("prompt", PROMPT, "Text, tokens, or both in a list; a list of such is a completion for each.", True),
    Member("id_slot", INTEGER, "Slot to use, counted modulo their number; -1: any."),
    Member("grammar_type", STRING, "`tool_calls`: the grammar is one of tool calls."),
)


def build_completion_tasks(
    context: ApiContext, data: Mapping[str, Any], ids: TaskIds, type: TaskType = TaskType.COMPLETION
) -> list[Task]:
    """One task per prompt, with ``n_cmpl - 1`` children each. Raises ApiError with status 400."""
    if "prompt" not in data:
        raise invalid_request("key 'prompt' not found")
    prompt = data["prompt"]
    folder = context.params.get("path_prompts_log_dir")
    if folder:
        log_prompt(Path(folder), prompt)

    prompts = tokenize_prompts(context.vocab, prompt)
    params = context.schema.parse(data)
    id_slot = read_id_slot(data, context.n_slots)
    if len(prompts) > 1:
        # one that is too long must not end a stream of the others in the middle
        check_prompt_sizes(context.meta, [len(tokens) for tokens in prompts])
    cmpl_id = new_completion_id()
    tasks = []
    for tokens in prompts:
        task = Task(id=ids.new_id(), type=type, id_slot=id_slot, tokens=tokens, params=params, cmpl_id=cmpl_id)
        for _ in range(params.n_cmpl - 1):
            task.add_child(ids.new_id())
        tasks.append(task)
    return tasks


def read_id_slot(data: Mapping[str, Any], n_slots: int) -> int:
    """Slot that the request asks for, -1 for any; numbers beyond the slots begin again at 0."""
    value = data.get("id_slot")
    if value is None:
        return -1
    try:
        id_slot = as_int(value)
    except FieldError as error:
        raise invalid_request(f"Field 'id_slot': {error}") from None
    return -1 if id_slot == -1 else id_slot % n_slots


def log_prompt(folder: Path, prompt: Any) -> None:
    """Write the prompt into a new file of ``folder``, named by the clock."""
    path = folder / f"{time.monotonic_ns() // 1_000_000:012d}.txt"
    try:
        path.write_bytes(prompt.encode() if isinstance(prompt, str) else dumps(prompt))
    except OSError as error:
        srv_err("log_prompt", "failed to create %s: %s", path, error)
