"""Results made from the state of a slot, and sent."""

from __future__ import annotations

from copy import copy

from llamasrv.engine.log import srv_err
from llamasrv.engine.prompt_scores import scores_of
from llamasrv.engine.response import ServerResponse
from llamasrv.engine.result import (
    ErrorResult,
    ErrorType,
    FinalResult,
    PartialResult,
    PromptProgress,
    Result,
    StopType,
    TokenProb,
)
from llamasrv.engine.slot import Slot
from llamasrv.engine.stats import now_us
from llamasrv.engine.task import Task


class Emitter:
    """Builds results and hands them to :class:`ServerResponse`."""

    def __init__(self, response: ServerResponse) -> None:
        self._response = response

    def send(self, result: Result) -> None:
        self._response.send(result)

    def error(self, task: Task, message: str, type_: ErrorType = ErrorType.SERVER, n_ctx: int = 0) -> None:
        """Answer a task, and each child that has not started, with an error."""
        srv_err("send_error", "task id = %d, error: %s", task.id, message)
        for id_task, index in [(task.id, task.index), *((child.id, child.index) for child in task.child_tasks)]:
            self._response.send(
                ErrorResult(
                    id=id_task, index=index, type=type_, message=message, n_prompt_tokens=task.n_tokens, n_ctx=n_ctx
                )
            )

    def slot_error(self, slot: Slot, message: str, type_: ErrorType = ErrorType.SERVER) -> None:
        """Answer the slot's task with an error."""
        task = slot.task
        assert task is not None
        srv_err("send_error", "task id = %d, error: %s", task.id, message)
        self._response.send(
            ErrorResult(
                id=task.id,
                index=task.index,
                type=type_,
                message=message,
                n_prompt_tokens=task.n_tokens,
                n_ctx=slot.n_ctx,
            )
        )

    def begin(self, slot: Slot) -> None:
        """Tell a stream that its prompt is being worked on; with ``return_progress`` how far."""
        task = slot.task
        assert task is not None
        if task.params.return_progress:
            self.progress(slot)
        else:
            self._response.send(self._partial(slot, is_begin=True))

    def progress(self, slot: Slot) -> None:
        """Tell a stream how much of its prompt is done."""
        task = slot.task
        assert task is not None
        part = self._partial(slot)
        part.progress = PromptProgress(
            total=task.n_tokens,
            cache=slot.stats.n_prompt_cached,
            processed=slot.prompt.n_tokens,
            time_ms=(now_us() - slot.stats.t_start) // 1000,
        )
        part.tokens = [0]
        self._response.send(part)

    def prompt_scores(self, slot: Slot) -> None:
        """Give a stream the log-probabilities of its prompt."""
        part = self._partial(slot)
        part.prompt_probs = scores_of(slot)
        self._response.send(part)

    def partial(self, slot: Slot, content: bytes, token: int, prob: TokenProb | None) -> None:
        """Send one token's share of a stream."""
        part = self._partial(slot)
        part.content = content
        part.tokens = [token]
        part.prob = prob
        self._response.send(part)

    def _partial(self, slot: Slot, is_begin: bool = False) -> PartialResult:
        task = slot.task
        assert task is not None
        params = task.params
        stats = slot.stats
        return PartialResult(
            id=task.id,
            index=task.index,
            n_decoded=stats.n_gen,
            n_prompt_tokens=task.n_tokens,
            n_prompt_tokens_cache=stats.n_prompt_cached,
            is_begin=is_begin,
            stats=copy(stats) if params.timings_per_token or slot.stop is StopType.WORD else None,
            post_sampling_probs=params.post_sampling_probs,
        )

    def final(self, slot: Slot, n_stop_tokens: int = 0) -> None:
        """Send the end of a completion.

        ``n_stop_tokens``: length of the stop string in tokens; their probabilities are left out, as their text is.
        """
        task = slot.task
        assert task is not None
        params = task.params
        stats = slot.stats
        probs = slot.probs
        if n_stop_tokens:
            probs = probs[: max(0, len(probs) - n_stop_tokens)]
        self._response.send(
            FinalResult(
                id=task.id,
                index=task.index,
                id_slot=slot.id,
                content=b"" if params.stream else bytes(slot.text.data),
                tokens=[] if params.stream else slot.generated_tokens,
                prompt=task.tokens,
                params=params,
                stats=copy(stats),
                truncated=slot.truncated,
                has_new_line=slot.has_new_line,
                stop=slot.stop,
                stopping_word=slot.stopping_word,
                n_decoded=stats.n_gen,
                n_prompt_tokens=task.n_tokens,
                n_prompt_tokens_cache=stats.n_prompt_cached,
                n_tokens_cached=slot.prompt.n_tokens,
                probs=probs,
                prompt_probs=[] if params.stream or task.prompt_logprobs < 0 else scores_of(slot),
            )
        )
