"""Prompts of single questions, and where their outputs are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamasrv.api.decision.answer import n_outputs
from llamasrv.api.decision.labels import choose_labels
from llamasrv.api.decision.model import DecisionModel, DecisionModelError, Kind
from llamasrv.api.decision.question import Question
from llamasrv.api.decision.values import as_outline, escape_special, map_strings, sort_keys
from llamasrv.api.errors import invalid_request
from llamasrv.engine.task import Decision

#: Tokens of an option's text in a head that is cut to size, and what is left when many options share it.
MAX_OPTION, MIN_OPTION = 48, 4
MIN_QUESTION = 8
#: Tokens of the head that options may not take.
HEAD_RESERVE = 16

#: Marks for a template whose prompt is put together from pieces that are cut one by one.
_MARK = "<<d1omni:"
SEPARATOR = f"{_MARK}sep>>"
MARK_STATE, MARK_QUESTION, MARK_OPTION = (f"{_MARK}{name}>>" for name in ("state", "question", "option"))
#: Tokens of such a prompt.
MAX_TOKENS = 16384


def question_prompt(
    model: DecisionModel, state: Any, questions: Sequence[Question], question: Question, variant: int
) -> tuple[list[int], Decision]:
    """Tokens of one variant of a question, and where its outputs are. ``questions``: all of the request.

    Raises ApiError (400) where the options do not fit, DecisionModelError when template and model do not fit together.
    """
    text = render(model, state, questions, question, variant)
    if model.kind is Kind.LFM2_D1_OMNI:
        return _pieces_prompt(model, question, text)
    tokens = model.vocab.tokenize(text, False, True)
    if model.kind is Kind.LAYA:
        return _head_prompt(model, question, tokens)
    if model.kind is Kind.KEV:
        markers = _positions(tokens, model.marker)
        if len(markers) != len(question.options):
            raise _bad_layout()
        return tokens, Decision(markers=tuple(markers), pointer=len(tokens) - 1)
    if model.kind is Kind.LFM2_D1:
        _, groups = choose_labels(model.vocab, question)
        labels = tuple(token for group in groups for token in group)
        return tokens, Decision(labels=labels, label_groups=tuple(len(group) for group in groups))
    return tokens, Decision(labels=model.labels[: n_outputs(model, question)])


def render(model: DecisionModel, state: Any, questions: Sequence[Question], question: Question, variant: int) -> str:
    """The prompt as text. The template gets raw JSON values and writes out itself what is no string."""
    kind = model.kind
    values: dict[str, Any] = {
        "id": question.id,
        "type": question.type.value,
        "instructions": question.instructions,
        "state": state,
        "options": _options(model, question, variant),
    }
    if kind is Kind.NIMBLE:
        values["questions"] = [
            {
                "id": other.id,
                "type": other.type.value,
                "instructions": other.instructions,
                "options": _options(model, other, 0),
            }
            for other in questions
        ]
    if kind is Kind.LEV:
        values = sort_keys(values)
    if kind is Kind.KEV:
        values["state"] = _outline(state)
        values["instructions"] = _outline(question.instructions)
    if model.marker_text:
        # options are read where it stands
        values = map_strings(values, lambda text: text.replace(model.marker_text, " "))
    if kind is Kind.LFM2_D1_OMNI:
        values = map_strings(values, escape_special, keys=True)
        values = map_strings(values, lambda text: text.replace(_MARK, "<<d1omni "))
        values.update(
            audio=False, sep=SEPARATOR, mark_state=MARK_STATE, mark_question=MARK_QUESTION, mark_option=MARK_OPTION
        )
    values["images"] = []
    return model.template.render(values)


def _options(model: DecisionModel, question: Question, variant: int) -> list[dict[str, Any]]:
    labels: Sequence[str] = model.label_texts
    if model.kind is Kind.LFM2_D1:
        labels, _ = choose_labels(model.vocab, question)
    out = []
    for place, option in enumerate(question.options if variant == 0 else question.options[::-1]):
        entry: dict[str, Any] = {"key": option.key, "description": option.description}
        if model.kind is Kind.KEV:
            entry["key"] = _outline(option.key)
            if option.description is not None:
                entry["description"] = _outline(option.description)
        if labels:
            entry["label"] = labels[place]
        out.append(entry)
    return out


def _outline(value: Any) -> str:
    return escape_special(as_outline(value))


def _head_prompt(model: DecisionModel, question: Question, tokens: list[int]) -> tuple[list[int], Decision]:
    """``[cls] question [sep] ([marker] option)* [sep] state [sep]``, options and question cut as in training."""
    sep = model.vocab.sep
    markers = _positions(tokens, model.marker)
    is_whole = len(markers) == len(question.options) and markers[0] >= 2
    if not is_whole or tokens[markers[0] - 1] != sep or tokens[-1] != sep:
        raise _bad_layout()
    head_end = markers[0] - 1
    options_end = tokens.index(sep, markers[-1])
    if options_end + 1 >= len(tokens):
        raise _bad_layout()
    ends = [*markers[1:], options_end]
    options = [tokens[start:end][: MAX_OPTION + 1] for start, end in zip(markers, ends, strict=True)]
    room = model.max_head_tokens
    if sum(map(len, options)) + HEAD_RESERVE > room:
        share = max(MIN_OPTION, max(0, room - HEAD_RESERVE) // len(options))
        options = [option[:share] for option in options]
    n_question = max(MIN_QUESTION, room - sum(map(len, options)))
    out = [*tokens[: min(head_end, 1 + n_question)], sep]
    positions = []
    for option in options:
        positions.append(len(out))
        out += option
    # one score per type of question
    return out + tokens[options_end:], Decision(markers=tuple(positions), column=question.type.number)


def _pieces_prompt(model: DecisionModel, question: Question, text: str) -> tuple[list[int], Decision]:
    """Each piece cut to its budget as in training; the state gets the room that is left."""
    pieces = text.split(SEPARATOR)
    if pieces[0]:
        raise _bad_layout()
    n = len(question.options)
    budget = max(96, min(24 * n + 32, MAX_TOKENS // 2))
    limits = {MARK_STATE: None, MARK_QUESTION: max(16, budget), MARK_OPTION: max(2, (budget - 3 * n) // n)}
    head: list[int] = []
    state: list[int] | None = None
    tail: list[int] = []
    for piece in pieces[1:]:
        mark = next((mark for mark in limits if piece.startswith(mark)), "")
        tokens = model.vocab.tokenize(piece[len(mark) :], False, True)[: limits.get(mark)]
        if mark == MARK_STATE:
            if state is not None:
                raise _bad_layout()
            state = tokens
        elif state is None:
            head += tokens
        else:
            tail += tokens
    if state is None:
        raise _bad_layout()
    room = max(0, MAX_TOKENS - len(head) - len(tail))
    out = (head + state[:room] + tail)[:MAX_TOKENS]
    markers = _positions(out, model.marker)
    if len(markers) != n:
        raise invalid_request("the options do not fit in the context")
    return out, Decision(markers=tuple(markers), column=question.type.number)


def _positions(tokens: Sequence[int], wanted: int) -> list[int]:
    return [position for position, token in enumerate(tokens) if token == wanted]


def _bad_layout() -> DecisionModelError:
    return DecisionModelError("unexpected layout of the decision prompt")
