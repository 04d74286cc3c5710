"""One turn of inference: build the batch, decode it in parts, sample and hand out the tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from llamasrv.engine.backend import Backend, BackendError, Batch, DecodeStatus
from llamasrv.engine.chunk_budget import ChunkBudget
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.emit import Emitter
from llamasrv.engine.generation import accept_token
from llamasrv.engine.log import INFO, active, slt_err, slt_inf, slt_trc, slt_wrn, srv_err, srv_wrn
from llamasrv.engine.metrics import ServerMetrics
from llamasrv.engine.prefix import PrefixSources
from llamasrv.engine.prompt_reuse import PromptReuse
from llamasrv.engine.result import EmbeddingResult, ErrorType, RerankResult, StopType, TokenProb
from llamasrv.engine.slot import Slot, SlotState
from llamasrv.engine.slots import SlotPool
from llamasrv.engine.stats import now_us
from llamasrv.engine.task import TaskType

T = TypeVar("T")

#: llama_pooling_type
POOLING_NONE, POOLING_LAST, POOLING_RANK = 0, 3, 4


@dataclass(slots=True)
class PromptPart:
    """Batch entries [first, last) that are prompt tokens of ``slot``."""

    slot: Slot
    first: int
    last: int


class FatalDecodeError(RuntimeError):
    """The batch cannot be decoded, whatever its size."""


class Step:
    """The three phases of a turn and the batch they share. Used by the main-loop thread only.

    ``yield_to_queue`` runs a native call while read-only tasks are answered; ``release`` ends a slot's task.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        pool: SlotPool,
        prefixes: PrefixSources,
        emitter: Emitter,
        metrics: ServerMetrics,
        yield_to_queue: Callable[[Callable[[], int]], int],
        release: Callable[[Slot], None],
    ) -> None:
        self.backend = backend
        self.config = config
        self.pool = pool
        self.prefixes = prefixes
        self.emit = emitter
        self.metrics = metrics
        self.reuse = PromptReuse(backend, config)
        self._yield = yield_to_queue
        self._release = release
        self.batch: Batch = backend.new_batch(max(backend.n_batch, config.n_parallel))
        #: First slot in the batch: every other one has to be compatible with it.
        self._lead: Slot | None = None
        self._parts: list[PromptPart] = []
        self._outputs: list[int] = []
        self._serial = 0
        self._budget = ChunkBudget(config.stream_gap_ms)
        #: Tasks in the native call under way, and those of them whose clients left meanwhile.
        self._cancel_lock = threading.Lock()
        self._running: frozenset[int] = frozenset()
        self._left: set[int] = set()
        self._embeddings: bool | None = None
        self._lora: tuple[float, ...] | None = None
        # prompt tokens decoded without waiting for the result; their time is known after the next wait
        self._n_prompt_queued = 0
        self._t_prompt_start = 0

    def run(self) -> None:
        """One turn for all slots that have work. Errors end up with the requests concerned; nothing is raised."""
        try:
            self._pre_decode()
        except Exception as exc:
            srv_err("update_slots", "pre_decode() failed: %s", exc)
            self.abort_all(f"pre_decode() failed: {exc}")
            return
        if self._lead is None:
            return
        self._select_batch_mode(self._lead)
        n_batch = self.backend.n_batch
        offset = 0
        while offset < self.batch.n_tokens:
            n_tokens = min(n_batch, self.batch.n_tokens - offset)
            try:
                status = self._decode(offset, n_tokens)
                if status == DecodeStatus.NO_KV_SPACE and n_batch > 1:
                    if not self.pool.clear_one_idle():
                        n_batch //= 2
                    srv_wrn(
                        "update_slots",
                        "failed to find free space in the KV cache, retrying, off = %d, n_batch = %d",
                        offset,
                        n_batch,
                    )
                    continue
                if status == DecodeStatus.NO_KV_SPACE:
                    self._out_of_cells(offset)
                    return
                if status == DecodeStatus.ABORTED:
                    self._take_back(offset)
                    return
                if status != DecodeStatus.OK:
                    self._fatal(status, offset)
            except Exception as exc:
                srv_err("update_slots", "decode() failed: %s", exc)
                self.abort_all(f"decode() failed: {exc}")
                return
            self._post_decode(offset, n_tokens)
            offset += n_tokens
            n_batch = self.backend.n_batch

    def abort_all(self, message: str) -> None:
        """End every task with an error and forget all cells: how much of the batch is in them is not known."""
        for slot in self.pool.slots:
            if slot.is_processing:
                self.emit.slot_error(slot, message)
                self._release(slot)
                self.pool.clear_prompt(slot)

    def flush_idle(self) -> None:
        """Count prompt tokens whose decode has not been waited for."""
        if self._n_prompt_queued:
            self.backend.synchronize()
            self._flush_prompt_metrics()

    def _fail(self, slot: Slot, exc: Exception) -> None:
        slt_err(slot, "update_slots", "got exception: %s", exc)
        if slot.is_processing:
            self.emit.slot_error(slot, f"got exception: {exc}")
            self._release(slot)

    # -- building the batch

    def _pre_decode(self) -> None:
        self.batch.clear()
        self._lead = None
        self._parts.clear()
        self._outputs.clear()
        for slot in self.pool.slots:
            if slot.state is SlotState.WAIT_OTHER:
                self.prefixes.wake(slot)
        for slot in self.pool.slots:
            if slot.state is SlotState.GENERATING:
                try:
                    self._add_generating(slot)
                except Exception as exc:
                    self._fail(slot, exc)
        if not self.config.cont_batching and self.batch.n_tokens:
            return
        # who came first is computed first
        prompts = [slot for slot in self.pool.slots if slot.state in (SlotState.STARTED, SlotState.PROCESSING_PROMPT)]
        prompts.sort(key=lambda slot: slot.task.arrival if slot.task else 0)
        limit = self.backend.n_batch
        if self.batch.n_tokens:
            limit = min(limit, self.batch.n_tokens + self._budget.limit(self.backend.n_batch))
        for slot in prompts:
            if self.batch.n_tokens >= limit:
                break
            if not self._fits_batch(slot):
                continue
            try:
                self._add_prompt(slot, limit)
            except Exception as exc:
                self._fail(slot, exc)

    def _fits_batch(self, slot: Slot) -> bool:
        return self._lead is None or self._lead.can_batch_with(slot)

    def _add_generating(self, slot: Slot) -> None:
        if slot.prompt.n_tokens + 1 >= slot.n_ctx and not self._shift_context(slot):
            return
        if not self._fits_batch(slot):
            return
        self._lead = self._lead or slot
        slot.i_batch = self.batch.add(slot.sampled, slot.prompt.n_tokens, slot.id, True)
        self._outputs.append(slot.i_batch)
        slot.prompt.tokens.append(slot.sampled)

    def _shift_context(self, slot: Slot) -> bool:
        """Drop a middle part of a full context and move what follows down. False: the task was ended instead."""
        task = slot.task
        assert task is not None
        if not self.config.ctx_shift:
            self.emit.slot_error(slot, "context shift is disabled")
            self._release(slot)
            return False
        if task.is_parent or task.is_child:
            self.emit.slot_error(slot, "context shift cannot be used for shared prompt")
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
        slot.prompt.clear()
        slot.prompt.tokens = tokens
        slot.truncated = True
        return True

    def _can_split(self, slot: Slot) -> bool:
        """Whether the prompt may be computed in several batches: only if its output comes from the last token."""
        task = slot.task
        assert task is not None
        if not task.need_embd:
            return True
        if not self.backend.has_memory:
            return False
        pooling = self.backend.pooling_type
        return pooling == POOLING_LAST or (pooling == POOLING_RANK and self.backend.causal_attn)

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
        if task.need_logits and not self.backend.has_memory:
            error = "the current context does not support logits computation. skipping", ErrorType.SERVER
        elif not self._can_split(slot):
            if n_tokens > self.backend.n_ubatch:
                error = (
                    f"input ({n_tokens} tokens) is too large to process. increase the physical batch size "
                    f"(current batch size: {self.backend.n_ubatch})",
                    ErrorType.SERVER,
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
        whole = not self._can_split(slot)
        if whole and batch.n_tokens + task.n_tokens > backend.n_batch:
            return
        prompt = slot.prompt
        self._print_prompt_progress(slot)
        if not self.pool.cut_cells(slot, prompt.n_tokens):
            # this memory cannot drop a part: start over
            self.pool.clear_prompt(slot)
            slot.stats.n_prompt_cached = 0

        first = prompt.n_tokens
        last = task.n_tokens if whole else min(task.n_tokens, first + limit - batch.n_tokens)
        checkpoints = self.reuse.wants_checkpoints(slot)
        if checkpoints:
            last = min([last, *self.reuse.breaks(slot, backend.n_batch, backend.n_ubatch)])
        tokens = task.tokens[first:last]
        index = batch.extend(tokens, first, slot.id, task.need_embd)
        if task.need_embd:
            self._outputs.extend(range(index, index + len(tokens)))
        self._parts.append(PromptPart(slot, index, index + len(tokens)))
        prompt.tokens += tokens
        self._lead = self._lead or slot

        if prompt.n_tokens == task.n_tokens:
            slot.state = SlotState.DONE_PROMPT
            slot.i_batch = batch.n_tokens - 1
            batch.set_output(slot.i_batch, True)
            if not task.need_embd:
                self._outputs.append(slot.i_batch)
            slot.stats.n_gen = 0
            self._init_sampler(slot)
        if checkpoints:
            self.reuse.checkpoint(slot, len(tokens), backend.n_ubatch)

    def _init_sampler(self, slot: Slot) -> None:
        """Show the sampler the prompt, for its penalties."""
        if slot.sampler is not None:
            slot.sampler.reset()
            slot.sampler.accept(slot.prompt.tokens, False)

    def _select_batch_mode(self, lead: Slot) -> None:
        assert lead.task is not None
        if self._lora != lead.adapters:
            self._lora = lead.adapters
            self.backend.set_lora([(i, scale) for i, scale in enumerate(lead.adapters) if scale != 0.0])
        if self._embeddings != lead.task.need_embd:
            self._embeddings = lead.task.need_embd
            self.backend.set_embeddings(self._embeddings)

    # -- decoding

    def _decode(self, offset: int, n_tokens: int) -> int:
        end = offset + n_tokens
        has_output = any(offset <= index < end for index in self._outputs)
        started = now_us()
        with self._cancel_lock:
            self._serial += 1
            self._running = self._tasks_in(offset, end)
            self._left.clear()
        serial = self._serial
        try:
            status = self._yield(lambda: self.backend.decode(self.batch, offset, n_tokens, has_output, serial))
        finally:
            with self._cancel_lock:
                self._running = frozenset()
        if status == DecodeStatus.OK:
            self._count(offset, end, started, has_output)
            self._start_children()
        return status

    def _tasks_in(self, offset: int, end: int) -> frozenset[int]:
        """Ids of the tasks with entries in this part of the batch."""
        slots = [part.slot for part in self._parts if part.first < end and part.last > offset]
        slots += [slot for slot in self.pool.slots if offset <= slot.i_batch < end]
        return frozenset(slot.task.id for slot in slots if slot.task is not None)

    def cancelled(self, id_task: int) -> None:
        """A task's client left: stop the native call under way if nobody else has a share in it. From any thread."""
        with self._cancel_lock:
            if id_task in self._running:
                self._left.add(id_task)
                if self._left >= self._running:
                    self.backend.abort(self._serial)

    def _count(self, offset: int, end: int, started: int, waited: bool) -> None:
        metrics = self.metrics
        metrics.n_decode += 1
        for slot in self.pool.slots:
            if slot.is_processing:
                metrics.n_busy_slots += 1
            metrics.n_tokens_max = max(metrics.n_tokens_max, slot.prompt.n_tokens)
        now = now_us()
        n_prompt = 0
        for part in self._parts:
            n = min(part.last, end) - max(part.first, offset)
            if n <= 0:
                continue
            n_prompt += n
            if self._n_prompt_queued == 0:
                self._t_prompt_start = started
            self._n_prompt_queued += n
            if part.slot.stats.is_set:
                part.slot.stats.n_prompt_processed += n
                part.slot.stats.t_prompt_last = now
        if waited:
            if self._n_prompt_queued == n_prompt:
                self._budget.record(n_prompt, end - offset - n_prompt, (now - started) / 1e6)
            self._flush_prompt_metrics()

    def _flush_prompt_metrics(self) -> None:
        if self._n_prompt_queued:
            self.metrics.add_prompt(self._n_prompt_queued, now_us() - self._t_prompt_start)
            self._n_prompt_queued = 0

    def _start_children(self) -> None:
        """Give the computed prompt of a parent to the slots that wait for it."""
        for slot in self.pool.slots:
            if slot.state is not SlotState.DONE_PROMPT or slot.task is None or not slot.task.is_parent:
                continue
            for child in self.pool.slots:
                waits = child.state is SlotState.WAIT_OTHER and child.task is not None
                if waits and child.task and child.task.id_parent == slot.task.id:
                    slt_trc(slot, "update_slots", " - copying state to child %d", child.id)
                    child.wait = None
                    if not self.prefixes.copy(slot, child, slot.prompt.n_tokens):
                        child.state = SlotState.STARTED
                        continue
                    child.i_batch = slot.i_batch
                    child.stats.t_start = slot.stats.t_start
                    child.stats.t_prompt_last = slot.stats.t_prompt_last
                    child.stats.n_prompt_cached = slot.stats.n_prompt_cached
                    child.stats.n_prompt_processed = slot.stats.n_prompt_processed
                    self._init_sampler(child)
                    child.state = SlotState.DONE_PROMPT

    def _fatal(self, status: int, offset: int) -> None:
        """Raises :class:`FatalDecodeError` for a status that no retry can mend."""
        message = "Invalid input batch." if status == DecodeStatus.INVALID_BATCH else "Compute error."
        srv_err("decode", "%s off = %d, ret = %d", message, offset, status)
        for slot in self.pool.slots:
            if slot.is_processing:
                self.emit.slot_error(slot, message)
                self._release(slot)
                self.pool.clear_prompt(slot)
        raise FatalDecodeError(message)

    def _out_of_cells(self, offset: int) -> None:
        """Not even one token finds a cell: end the task that holds most of them, go on with the others."""
        self._rewind(offset)
        victim = max((slot for slot in self.pool.slots if slot.is_processing), key=lambda slot: slot.prompt.n_tokens)
        self.emit.slot_error(victim, "Context size has been exceeded.")
        self._release(victim)
        self.pool.clear_prompt(victim)

    def _take_back(self, offset: int) -> None:
        """The native call was stopped part-way: drop what it already computed, keep what was there before."""
        self._rewind(offset)
        for slot in self.pool.slots:
            if slot.is_processing and slot.state is not SlotState.WAIT_OTHER:
                if self.pool.cut_cells(slot, slot.prompt.n_tokens):
                    continue
                # a state that cannot go back: compute the whole prompt again, or give up what cannot be repeated
                self.pool.clear_prompt(slot)
                if slot.state is SlotState.GENERATING:
                    self.emit.slot_error(slot, "Decoding was aborted.")
                    self._release(slot)

    def _rewind(self, offset: int) -> None:
        """Take back batch entries from ``offset`` on that were not decoded, so that the next turn adds them again."""
        for part in self._parts:
            n = part.last - max(part.first, offset)
            slot = part.slot
            if n > 0 and slot.is_processing:
                slot.prompt.keep_first(slot.prompt.n_tokens - n)
                slot.state = SlotState.PROCESSING_PROMPT
                slot.i_batch = -1
        for slot in self.pool.slots:
            if slot.state is SlotState.GENERATING and slot.i_batch >= offset:
                slot.prompt.keep_first(slot.prompt.n_tokens - 1)
                slot.i_batch = -1

    # -- after decoding

    def _post_decode(self, offset: int, n_tokens: int) -> None:
        end = offset + n_tokens
        ready: list[Slot] = []
        for slot in self.pool.slots:
            if slot.state in (SlotState.PROCESSING_PROMPT, SlotState.DONE_PROMPT):
                task = slot.task
                assert task is not None
                if task.params.stream and task.params.return_progress:
                    self.emit.progress(slot)
            if not offset <= slot.i_batch < end:
                continue
            try:
                if slot.state is SlotState.DONE_PROMPT and not self._prompt_done(slot, offset, end):
                    continue
            except Exception as exc:
                self._fail(slot, exc)
                continue
            if slot.state is SlotState.GENERATING:
                ready.append(slot)
        if ready:
            self._sample(ready, offset)

    def _prompt_done(self, slot: Slot, offset: int, end: int) -> bool:
        """The prompt is computed: answer a task that needs no more. True if tokens are to be generated."""
        task = slot.task
        assert task is not None
        if task.type is TaskType.EMBEDDING:
            self._send_embedding(slot, offset, end)
        elif task.type is TaskType.RERANK:
            self._send_rerank(slot, offset)
        elif slot.n_predict_max == 0:
            slot.stop = StopType.LIMIT
            slot.has_next_token = False
            self._finish(slot)
            return False
        else:
            slot.state = SlotState.GENERATING
            return True
        self._release(slot)
        return False

    def _sample(self, ready: list[Slot], offset: int) -> None:
        samplers = []
        for slot in ready:
            assert slot.sampler is not None
            samplers.append(slot.sampler)
        indices = [slot.i_batch - offset for slot in ready]
        tokens = self.backend.sample_many(samplers, indices)
        now = now_us()
        for slot, index, token in zip(ready, indices, tokens, strict=True):
            slot.i_batch = -1
            try:
                if isinstance(token, BackendError):
                    raise token
                self._take_token(slot, token, index, now)
            except Exception as exc:
                self._fail(slot, exc)

    def _take_token(self, slot: Slot, token: int, index: int, now: int) -> None:
        task = slot.task
        assert task is not None
        params = task.params
        stats = slot.stats
        stats.n_gen += 1
        if stats.n_gen == 1:
            stats.t_prompt_last = now
            slot.t_print_last = now
            slot.n_gen_printed = 0
        stats.t_gen_last = now

        backend = self.backend
        special = self.config.special or token in params.sampling.preserved_tokens
        prob: TokenProb | None = None
        if params.sampling.n_probs > 0:
            prob = self._probabilities(slot, token, index)
        shown, counts = accept_token(
            slot, token, backend.piece(token, special), backend.is_eog(token), self.config.ctx_shift
        )
        if prob is not None and counts:
            prob.piece = shown
            slot.probs.append(prob)
        if params.stream and (counts or shown):
            self.emit.partial(slot, shown, token, prob)
        if not slot.has_next_token:
            self._finish(slot)
        elif active(INFO):
            self._print_speed(slot, now)

    def _probabilities(self, slot: Slot, token: int, index: int) -> TokenProb:
        task = slot.task
        assert task is not None
        assert slot.sampler is not None
        prob, top = self.backend.token_probs(
            slot.sampler, index, token, task.params.sampling.n_probs, task.params.post_sampling_probs
        )
        special = self.config.special
        return TokenProb(token, b"", prob, [(other, self.backend.piece(other, special), p) for other, p in top])

    def _finish(self, slot: Slot) -> None:
        """Send the final result and free the slot."""
        task = slot.task
        assert task is not None
        self._print_timings(slot)
        n_stop = 0
        if task.params.sampling.n_probs > 0 and slot.stop is StopType.WORD and not task.params.stream:
            n_stop = len(self.backend.tokenize(slot.stopping_word, False, False))
        self.emit.final(slot, n_stop)
        self._release(slot)

    def _send_embedding(self, slot: Slot, offset: int, end: int) -> None:
        task = slot.task
        assert task is not None
        vectors: list[list[float]] = []
        if self.backend.pooling_type == POOLING_NONE:
            for part in self._parts:
                if part.slot is slot:
                    for index in range(max(part.first, offset), min(part.last, end)):
                        vectors.append(self.backend.embeddings_ith(index - offset) or self._zeros())
        else:
            vectors.append(self.backend.embeddings_seq(slot.id) or self._zeros())
        self.emit.send(EmbeddingResult(id=task.id, index=task.index, embedding=vectors, n_tokens=task.n_tokens))

    def _zeros(self) -> list[float]:
        return [0.0] * self.backend.n_embd_out

    def _send_rerank(self, slot: Slot, offset: int) -> None:
        task = slot.task
        assert task is not None
        vector = self.backend.embeddings_seq(slot.id) or self.backend.embeddings_ith(slot.i_batch - offset)
        score = vector[0] if vector else -1e6
        self.emit.send(RerankResult(id=task.id, index=task.index, score=score, n_tokens=task.n_tokens))

    # -- log lines

    def _print_prompt_progress(self, slot: Slot) -> None:
        stats = slot.stats
        if active(INFO) and slot.task is not None and stats.t_prompt_ms >= 3000.0:
            slt_inf(
                slot,
                "print_timings",
                "prompt processing, n_tokens = %6d, progress = %.2f, t = %6.2f s / %.2f tokens per second",
                stats.n_prompt_processed,
                slot.prompt.n_tokens / max(1, slot.task.n_tokens),
                stats.t_prompt_ms / 1e3,
                stats.n_prompt_tps,
            )

    @staticmethod
    def _print_speed(slot: Slot, now: int) -> None:
        stats = slot.stats
        if stats.n_gen < 100 or now - slot.t_print_last < 3_000_000:
            return
        window = 1e6 * (stats.n_gen - slot.n_gen_printed) / (now - slot.t_print_last)
        slot.t_print_last = now
        slot.n_gen_printed = stats.n_gen
        slt_inf(
            slot,
            "print_timings",
            "n_gen = %6d, tg = %6.2f t/s, tg_3s = %6.2f t/s",
            stats.n_gen,
            stats.n_gen_tps,
            window,
        )

    def _print_timings(self, slot: Slot) -> None:
        if not active(INFO):
            return
        stats = slot.stats
        for name, t_ms, n, per_token, per_second in (
            (
                "prompt eval time",
                stats.t_prompt_ms,
                stats.n_prompt_processed,
                stats.t_prompt_per_token_ms,
                stats.n_prompt_tps,
            ),
            ("       eval time", stats.t_gen_ms, stats.n_gen, stats.t_gen_per_token_ms, stats.n_gen_tps),
        ):
            slt_inf(
                slot,
                "print_timings",
                "%s = %10.2f ms / %5d tokens (%8.2f ms per token, %8.2f tokens per second)",
                name,
                t_ms,
                n,
                per_token,
                per_second,
            )
        slt_inf(
            slot,
            "print_timings",
            "      total time = %10.2f ms / %5d tokens",
            stats.t_prompt_ms + stats.t_gen_ms,
            stats.n_prompt_processed + stats.n_gen,
        )
        slt_inf(slot, "print_timings", "   graphs reused = %10d", self.backend.n_reused())
