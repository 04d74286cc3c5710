"""``echo`` of /v1/completions: the prompt in front of the text, and log-probabilities of both."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamasrv.api.errors import invalid_request
from llamasrv.api.fields import FLOAT_MAX, FieldError, as_bool, float32
from llamasrv.api.jsonio import to_text
from llamasrv.api.prompt import is_token
from llamasrv.api.protocols import Vocab
from llamasrv.engine.result import PromptTokenProb, TokenProb
from llamasrv.engine.task import Task

#: Candidates per token of a prompt; the prompt can be long.
MAX_TOP = 20


class Echo:
    """A request that wants its prompt back.

    Its tasks are told, before they are posted, to score the prompt if ``logprobs`` asks for it.
    """

    def __init__(self, vocab: Vocab, data: Mapping[str, Any], tasks: Sequence[Task]) -> None:
        self.vocab = vocab
        n_top = tasks[0].params.sampling.n_probs
        if n_top > MAX_TOP:
            raise invalid_request(f"Field 'logprobs': together with 'echo' at most {MAX_TOP}")
        #: Whether log-probabilities are wanted.
        self.is_scored = n_top > 0
        self._is_text = _begins_with_text(data.get("prompt"))
        parts = [part for task in tasks for part in (task, *task.child_tasks)]
        #: Tokens of each result's prompt, in the order of the results.
        self.prompts = [part.tokens for part in parts]
        if self.is_scored:
            for part in parts:
                part.prompt_logprobs = n_top

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return prompt_pieces(self.vocab, tokens, self._is_text)

    def logprobs(self) -> LegacyLogprobs:
        return LegacyLogprobs(self.vocab)


def with_echo(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The request as the schema reads it, and whether it wants its prompt back. Raises ApiError.

    In OpenAI's API ``logprobs`` 0 gives the probabilities of the tokens themselves; ours has 1 for that.
    """
    value = data.get("echo")
    try:
        wanted = False if value is None else as_bool(value)
    except FieldError as error:
        raise invalid_request(f"Field 'echo': {error}") from None
    logprobs = data.get("logprobs")
    if wanted and is_token(logprobs) and logprobs == 0:
        return {**data, "logprobs": 1}, True
    return data, wanted


def _begins_with_text(prompt: Any) -> bool:
    """Whether the tokenizer may have put a token of its own before the first prompt, or the only one."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, list) and prompt:
        first = prompt[0]
        return _begins_with_text(first) if isinstance(first, list | dict) else isinstance(first, str)
    return isinstance(prompt, str)


def prompt_pieces(vocab: Vocab, tokens: Sequence[int], is_text: bool) -> list[bytes]:
    """Bytes of each token, so that together they are the prompt as it was given.

    ``is_text``: the client sent text; it has no BOS, and no space that the tokenizer put before the first word.
    """
    pieces = [vocab.piece(token, True) for token in tokens]
    if is_text and tokens and vocab.add_bos and tokens[0] == vocab.bos:
        pieces[0] = b""
    start = next((i for i, piece in enumerate(pieces) if piece), None)
    if start is not None and pieces[start].startswith(b" "):
        shown = vocab.text(tokens[start:], True)
        if shown == b"".join(pieces[start:])[1:]:
            pieces[start] = pieces[start][1:]
    return pieces


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True)
class LegacyLogprobs:
    """Parallel lists over tokens, OpenAI's format for completions. Offsets count characters from the text's start."""

    vocab: Vocab
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    _n_chars: int = 0
    _decoder: codecs.IncrementalDecoder = field(default_factory=_new_decoder)

    def add_prompt(self, pieces: Sequence[bytes], probs: Sequence[PromptTokenProb]) -> None:
        """``probs`` begin with the second token: nothing comes before the first."""
        scores: list[PromptTokenProb | None] = [None, *probs]
        for piece, score in zip(pieces, scores, strict=True):
            if score is None:
                self._add(piece, None, None)
            else:
                top = {self._name(token): _finite(value) for token, value in reversed(score.top)}
                self._add(piece, _finite(score.logprob), top)

    def add_generated(self, probs: Iterable[TokenProb]) -> None:
        for prob in probs:
            top = {to_text(piece): _log(value) for _, piece, value in reversed(prob.top)}
            self._add(prob.piece, _log(prob.prob), top)

    def members(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def take(self) -> dict[str, Any]:
        """The members so far; begins anew, with the offsets going on."""
        out = self.members()
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return out

    def _add(self, piece: bytes, logprob: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(to_text(piece))
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self._n_chars)
        self._n_chars += len(self._decoder.decode(piece))

    def _name(self, token: int) -> str:
        return to_text(self.vocab.piece(token, True))


def _log(prob: float) -> float:
    return float32(math.log(prob)) if prob > 0.0 else -FLOAT_MAX


def _finite(value: float) -> float:
    # JSON has no minus infinity
    return value if math.isfinite(value) else -FLOAT_MAX
