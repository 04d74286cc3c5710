"""What goes into the next batch: a token of every generating slot, then prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamasrv.engine.backend import GRAMMAR_ERRORS, Backend, Batch
from llamasrv.engine.chunk_budget import ChunkBudget
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.emit import Emitter
from llamasrv.engine.log import slt_err, slt_trc, slt_wrn
from llamasrv.engine.metrics import ServerMetrics
from llamasrv.engine.prefix import PrefixSources
from llamasrv.engine.prompt_reuse import PromptReuse
from llamasrv.engine.prompt_scores import MAX_OUTPUTS, wants_scores
from llamasrv.engine.result import ErrorType
from llamasrv.engine.slot import Slot, SlotState
from llamasrv.engine.slots import SlotPool
from llamasrv.engine.speculation import Speculation
from llamasrv.engine.stats import now_us
from llamasrv.engine.task import TaskType
from llamasrv.engine.timings import print_prompt_progress

#: llama_pooling_type
POOLING_LAST, POOLING_RANK = 3, 4


@dataclass(frozen=True, slots=True)
class BatchMode:
    """What the entries of one batch have in common. ``scales``: of the adapters, by index."""

    type: TaskType
    embeddings: bool
    scales: tuple[float, ...]
    #: Task that has the batch for itself; -1: several may be in it.
    id_joint: int = -1


@dataclass(slots=True)
class PromptPart:
    """Batch entries [first, last) that are consecutive prompt tokens of ``slot``."""

    slot: Slot
    first: int
    last: int
    #: Position of the first one.
    pos0: int


def can_split_embeddings(backend: Backend) -> bool:
    """Whether an embedding task's prompt may be computed in pieces: only if its output comes from the last token."""
    if not backend.has_memory:
        return False
    return backend.pooling_type == POOLING_LAST or (backend.pooling_type == POOLING_RANK and backend.causal_attn)


def init_sampler(slot: Slot) -> None:
    """Show the sampler the prompt, for its penalties."""
    if slot.sampler is not None:
        slot.sampler.reset()
        slot.sampler.accept(slot.prompt.tokens, False)


