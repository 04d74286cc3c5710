"""From the raw outputs of the model to the answer of a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamasrv.api.decision.model import DecisionModel, Kind
from llamasrv.api.decision.question import Question, QuestionType
from llamasrv.api.errors import ApiError
from llamasrv.engine.result import ErrorType

#: Outputs of a noul question that is read from a scale: 0 certainly no ... 8 certainly yes.
N_RATINGS = 9


def n_outputs(model: DecisionModel, question: Question) -> int:
    """Outputs of the model for a question."""
    if model.kind is Kind.LEV and question.type is QuestionType.NOUL:
        return N_RATINGS
    return len(question.options)


def n_variants(model: DecisionModel, question: Question) -> int:
    """Prompts that are evaluated for a question; the second has the options in reverse order."""
    # that takes out the preference for the first label
    is_mirrored = model.kind is Kind.LEV and question.type is QuestionType.CHOICE and len(question.options) > 1
    return 2 if is_mirrored else 1


def temperature_of(model: DecisionModel, question: Question) -> float:
    """That of the question's type and number of options, or of its type, or 1."""
    n = len(question.options)
    if model.kind is Kind.LEV:
        bucket = "small" if n <= 8 else "mid" if n <= 26 else "large"
    else:
        bucket = "2" if n <= 2 else "3_5" if n <= 5 else "6_10" if n <= 10 else "11"
    name = question.type.value
    return model.temperatures.get(f"{name}.{bucket}", model.temperatures.get(name, 1.0))


def format_answer(
    model: DecisionModel, question: Question, scores: Sequence[Sequence[float]], has_media: bool = False
) -> dict[str, Any]:
    """The answer in JSON. ``scores``: raw outputs of each variant. Raises ApiError (500) if they are no numbers."""
    # of this kind only answers about text are calibrated
    is_plain = has_media and model.kind is Kind.LFM2_D1_OMNI
    temperature = 1.0 if is_plain else temperature_of(model, question)
    n = n_outputs(model, question)
    probabilities = np.zeros(n)
    for variant, row in enumerate(scores):
        if len(row) != n:
            raise ApiError(ErrorType.SERVER, "decision result does not match the number of options")
        shares = softmax(row, temperature) / len(scores)
        probabilities += shares if variant == 0 else shares[::-1]
    answer: dict[str, Any] = {"type": question.type.value}
    if question.type is QuestionType.NOUL:
        answer["noul"] = _noul(model, question, probabilities)
        return answer
    by_key = {option.key: float(p) for option, p in zip(question.options, probabilities, strict=True)}
    if question.type is QuestionType.CHOICE:
        answer["choice"] = question.options[int(np.argmax(probabilities))].key
        answer["probabilities"] = by_key
        answer["confidence"] = choice_confidence(probabilities)
    else:
        answer["score"] = float(np.arange(n) @ probabilities)
        answer["legend"] = {option.key: option.description for option in question.options}
        answer["probabilities"] = by_key
        answer["confidence"] = score_confidence(probabilities)
    return answer


def softmax(scores: Sequence[float], temperature: float) -> npt.NDArray[np.float64]:
    """Probabilities of float32 scores. Raises ApiError (500) if one is NaN."""
    row = np.asarray(scores, dtype=np.float32)
    if np.isnan(row).any():
        # a joint head that could not make sense of its prompt
        raise ApiError(ErrorType.SERVER, "the model could not evaluate the decision")
    weights = np.exp((row - row.max()).astype(np.float64) / temperature)
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def choice_confidence(probabilities: npt.NDArray[np.float64]) -> float:
    """How far the most likely option is above an even distribution, 0 to 1."""
    n = len(probabilities)
    if n < 2:
        return 1.0
    return max(0.0, (float(probabilities.max()) - 1.0 / n) / (1.0 - 1.0 / n))


def score_confidence(probabilities: npt.NDArray[np.float64]) -> float:
    """How close the levels lie to the most likely one, 0 to 1, compared with an even distribution around its middle."""
    n = len(probabilities)
    if n < 2:
        return 1.0
    levels = np.arange(n)
    distance = float(probabilities @ np.abs(levels - int(np.argmax(probabilities))))
    even = float(np.abs(levels - (n - 1) / 2.0).mean())
    return max(0.0, 1.0 - distance / even)


def _noul(model: DecisionModel, question: Question, probabilities: npt.NDArray[np.float64]) -> float:
    """Probability that the answer is yes."""
    if model.kind is Kind.LEV:
        return float(np.arange(N_RATINGS) @ probabilities / (N_RATINGS - 1))
    return next(float(p) for option, p in zip(question.options, probabilities, strict=True) if option.key == "true")
