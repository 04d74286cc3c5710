"""What a decision model says about itself, and how each kind of model is asked."""

from __future__ import annotations

import enum
import itertools
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from llamasrv.api.fields import float32
from llamasrv.api.protocols import Vocab
from llamasrv.engine.meta import ServerMeta

#: Options of one question, where labels do not limit them further.
MAX_OPTIONS = 255
#: Ends the text of an option in the prompts of one kind.
BOX_END = "<|box_end|>"


class DecisionModelError(ValueError):
    """The model file lacks something that its kind needs."""


class Kind(enum.Enum):
    """The value is that of "<arch>.decision.type" in the model file."""

    OPENJEV = "openjev"
    LEV = "lev"
    KEV = "kev"
    NIMBLE = "nimble"
    LAYA = "laya"
    CLEF = "clef"
    PPLX_DECIDER = "pplx-decider"
    LFM2_D1 = "lfm2-d1"
    LFM2_D1_OMNI = "lfm2-d1-omni"

    @property
    def shares_prompt(self) -> bool:
        """Whether the questions of a request begin with the same tokens and the model can go on from these."""
        return self not in (Kind.LAYA, Kind.CLEF, Kind.LFM2_D1_OMNI)

    @property
    def is_joint(self) -> bool:
        """Whether all questions of a request are in one prompt."""
        return self is Kind.CLEF

    @property
    def takes_images(self) -> bool:
        return self in (Kind.OPENJEV, Kind.CLEF, Kind.PPLX_DECIDER, Kind.LFM2_D1, Kind.LFM2_D1_OMNI)

    @property
    def takes_null_state(self) -> bool:
        """Whether there can be nothing to judge but images."""
        return self in (Kind.LFM2_D1, Kind.LFM2_D1_OMNI)

    @property
    def has_true_first(self) -> bool:
        return self in (Kind.OPENJEV, Kind.CLEF, Kind.LFM2_D1)

    @property
    def sorts_choices(self) -> bool:
        return self is Kind.CLEF

    @property
    def has_label_codes(self) -> bool:
        """Whether labels are codes that the template is given with the options."""
        return self in (Kind.LEV, Kind.NIMBLE, Kind.PPLX_DECIDER)


class Renderer(Protocol):
    """A parsed prompt template."""

    def render(self, values: Mapping[str, Any]) -> str: ...


@dataclass(frozen=True, slots=True)
class DecisionModel:
    """``labels``: a token per option, ``label_texts`` what they read. ``marker``: token at which an option is read;
    ``marker_text``: its text where that must not be in the input. ``max_head_tokens``: question and options together.
    """

    kind: Kind
    vocab: Vocab
    template: Renderer
    temperatures: Mapping[str, float] = field(default_factory=dict)
    n_options_max: int = MAX_OPTIONS
    labels: tuple[int, ...] = ()
    label_texts: tuple[str, ...] = ()
    marker: int = -1
    marker_text: str = ""
    max_head_tokens: int = 0


def native_template(source: str) -> Renderer:
    """The native template engine. Raises DecisionModelError for a template that does not parse."""
    from llamasrv import binding

    try:
        return binding.Template(source)
    except binding.NativeError as error:
        raise DecisionModelError(str(error)) from error


def load_decision_model(
    meta: ServerMeta, vocab: Vocab, make_template: Callable[[str], Renderer] = native_template
) -> DecisionModel | None:
    """The decision model that is loaded; None if it is another kind of model. Raises DecisionModelError."""
    facts = meta.decision
    if "type" not in facts:
        return None
    if not meta.systemone_template:
        raise DecisionModelError('decision model has no "systemone" template')
    template = make_template(meta.systemone_template)
    temperatures = _temperatures(facts)
    try:
        kind = Kind(facts["type"])
    except ValueError:
        raise DecisionModelError(f"unsupported decision model type: {facts['type']}") from None
    labels: list[tuple[str, int]] = []
    n_options_max, marker, marker_text, max_head_tokens = MAX_OPTIONS, -1, "", 0
    if kind is Kind.OPENJEV:
        labels = [(letter, _label(vocab, letter)) for letter in string.ascii_uppercase + string.ascii_lowercase]
    elif kind.has_label_codes:
        labels = _codes(vocab)
    elif kind is Kind.KEV:
        marker = _single(vocab, BOX_END, True)
        if marker == -1:
            raise DecisionModelError(f"decision model has no {BOX_END} token")
    elif kind is Kind.LAYA:
        marker = vocab.mask
        if marker == -1 or vocab.sep == -1:
            raise DecisionModelError("decision model has no mask or sep token")
        marker_text = vocab.piece(marker, True).decode(errors="replace")
        max_head_tokens = _leading_number(facts.get("max_head_tokens", ""))
        if max_head_tokens == 0:
            raise DecisionModelError("decision model has no valid max_head_tokens")
    elif kind is Kind.LFM2_D1_OMNI:
        marker = vocab.mask
        if marker == -1:
            raise DecisionModelError("decision model has no mask token")
    if labels:
        n_options_max = len(labels)
    elif kind.has_label_codes:
        n_options_max = 0
    return DecisionModel(
        kind=kind,
        vocab=vocab,
        template=template,
        temperatures=temperatures,
        n_options_max=n_options_max,
        labels=tuple(token for _, token in labels),
        label_texts=tuple(text for text, _ in labels) if kind.has_label_codes else (),
        marker=marker,
        marker_text=marker_text,
        max_head_tokens=max_head_tokens,
    )


def single_token(vocab: Vocab, text: str) -> int:
    """The token that ``text`` is; -1 if it is none or several."""
    return _single(vocab, text, False)


def _single(vocab: Vocab, text: str, parse_special: bool) -> int:
    tokens = vocab.tokenize(text, False, parse_special)
    return tokens[0] if len(tokens) == 1 else -1


def _label(vocab: Vocab, letter: str) -> int:
    token = single_token(vocab, letter)
    if token == -1:
        raise DecisionModelError(f"decision label '{letter}' is not a single token")
    return token


def _codes(vocab: Vocab) -> list[tuple[str, int]]:
    """A ... Z, AA ... ZZ, as far as they are single tokens."""
    letters = string.ascii_uppercase
    found = []
    for text in (*letters, *(a + b for a, b in itertools.product(letters, letters))):
        token = single_token(vocab, text)
        if token != -1:
            found.append((text, token))
    return found[:MAX_OPTIONS]


def _temperatures(facts: Mapping[str, str]) -> dict[str, float]:
    prefix = "temperature."
    out = {}
    for key, text in facts.items():
        if not key.startswith(prefix):
            continue
        try:
            value = float32(float(text))
        except ValueError:
            value = 0.0
        if not value > 0.0:
            raise DecisionModelError(f"invalid decision temperature: {key} = {text}")
        out[key[len(prefix) :]] = value
    return out


def _leading_number(text: str) -> int:
    match = re.match(r"\s*\+?([0-9]{1,9})", text)
    return int(match.group(1)) if match else 0
