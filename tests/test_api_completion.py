"""Tasks of a completion request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_fakes import BOS, FakeIds, FakeServer, FakeTools, FakeVocab, api_context

from llamasrv.api.completion import build_completion_tasks
from llamasrv.api.context import ApiContext
from llamasrv.api.errors import ApiError
from llamasrv.engine.task import Task, TaskType


def build(_server: dict[str, Any] | None = None, **data: Any) -> list[Task]:
    return build_completion_tasks(api_context(**(_server or {})), data, FakeIds())


def refused(**data: Any) -> str:
    with pytest.raises(ApiError) as caught:
        build(**data)
    assert caught.value.status == 400
    return caught.value.message


def test_one_task_per_prompt_with_the_same_settings() -> None:
    tasks = build(prompt=["a", [1, 2]], top_k=3)
    assert [task.tokens for task in tasks] == [[BOS, ord("a")], [1, 2]]
    assert [task.type for task in tasks] == [TaskType.COMPLETION] * 2
    assert [task.params.sampling.top_k for task in tasks] == [3, 3]
    assert [task.id for task in tasks] == [10, 11]


def test_further_completions_are_children_with_seeds_of_their_own() -> None:
    (task,) = build(prompt="a", n_cmpl=3, seed=7)
    assert [child.id_parent for child in task.child_tasks] == [task.id] * 2
    assert [child.tokens for child in task.child_tasks] == [task.tokens] * 2
    assert [part.params.sampling.seed for part in (task, *task.child_tasks)] == [7, 8, 9]


def test_all_tasks_of_a_request_share_a_name_of_its_own() -> None:
    first, second = build(prompt=["a", "b"]), build(prompt="a")
    assert first[0].cmpl_id == first[1].cmpl_id != second[0].cmpl_id
    assert first[0].cmpl_id.startswith("chatcmpl-")


@pytest.mark.parametrize(("value", "expected"), [(None, -1), (-1, -1), (2, 2), (99, 3), (-7, 1), (1.9, 1), (2**40, 0)])
def test_slot_numbers_wrap(value: Any, expected: int) -> None:
    assert build(prompt="a", id_slot=value)[0].id_slot == expected


def test_mistakes_are_refused() -> None:
    assert refused() == "key 'prompt' not found"
    assert refused(prompt="a", id_slot="x") == "Field 'id_slot': type must be number, but is string"
    assert refused(prompt=[], top_k="x") == '"prompt" must not be empty'
    assert refused(prompt="a", n=5).startswith("Field 'n': ")


def test_prompts_are_logged_where_the_server_is_told_to(tmp_path: Path) -> None:
    build({"path_prompts_log_dir": str(tmp_path)}, prompt="héllo")
    (logged,) = tmp_path.iterdir()
    assert logged.read_text(encoding="utf-8") == "héllo"


def test_a_prompt_of_tokens_is_logged_as_json(tmp_path: Path) -> None:
    build({"path_prompts_log_dir": str(tmp_path)}, prompt=[1, "a"])
    (logged,) = tmp_path.iterdir()
    assert json.loads(logged.read_text()) == [1, "a"]


def test_a_prompt_that_cannot_be_logged_is_served_all_the_same(tmp_path: Path) -> None:
    assert build({"path_prompts_log_dir": str(tmp_path / "missing")}, prompt="a")


def test_the_context_follows_a_reloaded_model() -> None:
    server = FakeServer()
    context = ApiContext(server, FakeTools())
    schema = context.schema
    assert context.schema is schema
    server.vocab = FakeVocab()
    assert context.schema is not schema
