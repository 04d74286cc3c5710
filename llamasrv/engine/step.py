"""One turn of inference: build the batch, decode it in parts, sample and hand out the tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable

from llamasrv.engine.backend import Backend, BackendError, DecodeStatus
from llamasrv.engine.batch_builder import BatchBuilder, BatchMode, init_sampler
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.emit import Emitter
from llamasrv.engine.generation import accept_token
from llamasrv.engine.log import INFO, active, slt_trc, srv_err, srv_wrn
from llamasrv.engine.metrics import ServerMetrics
from llamasrv.engine.outputs import read_output
from llamasrv.engine.prefix import PrefixSources
from llamasrv.engine.prompt_scores import read_scores, wants_scores
from llamasrv.engine.result import StopType, TokenProb
from llamasrv.engine.slot import Slot, SlotState
from llamasrv.engine.slots import SlotPool
from llamasrv.engine.speculation import Speculation
from llamasrv.engine.stats import now_us
from llamasrv.engine.timings import print_speed, print_timings

#: Probability of a token, and the most likely ``(token, probability)``.
Probabilities = tuple[float, list[tuple[int, float]]]


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
        drafter = backend.drafter
        self.speculation = Speculation(backend, drafter, pool, yield_to_queue) if drafter is not None else None
        self.builder = BatchBuilder(
            backend,
            config,
            pool,
            prefixes,
            emitter,
            metrics,
            release=release,
            finish=self._finish,
            speculation=self.speculation,
        )
        self.batch = self.builder.batch
        self._yield = yield_to_queue
        self._release = release
        self._serial = 0
        #: Tasks in the native call under way, and those of them whose clients left meanwhile.
        self._cancel_lock = threading.Lock()
        self._running: frozenset[int] = frozenset()
        self._left: set[int] = set()
        self._embeddings: bool | None = None
        self._scales: tuple[float, ...] | None = None
        # prompt tokens decoded without waiting for the result; their time is known after the next wait
        self._n_prompt_queued = 0
        self._t_prompt_start = 0

    def run(self) -> None:
        """One turn for all slots that have work. Errors end up with the requests concerned; nothing is raised."""
        try:
            self.builder.build()
        except Exception as exc:
            srv_err("update_slots", "pre_decode() failed: %s", exc)
            self.abort_all(f"pre_decode() failed: {exc}")
            return
        if self.builder.mode is None:
            return
        self._select_mode(self.builder.mode)
        n_batch = self.backend.n_batch
        offset = 0
        while offset < self.batch.n_tokens:
            n_tokens = self.builder.part_end(offset, n_batch) - offset
            if n_tokens == 0:
                return
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

    def _select_mode(self, mode: BatchMode) -> None:
        if self._scales != mode.scales:
            self._scales = mode.scales
            self.backend.set_lora([(i, scale) for i, scale in enumerate(mode.scales) if scale != 0.0])
        if self._embeddings != mode.embeddings:
            self._embeddings = mode.embeddings
            self.backend.set_embeddings(mode.embeddings)

    # -- decoding

    def _decode(self, offset: int, n_tokens: int) -> int:
        end = offset + n_tokens
        has_output = any(offset <= index < end for index in self.builder.outputs)
        started = now_us()
        with self._cancel_lock:
            self._serial += 1
            self._running = self.builder.tasks_in(offset, end)
            self._left.clear()
        serial = self._serial
        try:
            status = self._yield(lambda: self.backend.decode(self.batch, offset, n_tokens, has_output, serial))
        finally:
            with self._cancel_lock:
                self._running = frozenset()
        if status == DecodeStatus.OK:
            self._count(offset, end, started, has_output)
            if self.speculation is not None:
                self.speculation.process(offset, n_tokens)
            self._start_children(offset, end)
        return status

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
        for part in self.builder.parts:
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
                self.builder.budget.record(n_prompt, end - offset - n_prompt, (now - started) / 1e6)
            self._flush_prompt_metrics()

    def _flush_prompt_metrics(self) -> None:
        if self._n_prompt_queued:
            self.metrics.add_prompt(self._n_prompt_queued, now_us() - self._t_prompt_start)
            self._n_prompt_queued = 0

    def _start_children(self, offset: int, end: int) -> None:
        """Give the prompt of a parent to the slots that wait for it, once its last token is computed."""
        for slot in self.pool.slots:
            if slot.state is not SlotState.DONE_PROMPT or slot.task is None or not slot.task.is_parent:
                continue
            if not offset <= slot.i_batch < end:
                # the batch was decoded in parts, and the rest of the prompt is in a later one
                continue
            if slot.task.n_tokens_shared:
                # these go on by themselves, see PrefixSources.wake()
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
                    child.prompt_scores = slot.prompt_scores
                    child.stats.t_start = slot.stats.t_start
                    child.stats.t_prompt_last = slot.stats.t_prompt_last
                    child.stats.n_prompt_cached = slot.stats.n_prompt_cached
                    child.stats.n_prompt_processed = slot.stats.n_prompt_processed
                    init_sampler(child)
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
        self.builder.rewind(offset)
        victim = max((slot for slot in self.pool.slots if slot.is_processing), key=lambda slot: slot.prompt.n_tokens)
        self.emit.slot_error(victim, "Context size has been exceeded.")
        self._release(victim)
        self.pool.clear_prompt(victim)

    def _take_back(self, offset: int) -> None:
        """The native call was stopped part-way: drop what it already computed, keep what was there before."""
        self.builder.rewind(offset)
        for slot in self.pool.slots:
            if slot.is_processing and slot.state is not SlotState.WAIT_OTHER:
                if self.pool.cut_cells(slot, slot.prompt.n_tokens) and self.builder.reuse.has_window(slot):
                    continue
                # a state that cannot go back: compute the whole prompt again, or give up what cannot be repeated
                self.pool.clear_prompt(slot)
                if slot.state is SlotState.GENERATING:
                    self.emit.slot_error(slot, "Decoding was aborted.")
                    self._release(slot)

    # -- after decoding

    def _post_decode(self, offset: int, n_tokens: int) -> None:
        end = offset + n_tokens
        self._read_scores(offset, end)
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
                self.builder.fail(slot, exc)
                continue
            if slot.state is SlotState.GENERATING:
                ready.append(slot)
        plain = [slot for slot in ready if not slot.draft]
        if plain:
            self._sample(plain, offset)
        drafted = [slot for slot in ready if slot.draft]
        if drafted and self.speculation is not None:
            self._verify(drafted, offset, self.speculation)

    def _read_scores(self, offset: int, end: int) -> None:
        for part in self.builder.parts:
            slot = part.slot
            first, last = max(part.first, offset), min(part.last, end)
            if first < last and wants_scores(slot):
                try:
                    entries = ((part.pos0 + entry - part.first, entry - offset) for entry in range(first, last))
                    read_scores(self.backend, slot, entries)
                except Exception as exc:
                    self.builder.fail(slot, exc)

    def _prompt_done(self, slot: Slot, offset: int, end: int) -> bool:
        """The prompt is computed: answer a task that needs no more. True if tokens are to be generated."""
        task = slot.task
        assert task is not None
        requests = self.metrics.requests
        if not task.is_child:
            requests.prompt.observe(task.n_tokens)
            requests.cached.observe(slot.stats.n_prompt_cached / max(1, task.n_tokens))
        if not task.need_sampling:
            self.emit.send(read_output(self.backend, slot, self.builder.parts, offset, end))
            requests.duration.observe((now_us() - task.t_posted) / 1e6)
            self._release(slot)
            return False
        if task.prompt_logprobs >= 0 and task.params.stream:
            self.emit.prompt_scores(slot)
        if slot.n_predict_max == 0:
            slot.stop = StopType.LIMIT
            slot.has_next_token = False
            self._finish(slot)
            return False
        slot.state = SlotState.GENERATING
        if self.speculation is not None:
            self.speculation.begin(slot)
        return True

    def _verify(self, drafted: list[Slot], offset: int, speculation: Speculation) -> None:
        results = speculation.verify(drafted, offset)
        now = now_us()
        for slot, result in zip(drafted, results, strict=True):
            if result is None:
                continue
            try:
                if isinstance(result, BackendError):
                    raise result
                for place, token in enumerate(result.tokens):
                    self._take_token(slot, token, result.probs[place] if result.probs else None, now)
                    if not slot.is_processing:
                        break
            except Exception as exc:
                self.builder.fail(slot, exc)

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
                self._take_token(slot, token, self._probabilities(slot, token, index), now)
            except Exception as exc:
                self.builder.fail(slot, exc)

    def _take_token(self, slot: Slot, token: int, probs: Probabilities | None, now: int) -> None:
        """Add one token to the slot's answer and end the task if it was the last."""
        task = slot.task
        assert task is not None
        params = task.params
        stats = slot.stats
        stats.n_gen += 1
        if stats.n_gen == 1:
            if not task.is_child:
                self.metrics.requests.first_token.observe((now - task.t_posted) / 1e6)
            stats.t_prompt_last = now
            slot.t_print_last = now
            slot.n_gen_printed = 0
        else:
            self.metrics.requests.token_gap.observe((now - stats.t_gen_last) / 1e6)
        stats.t_gen_last = now

        backend = self.backend
        special = self.config.special or token in params.sampling.preserved_tokens
        prob: TokenProb | None = None
        if probs is not None:
            top = [(other, backend.piece(other, self.config.special), p) for other, p in probs[1]]
            prob = TokenProb(token, b"", probs[0], top)
        shown, counts = accept_token(
            slot, token, backend.piece(token, special), backend.is_eog(token), self.config.ctx_shift
        )
        # a scored text has an entry for every token
        if prob is not None and (counts or task.prompt_logprobs >= 0):
            prob.piece = shown
            slot.probs.append(prob)
        if params.stream and (counts or shown):
            # of a stop string neither text nor probabilities are told
            is_stop = slot.stop is StopType.WORD and not shown
            self.emit.partial(slot, shown, token, None if is_stop else prob)
        if not slot.has_next_token:
            self._finish(slot)
        elif active(INFO):
            print_speed(slot, now)

    def _probabilities(self, slot: Slot, token: int, index: int) -> Probabilities | None:
        """What the client asked to know about a token just sampled from an entry of the last decode."""
        task = slot.task
        assert task is not None
        assert slot.sampler is not None
        n_probs = task.params.sampling.n_probs
        if n_probs <= 0:
            return None
        return self.backend.token_probs(slot.sampler, index, token, n_probs, task.params.post_sampling_probs)

    def _finish(self, slot: Slot) -> None:
        """Send the final result and free the slot."""
        task = slot.task
        assert task is not None
        print_timings(slot, self.backend.n_reused())
        if self.speculation is not None:
            self.speculation.drafter.print_stats()
        n_stop = 0
        if task.params.sampling.n_probs > 0 and slot.stop is StopType.WORD and not task.params.stream:
            n_stop = len(self.backend.tokenize(slot.stopping_word, False, False))
        self.emit.final(slot, n_stop)
        if not task.is_child:
            self.metrics.requests.duration.observe((now_us() - task.t_posted) / 1e6)
        self._release(slot)
