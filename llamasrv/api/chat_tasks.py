"""The task of a chat request."""

from __future__ import annotations

from pathlib import Path

from llamasrv.api.chat_params import ChatPlan
from llamasrv.api.completion import log_prompt, read_id_slot
from llamasrv.api.context import ApiContext
from llamasrv.api.ids import new_completion_id
from llamasrv.api.protocols import TaskIds
from llamasrv.engine.task import Task, TaskType


def build_chat_task(context: ApiContext, plan: ChatPlan, ids: TaskIds) -> Task:
    """One task with ``n_cmpl - 1`` children; each of them wants an answer session of its own, cloned from the plan's.

    Raises ApiError with status 400.
    """
    folder = context.params.get("path_prompts_log_dir")
    if folder:
        log_prompt(Path(folder), plan.prompt)
    params = context.schema.parse(plan.data)
    plan.apply_to(params)
    tokens = context.vocab.tokenize(plan.prompt, True, True)
    task = Task(
        id=ids.new_id(),
        type=TaskType.COMPLETION,
        id_slot=read_id_slot(plan.data, context.n_slots),
        tokens=tokens,
        user_starts=plan.user_starts(tokens),
        params=params,
        cmpl_id=new_completion_id(),
    )
    for _ in range(params.n_cmpl - 1):
        task.add_child(ids.new_id())
    return task
