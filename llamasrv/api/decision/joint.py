"""The prompt of a model that decides all questions of a request together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamasrv.api.decision.model import DecisionModel, DecisionModelError
from llamasrv.api.decision.question import Question, QuestionType
from llamasrv.api.decision.values import map_strings, sort_keys
from llamasrv.api.errors import invalid_request
from llamasrv.engine.task import Decision

#: Marks for the template: between pieces of the prompt, and at the beginning of those that the head reads.
_MARK = "<<clef:"
SEPARATOR = f"{_MARK}sep>>"
MARK_QUESTION, MARK_OPTION = (f"{_MARK}{name}>>" for name in ("question", "option"))

#: Roles of prompt tokens, ``enum llama_decision_order``.
ORDER_NONE, ORDER_OPTION = 0, 4
ORDER_QUESTION = {QuestionType.NOUL: 1, QuestionType.CHOICE: 2, QuestionType.SCORE: 3}


def joint_prompt(model: DecisionModel, state: Any, questions: Sequence[Question]) -> tuple[list[int], Decision]:
    """Tokens of the prompt, and the role of each. The scores are those of all options, in order.

    Raises ApiError (400) for empty instructions or options, DecisionModelError when the template does not fit.
    """
    tokens: list[int] = []
    order: list[int] = []
    waiting = [ORDER_QUESTION[question.type] for question in questions]
    n_scores = 0
    # as in training the pieces are tokenized one by one
    for piece in _render(model, state, questions).split(SEPARATOR):
        role = ORDER_NONE
        if piece.startswith(MARK_QUESTION):
            if not waiting:
                raise _bad_layout()
            piece, role = piece[len(MARK_QUESTION) :], waiting.pop(0)
        elif piece.startswith(MARK_OPTION):
            piece, role = piece[len(MARK_OPTION) :], ORDER_OPTION
            n_scores += 1
        part = model.vocab.tokenize(piece, False, True)
        if role != ORDER_NONE and not part:
            raise invalid_request("the instructions and the options of a question must not be empty")
        tokens += part
        order += [role] * len(part)
    if waiting or n_scores != sum(len(question.options) for question in questions):
        raise _bad_layout()
    return tokens, Decision(order=tuple(order), n_scores=n_scores)


def _render(model: DecisionModel, state: Any, questions: Sequence[Question]) -> str:
    asked = [
        {
            "id": question.id,
            "type": question.type.value,
            "instructions": question.instructions,
            "options": [{"key": option.key, "description": option.description} for option in question.options],
        }
        for question in questions
    ]
    values = sort_keys({"state": state, "questions": asked})
    values = map_strings(values, lambda text: text.replace(_MARK, "<<clef "))
    values.update(images=[], sep=SEPARATOR, mark_question=MARK_QUESTION, mark_option=MARK_OPTION)
    return model.template.render(values)


def _bad_layout() -> DecisionModelError:
    return DecisionModelError("unexpected layout of the decision prompt")
