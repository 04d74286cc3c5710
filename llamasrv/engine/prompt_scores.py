"""Log-probabilities of the prompt's own tokens, read while the prompt is computed."""

from __future__ import annotations

from collections.abc import Iterable

from llamasrv.engine.backend import Backend
from llamasrv.engine.result import PromptTokenProb
from llamasrv.engine.slot import Slot

#: Outputs that one batch may have for prompts that are scored, beside those that every slot has.
MAX_OUTPUTS = 32


def wants_scores(slot: Slot) -> bool:
    return slot.task is not None and slot.task.prompt_logprobs >= 0


def read_scores(backend: Backend, slot: Slot, entries: Iterable[tuple[int, int]]) -> None:
    """Note what the last decode says about the slot's prompt.

    ``entries``: pairs of prompt position and index in the decoded part. The output at a position is about the token
    after it.
    """
    task = slot.task
    assert task is not None
    pairs = [(position, index) for position, index in entries if position + 1 < task.n_tokens]
    if not pairs:
        return
    tokens = [task.tokens[position + 1] for position, _ in pairs]
    found = backend.logprobs([index for _, index in pairs], tokens, task.prompt_logprobs)
    for (position, _), token, (logprob, top) in zip(pairs, tokens, found, strict=True):
        slot.prompt_scores[position + 1] = PromptTokenProb(token, logprob, top)


def scores_of(slot: Slot) -> list[PromptTokenProb]:
    """What is known of the prompt's tokens in their order, from the second on: nothing comes before the first."""
    return [slot.prompt_scores[position] for position in sorted(slot.prompt_scores)]