class BatchBuilder:
    """Builds one batch per step and knows which entries belong to whom.

    ``release`` ends a slot's task, ``finish`` answers it with what it has first.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        pool: SlotPool,
        prefixes: PrefixSources,
        emitter: Emitter,
        metrics: ServerMetrics,
        release: Callable[[Slot], None],
        finish: Callable[[Slot], None],
        speculation: Speculation | None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.pool = pool
        self.prefixes = prefixes
        self.emit = emitter
        self.metrics = metrics
        self.reuse = PromptReuse(backend, config, pool.shared)
        self.budget = ChunkBudget(config.stream_gap_ms)
        self._release = release
        self._finish = finish
        self.speculation = speculation
        self.batch: Batch = pool.batch
        #: Set by the first entry; None: nothing to do.
        self.mode: BatchMode | None = None
        self.parts: list[PromptPart] = []
        #: Indices of the entries whose output is wanted.
        self.outputs: list[int] = []
        #: How many of them are for prompts that are scored.
        self._n_score_outputs = 0

    def build(self) -> None:
        """Fill the batch for the next step. A slot that fails gets its error here and is left out."""
        self.batch.clear()
        self.mode = None
        self.parts.clear()
        self.outputs.clear()
        self._n_score_outputs = 0
        for slot in self.pool.slots:
            if slot.state is SlotState.WAIT_OTHER:
                self.prefixes.wake(slot)
        generating = [slot for slot in self.pool.slots if slot.state is SlotState.GENERATING and self._take_in(slot)]
        if self.speculation is not None and generating:
            self.speculation.draft(generating, self.backend.n_batch)
        for slot in generating:
            self._add_generating(slot)
        if not self.config.cont_batching and self.batch.n_tokens:
            return
        # who came first is computed first
        prompts = [slot for slot in self.pool.slots if slot.state in (SlotState.STARTED, SlotState.PROCESSING_PROMPT)]
        prompts.sort(key=lambda slot: slot.task.arrival if slot.task else 0)
        limit = self.backend.n_batch
        if self.batch.n_tokens:
            limit = min(limit, self.batch.n_tokens + self.budget.limit(self.backend.n_batch))
        for slot in prompts:
            if self.batch.n_tokens >= limit:
                break
            if not self._may_fit(slot):
                continue
            try:
                self._add_prompt(slot, limit)
            except Exception as exc:
                self.fail(slot, exc)

    @staticmethod
    def _mode_of(slot: Slot) -> BatchMode:
        """What the slot's next token needs."""
        task = slot.task
        assert task is not None
        id_joint = task.id if task.is_joint else -1
        return BatchMode(task.type, task.need_embd, slot.adapters.at(slot.prompt.n_tokens), id_joint)

    def _fits(self, slot: Slot) -> bool:
        """Whether the slot's next token can be in this batch."""
        return self.mode is None or self.mode == self._mode_of(slot)

    def _may_fit(self, slot: Slot) -> bool:
        """The same for a prompt of which it may not be known yet where it goes on."""
        task, mode = slot.task, self.mode
        assert task is not None
        if mode is None:
            return True
        if task.is_joint or mode.id_joint != -1:
            return False
        scales = (slot.adapters.scales, slot.adapters.at(0))
        return mode.type is task.type and mode.embeddings == task.need_embd and mode.scales in scales

    def _take_in(self, slot: Slot) -> bool:
        """Whether a generating slot can have its next token in this batch; the first one decides for whom it is."""
        try:
            if slot.prompt.n_tokens + 1 >= slot.n_ctx and not self._shift_context(slot):
                return False
        except Exception as exc:
            self.fail(slot, exc)
            return False
        if not self._fits(slot):
            return False
        self.mode = self._mode_of(slot)
        return True

    def _add_generating(self, slot: Slot) -> None:
        tokens = [slot.sampled, *slot.draft]
        first = slot.prompt.n_tokens
        slot.i_batch = self.batch.add(slot.sampled, first, slot.id, True)
        if slot.draft:
            self.batch.extend(slot.draft, first + 1, slot.id, True)
        self.outputs.extend(range(slot.i_batch, slot.i_batch + len(tokens)))
        slot.prompt.tokens += tokens

    def _shift_context(self, slot: Slot) -> bool:
        """Drop a middle part of a full context and move what follows down. False: the task was ended instead."""
        task = slot.task
        assert task is not None
        if not self.config.ctx_shift:
            self.emit.slot_error(slot, "context shift is disabled")
            self._release(slot)
            return False
        n_keep = task.n_tokens if task.params.n_keep < 0 else task.params.n_keep
        if self.backend.add_bos:
            n_keep += 1
        n_keep = min(slot.n_ctx - 4, n_keep)
        n_left = slot.prompt.n_tokens - n_keep
        n_discard = task.params.n_discard or n_left // 2
        n_discard = max(0, min(n_discard, max(0, n_left - 1)))
        slt_wrn(
            slot,
            "update_slots",
            "slot context shift, n_keep = %d, n_left = %d, n_discard = %d",
            n_keep,
            n_left,
            n_discard,
        )
        n_tokens = slot.prompt.n_tokens
        if self.pool.shared.n_shared(slot.id) > n_keep + n_discard and not self.pool.unshare(slot, n_keep + n_discard):
            self.emit.slot_error(slot, "context shift cannot be used for shared prompt")
            self._release(slot)
            self.pool.clear_prompt(slot)
            return False
        self.backend.seq_rm(slot.id, n_keep, n_keep + n_discard)
        self.backend.seq_add(slot.id, n_keep + n_discard, n_tokens, -n_discard)
        tokens = slot.prompt.tokens[:n_keep] + slot.prompt.tokens[n_keep + n_discard :]
        self.pool.shared.cut(slot.id, n_keep)
        # checkpoints speak of positions that no longer hold
        slot.prompt.checkpoints = []
        slot.prompt.tokens = tokens
        slot.prompt.moved(n_keep)
        slot.adapters = slot.adapters.without(n_keep, n_keep + n_discard)
        if self.backend.drafter is not None:
            self.backend.drafter.set_tokens(slot.id, tokens)
        slot.truncated = True
        return True

    def _can_split(self, slot: Slot) -> bool:
        """Whether the prompt may be computed in several batches."""
        task = slot.task
        assert task is not None
        if not task.need_embd:
            return True
        if task.type is TaskType.DECISION:
            return self.backend.has_memory
        return can_split_embeddings(self.backend)

    def _refuse(self, slot: Slot) -> bool:
        """Answer a prompt that cannot be worked on. True if it was one."""
        task = slot.task
        assert task is not None
        n_tokens = task.n_tokens
        if n_tokens == 0:
            slt_wrn(slot, "update_slots", "empty prompt - releasing slot")
            self._finish(slot)
            return True
        error: tuple[str, ErrorType] | None = None
        can_split = self._can_split(slot)
        if task.need_logits and not self.backend.has_memory:
            error = "the current context does not support logits computation. skipping", ErrorType.SERVER
        elif not can_split and 0 < slot.adapters.start < n_tokens:
            error = "this model computes a prompt in one piece, an aLoRA needs two", ErrorType.INVALID_REQUEST
        elif not can_split:
            if n_tokens > self.backend.n_ubatch:
                error = (
                    f"input ({n_tokens} tokens) is too large to process. increase the physical batch size "
                    f"(current batch size: {self.backend.n_ubatch})",
                    ErrorType.INVALID_REQUEST,
                )
            elif n_tokens > slot.n_ctx:
                error = (
                    f"input ({n_tokens} tokens) is larger than the max context size ({slot.n_ctx} tokens). skipping",
                    ErrorType.EXCEED_CONTEXT_SIZE,
                )
        elif n_tokens >= slot.n_ctx:
            error = (
                f"request ({n_tokens} tokens) exceeds the available context size ({slot.n_ctx} tokens), "
                "try increasing it",
                ErrorType.EXCEED_CONTEXT_SIZE,
            )
        elif task.decision is not None and 0 <= task.decision.first_read < n_tokens - self.backend.n_batch:
            n_read = n_tokens - task.decision.first_read
            error = (
                f"the question and its options ({n_read} tokens) are too large to process. increase the batch size "
                f"(current batch size: {self.backend.n_batch})",
                ErrorType.INVALID_REQUEST,
            )
        if error is None:
            return False
        self.emit.slot_error(slot, *error)
        self._release(slot)
        return True

    def _start_prompt(self, slot: Slot) -> bool:
        """First contact with a task's prompt: refuse it or find what can be reused. False if it was refused."""
        task = slot.task
        assert task is not None
        slot.stats.t_start = now_us()
        slot.state = SlotState.PROCESSING_PROMPT
        if self._refuse(slot):
            return False
        n_past = self.reuse.n_past(slot)
        slot.stats.n_prompt_cached = n_past
        slot.stats.n_prompt_processed = 0
        self.metrics.n_prompt_cached += n_past
        slot.prompt.keep_first(n_past)
        slt_trc(slot, "update_slots", "new prompt, n_tokens = %d, n_past = %d", task.n_tokens, n_past)
        if task.params.stream:
            self.emit.begin(slot)
        return True

    def _add_prompt(self, slot: Slot, limit: int) -> None:
        """Add as much of the slot's prompt as keeps the batch within ``limit`` entries."""
        task = slot.task
        assert task is not None
        backend, batch = self.backend, self.batch
        if slot.state is SlotState.STARTED and not self._start_prompt(slot):
            return
        prompt = slot.prompt
        if not self.pool.cut_cells(slot, prompt.n_tokens):
            # this memory cannot drop a part: start over
            self.pool.clear_prompt(slot)
            slot.stats.n_prompt_cached = 0

        whole = not self._can_split(slot)
        if (whole and batch.n_tokens + task.n_tokens > backend.n_batch) or not self._fits(slot):
            return
        print_prompt_progress(slot)
        first = prompt.n_tokens
        last = task.n_tokens if whole else min(task.n_tokens, first + limit - batch.n_tokens)
        start = slot.adapters.start
        if first < start:
            # the adapter goes on in between
            last = min(last, start)
        if task.n_tokens_shared >= first:
            last = self._stop_for_children(slot, last)
        if task.decision is not None and 0 <= task.decision.first_read < last < task.n_tokens:
            # what is read has to come out of one batch
            last = task.decision.first_read
            if last <= first:
                return
        scored = wants_scores(slot)
        if scored:
            # the context bounds the outputs of a batch
            last = min(last, first + MAX_OUTPUTS - self._n_score_outputs)
            if last <= first:
                return
        checkpoints = self.reuse.wants_checkpoints(slot)
        if checkpoints:
            last = min([last, *self.reuse.breaks(slot, backend.n_batch, backend.n_ubatch)])
        self.mode = self._mode_of(slot)
        tokens = task.tokens[first:last]
        index = batch.extend(tokens, first, slot.id, task.need_embd)
        if task.need_embd:
            self.outputs.extend(range(index, index + len(tokens)))
        elif scored:
            # the last one gives the first new token, like every prompt's
            n_outputs = min(last, task.n_tokens - 1) - first
            for entry in range(index, index + n_outputs):
                batch.set_output(entry, True)
            self.outputs.extend(range(index, index + n_outputs))
            self._n_score_outputs += n_outputs
        if task.decision is not None:
            for i, order in enumerate(task.decision.order[first:last]):
                if order:
                    batch.set_decision_order(index + i, order)
        self.parts.append(PromptPart(slot, index, index + len(tokens), first))
        prompt.tokens += tokens

        if prompt.n_tokens == task.n_tokens:
            slot.state = SlotState.DONE_PROMPT
            slot.i_batch = batch.n_tokens - 1
            batch.set_output(slot.i_batch, True)
            if not task.need_embd:
                self.outputs.append(slot.i_batch)
            slot.stats.n_gen = 0
            init_sampler(slot)
        if checkpoints:
            self.reuse.checkpoint(slot, len(tokens), backend.n_ubatch, is_bounded=limit < backend.n_batch)

    def _stop_for_children(self, slot: Slot, last: int) -> int:
        """Where the slot's prompt has to be interrupted, before ``last``, so that its children go on from there.

        Some memories can be copied only as a whole. Children whose part is there already are started.
        """
        assert slot.task is not None
        n_shared = slot.task.n_tokens_shared
        waiting = [other for other in self.pool.slots if other.waits_for(slot)]
        if slot.prompt.n_tokens == n_shared:
            for other in waiting:
                self.prefixes.wake(other)
            return last
        return min(last, n_shared) if waiting else last

    def fail(self, slot: Slot, exc: Exception) -> None:
        """Answer a slot's task with an unexpected error and free the slot."""
        slt_err(slot, "update_slots", "got exception: %s", exc)
        if slot.is_processing:
            is_of_request = str(exc).startswith(GRAMMAR_ERRORS)
            type_ = ErrorType.INVALID_REQUEST if is_of_request else ErrorType.SERVER
            self.emit.slot_error(slot, f"got exception: {exc}", type_)
            self._release(slot)

    def tasks_in(self, offset: int, end: int) -> frozenset[int]:
        """Ids of the tasks with entries in this part of the batch."""
        slots = [part.slot for part in self.parts if part.first < end and part.last > offset]
        slots += [slot for slot in self.pool.slots if offset <= slot.i_batch < end]
        return frozenset(slot.task.id for slot in slots if slot.task is not None)

    def rewind(self, offset: int) -> None:
        """Take back batch entries from ``offset`` on that were not decoded, so that the next turn adds them again."""
        for part in self.parts:
            n = part.last - max(part.first, offset)
            slot = part.slot
            if n > 0 and slot.is_processing:
                slot.prompt.keep_first(slot.prompt.n_tokens - n)
                slot.state = SlotState.PROCESSING_PROMPT
                slot.i_batch = -1
        for slot in self.pool.slots:
            if slot.state is SlotState.GENERATING and slot.i_batch >= offset:
                slot.prompt.keep_first(slot.prompt.n_tokens - 1 - len(slot.draft))
                slot.i_batch = -1

    def part_end(self, offset: int, n_batch: int) -> int:
        """End of the next part of the batch: at most ``n_batch`` entries, no draft cut in two.

        A draft that is larger than that is given up: then ``offset`` is returned and the batch has to be built anew.
        """
        end = min(offset + n_batch, self.batch.n_tokens)
        for slot in self.pool.slots:
            if slot.state is SlotState.GENERATING and slot.draft and slot.i_batch < end:
                last = slot.i_batch + len(slot.draft) + 1
                if slot.i_batch >= offset and last > end:
                    end = slot.i_batch
                    if end == offset:
                        self.rewind(offset)
                        # nothing of a draft, replayed or not, has been shown to anybody yet
                        slot.draft = []
                        slot.draft_is_replay = False
        return end
