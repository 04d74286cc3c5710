"""Tasks of a request, and the answer from their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamasrv.api.context import ApiContext
from llamasrv.api.decision.answer import format_answer, n_variants
from llamasrv.api.decision.joint import joint_prompt
from llamasrv.api.decision.model import DecisionModel, DecisionModelError
from llamasrv.api.decision.prompt import question_prompt
from llamasrv.api.decision.question import Question, parse_questions
from llamasrv.api.decision.state import parse_state
from llamasrv.api.errors import ApiError
from llamasrv.api.protocols import TaskIds
from llamasrv.engine.prompt import common_prefix
from llamasrv.engine.result import DecisionResult, ErrorType
from llamasrv.engine.task import Decision, Task, TaskType

_NO_MEDIA = (
    "This server does not support image input for decisions. For a model that supports it, start it with `--mmproj`"
)


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """What is needed to read the results of a request."""

    model: DecisionModel
    questions: list[Question]


def build_decision_tasks(
    context: ApiContext, data: Mapping[str, Any], ids: TaskIds
) -> tuple[DecisionRequest, list[Task]]:
    """One task per variant of each question, or one for all questions; those that begin alike as a group.

    Raises ApiError: 501 if the model is none for decisions or takes no media.
    """
    model = context.decision_model
    if model is None:
        raise ApiError(ErrorType.NOT_SUPPORTED, "This model is not a decision model")
    questions = parse_questions(model, data)
    state, files = parse_state(data)
    if files:
        raise ApiError(ErrorType.NOT_SUPPORTED, _NO_MEDIA)
    try:
        prompts = _prompts(model, state, questions)
    except DecisionModelError as error:
        raise ApiError(ErrorType.SERVER, str(error)) from error
    tasks = [
        Task(id=ids.new_id(), type=TaskType.DECISION, tokens=tokens, decision=decision) for tokens, decision in prompts
    ]
    if model.kind.shares_prompt:
        tasks = group_tasks(tasks, context.n_slots)
    return DecisionRequest(model, questions), tasks


def _prompts(model: DecisionModel, state: Any, questions: Sequence[Question]) -> list[tuple[list[int], Decision]]:
    if model.kind.is_joint:
        return [joint_prompt(model, state, questions)]
    return [
        question_prompt(model, state, questions, question, variant)
        for question in questions
        for variant in range(n_variants(model, question))
    ]


def group_tasks(tasks: Sequence[Task], n_slots: int) -> list[Task]:
    """Tasks in their order, each group of at most ``n_slots`` that begin alike as a parent with children."""
    out: list[Task] = []
    for start in range(0, len(tasks), max(1, n_slots)):
        group = tasks[start : start + max(1, n_slots)]
        parent, children = group[0], group[1:]
        # each has to evaluate at least one token of its own
        n_shared = min(min(task.n_tokens - 1, common_prefix(parent.tokens, task.tokens)) for task in group)
        if not children or n_shared <= 0:
            out += group
            continue
        parent.n_tokens_shared = n_shared
        for child in children:
            child.id_parent = parent.id
        parent.child_tasks = list(children)
        out.append(parent)
    return out


def decisions_json(context: ApiContext, request: DecisionRequest, results: Sequence[DecisionResult]) -> dict[str, Any]:
    """The answer; ``results`` in the order of the tasks and their children. Raises ApiError with status 500."""
    model = request.model
    rows = [result.scores for result in results]
    answers: dict[str, Any] = {}
    position = 0
    for question in request.questions:
        if model.kind.is_joint:
            end = position + len(question.options)
            scores = [rows[0][position:end]]
        else:
            end = position + n_variants(model, question)
            scores = rows[position:end]
        answers[question.id] = format_answer(model, question, scores)
        position = end
    return {
        "model": context.meta.model_name,
        "answers": answers,
        "usage": {"input_tokens": sum(result.n_tokens for result in results), "output_tokens": 0},
    }
