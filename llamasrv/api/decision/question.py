"""The questions of a request."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamasrv.api import openapi_schema as openapi
from llamasrv.api.decision.model import DecisionModel, Kind
from llamasrv.api.errors import ApiError, invalid_request
from llamasrv.api.openapi_schema import Member, checked, either

#: Questions of one request; some models read all of them for each.
MAX_QUESTIONS = 256
#: Levels that a score question may have.
MIN_LEVELS, MAX_LEVELS = 2, 10


_SAID = checked({"type": ["string", "object", "array", "number", "boolean"]})
_QUESTION = checked(
    either(
        openapi.object_of(
            {"type": openapi.enum("choice"), "instructions": _SAID, "criteria": {"type": "object", "minProperties": 1}},
            ["type", "instructions", "criteria"],
        ),
        openapi.object_of(
            {
                "type": openapi.enum("score"),
                "instructions": _SAID,
                "criteria": openapi.array({}, minItems=MIN_LEVELS, maxItems=MAX_LEVELS),
            },
            ["type", "instructions", "criteria"],
        ),
        openapi.object_of(
            {"type": openapi.enum("noul"), "instructions": _SAID, "criteria": {"type": ["object", "null"]}},
            ["type", "instructions"],
        ),
    )
)
#: Members of a request.
MEMBERS = (
    Member("state", _SAID, "What the questions are about: any value; chat messages may carry media.", True),
    Member(
        "questions",
        {"type": "object", "minProperties": 1, "maxProperties": MAX_QUESTIONS, "additionalProperties": _QUESTION},
        "Questions by name.",
        True,
    ),
    Member("images", checked(openapi.STRINGS), "Data URLs."),
    Member("files", checked(openapi.STRINGS), "Data URLs."),
)


class QuestionType(enum.Enum):
    """The value is the name in JSON. The order is that of the scores in the output of some models."""

    CHOICE = "choice"
    SCORE = "score"
    NOUL = "noul"

    @property
    def number(self) -> int:
        return list(QuestionType).index(self)


@dataclass(frozen=True, slots=True)
class Option:
    key: str
    #: Any JSON value.
    description: Any = None


@dataclass(frozen=True, slots=True)
class Question:
    """``options`` are in the order of the model's outputs."""

    id: str
    type: QuestionType
    instructions: Any
    options: tuple[Option, ...]


def parse_questions(model: DecisionModel, data: Mapping[str, Any]) -> list[Question]:
    """The questions of a request, in its order. Raises ApiError with status 400."""
    state = data.get("state")
    if state is None and ("state" not in data or not model.kind.takes_null_state):
        raise invalid_request('"state" must be provided')
    asked = data.get("questions")
    if not isinstance(asked, dict) or not asked:
        raise invalid_request('"questions" must be a non-empty object')
    if len(asked) > MAX_QUESTIONS:
        raise invalid_request(f'"questions" has too many entries ({len(asked)}, limit {MAX_QUESTIONS})')
    return [_question(model, name, value) for name, value in asked.items()]


def _question(model: DecisionModel, name: str, value: Any) -> Question:
    if not isinstance(value, dict):
        raise _wrong(name, "must be an object")
    if value.get("instructions") is None:
        raise _wrong(name, '"instructions" must be provided')
    criteria = value.get("criteria")
    kind = value.get("type")
    if kind == "choice":
        type_, options = QuestionType.CHOICE, _choices(model, name, criteria)
    elif kind == "score":
        type_, options = QuestionType.SCORE, _levels(name, criteria)
    elif kind == "noul":
        type_, options = QuestionType.NOUL, _truths(model, name, criteria)
    else:
        raise _wrong(name, '"type" must be one of: choice, score, noul')
    if len(options) > model.n_options_max:
        limit = model.n_options_max
        raise _wrong(name, f"too many options ({len(options)}), this model supports at most {limit}")
    return Question(name, type_, value["instructions"], tuple(options))


def _choices(model: DecisionModel, name: str, criteria: Any) -> list[Option]:
    if not isinstance(criteria, dict) or not criteria:
        raise _wrong(name, '"criteria" must be a non-empty object')
    options = [Option(key, description) for key, description in criteria.items()]
    return sorted(options, key=lambda option: option.key) if model.kind.sorts_choices else options


def _levels(name: str, criteria: Any) -> list[Option]:
    if not isinstance(criteria, list) or not MIN_LEVELS <= len(criteria) <= MAX_LEVELS:
        raise _wrong(name, f'"criteria" must be an array of {MIN_LEVELS} to {MAX_LEVELS} levels')
    return [Option(str(level), description) for level, description in enumerate(criteria)]


def _truths(model: DecisionModel, name: str, criteria: Any) -> list[Option]:
    if criteria is not None and not isinstance(criteria, dict):
        raise _wrong(name, '"criteria" must be an object')
    given = criteria or {}
    options = []
    for key, alias in (("false", "no"), ("true", "yes")):
        if key not in given and model.kind is Kind.LFM2_D1_OMNI:
            options.append(Option(key, given.get(alias)))
        else:
            options.append(Option(key, given.get(key)))
    return options[::-1] if model.kind.has_true_first else options


def _wrong(name: str, message: str) -> ApiError:
    return invalid_request(f"questions.{name}: {message}")
