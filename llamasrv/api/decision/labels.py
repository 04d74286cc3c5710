"""Labels of options for a kind of model that has none fixed: texts that are single tokens."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence

from llamasrv.api.decision.model import DecisionModelError, single_token
from llamasrv.api.decision.question import Question, QuestionType
from llamasrv.api.errors import invalid_request
from llamasrv.api.protocols import Vocab

_YES = ("yes", "Yes", "YES")
_NO = ("no", "No", "NO")


def choose_labels(vocab: Vocab, question: Question) -> tuple[list[str], list[list[int]]]:
    """Text of each option's label and the tokens that mean it. Raises ApiError (400) if there are not enough.

    Raises DecisionModelError if the vocabulary has no token for a level or for yes and no.
    """
    if question.type is QuestionType.CHOICE:
        return _for_choice(vocab, question)
    texts, groups = [], []
    for option in question.options:
        if question.type is QuestionType.SCORE:
            forms: Sequence[str] = (option.key,)
        else:
            forms = _YES if option.key == "true" else _NO
        group = _single_tokens(vocab, forms)
        if not group:
            raise DecisionModelError(f"decision label is not a single token: {option.key}")
        texts.append(option.key)
        groups.append(group)
    return texts, groups


def _for_choice(vocab: Vocab, question: Question) -> tuple[list[str], list[list[int]]]:
    texts: list[str] = []
    groups: list[list[int]] = []
    used: set[int] = set()
    # one that was refused, or is taken, is so for every later option, too
    pool = _pool()
    for code in _wanted(question):
        for text in itertools.chain([code], pool):
            token = single_token(vocab, text)
            if token != -1 and token not in used:
                break
        else:
            n = len(question.options)
            raise invalid_request(f"no single-token label left for {n} options")
        used.add(token)
        texts.append(text)
        groups.append([token, *(other for other in _single_tokens(vocab, [f" {text}"]) if other != token)])
    return texts, groups


def _wanted(question: Question) -> list[str]:
    """The options' own letters, where all have one, else letters or numbers."""
    keys = [option.key for option in question.options]
    if all(len(key) == 1 and key in string.ascii_letters for key in keys):
        return keys
    if len(keys) <= len(string.ascii_uppercase):
        return list(string.ascii_uppercase[: len(keys)])
    return [f"{number:02d}" for number in range(len(keys))]


def _pool() -> Iterator[str]:
    """What stands in for a code that cannot be had."""
    letters = string.ascii_uppercase
    yield from letters
    yield from (f"{number:02d}" for number in range(100))
    yield from string.ascii_lowercase
    yield from (f"#{number}" for number in range(200))
    yield from (a + b for a, b in itertools.product(letters, letters))


def _single_tokens(vocab: Vocab, texts: Sequence[str]) -> list[int]:
    """Those of these texts that are single tokens, each token once."""
    return list(dict.fromkeys(token for text in texts if (token := single_token(vocab, text)) != -1))
