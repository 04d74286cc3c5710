"""Speculative decoding: drafts for the generating slots, their verification, and the way back from a wrong one."""

from __future__ import annotations

from collections.abc import Callable

from llamasrv.engine.backend import Backend, BackendError, Sampler, SeqRm
from llamasrv.engine.drafting import Drafter, DraftRequest, Verified, VerifyRequest
from llamasrv.engine.log import slt_dbg
from llamasrv.engine.slot import DraftCheckpoint, Slot
from llamasrv.engine.slots import SlotPool


class Speculation:
    """Used by the main-loop thread. ``yield_to_queue`` runs a native call while read-only tasks are answered."""

    def __init__(
        self,
        backend: Backend,
        drafter: Drafter,
        pool: SlotPool,
        yield_to_queue: Callable[[Callable[[], int]], int],
    ) -> None:
        self.backend = backend
        self.drafter = drafter
        self.pool = pool
        self._yield = yield_to_queue

    def begin(self, slot: Slot) -> None:
        """The slot's prompt is computed and generation starts."""
        assert slot.task is not None
        self.drafter.begin(slot.id, slot.prompt.tokens, slot.task.params.sampling.seed)

    def draft(self, slots: list[Slot], n_batch: int) -> None:
        """Give each slot a draft, unless it has one to be computed again; together they fit a batch."""
        wanting: list[Slot] = []
        requests: list[DraftRequest] = []
        room = n_batch // max(1, len(slots)) - 1
        for slot in slots:
            task = slot.task
            assert task is not None
            n_max = min(self._n_max(slot), room, self.drafter.n_max)
            if slot.draft:
                continue
            if n_max <= 0:
                continue
            sampling = task.params.sampling
            slot.draft_checkpoint = DraftCheckpoint(
                slot.prompt.n_tokens,
                draft=self.drafter.checkpoint(slot.id) if self.drafter.seq_rm_type is SeqRm.FULL else b"",
            )
            wanting.append(slot)
            requests.append(
                DraftRequest(slot.id, slot.prompt.tokens, slot.sampled, n_max, sampling.temp, sampling.seed)
            )
        if not wanting:
            return
        drafts: list[list[int]] = []

        def work() -> int:
            drafts.extend(self.drafter.draft(requests))
            return 0

        self._yield(work)
        for slot, draft in zip(wanting, drafts, strict=True):
            self._take_draft(slot, draft)

    def _n_max(self, slot: Slot) -> int:
        """Tokens that may be drafted: what fits the context, one left for a shift, and what may still be generated."""
        n_max = slot.n_ctx - slot.prompt.n_tokens - 2
        return min(n_max, slot.n_remaining - 1) if slot.n_remaining > 0 else n_max

    def _take_draft(self, slot: Slot, draft: list[int]) -> None:
        checkpoint = slot.draft_checkpoint
        assert checkpoint is not None
        slot.draft = draft
        slot.stats.n_draft_tokens += len(draft)
        # the drafter has run ahead in its own memory
        self.drafter.roll_back(slot.id, checkpoint.draft, checkpoint.n_tokens)
        if not draft:
            return
        if not self._can_drop(len(draft)):
            checkpoint.target = self.backend.state_get(slot.id, partial=True)
        if self.drafter.seq_rm_type is SeqRm.RS and len(draft) > self.drafter.n_rs_seq:
            checkpoint.draft = self.drafter.checkpoint(slot.id)

    def _can_drop(self, n_tokens: int) -> bool:
        """Whether the model's memory can drop its last ``n_tokens`` tokens."""
        kind = self.backend.seq_rm_type
        return kind is SeqRm.PART or (kind is SeqRm.RS and n_tokens <= self.backend.n_rs_seq)

    def process(self, offset: int, n_tokens: int) -> None:
        """Show the drafter what was decoded. Where it fails its cells are dropped: drafts get worse, texts do not."""
        batch = self.pool.batch
        if self._yield(lambda: int(self.drafter.process(batch, offset, n_tokens))):
            return
        for slot in self.pool.slots:
            self.drafter.roll_back(slot.id, b"", 0)

    def verify(self, slots: list[Slot], offset: int) -> list[Verified | BackendError | None]:
        """Tokens that stand, for each slot with a draft in the part of the batch that starts at ``offset``.

        The cells then hold what stands, and so does the slot's prompt; the last token is still to be decoded. None: the
        memory could only go back to before the draft; what stands of it is the slot's next draft.
        """
        saved: dict[int, Sampler] = {}
        requests: list[VerifyRequest] = []
        for slot in slots:
            task = slot.task
            assert task is not None
            assert slot.sampler is not None
            if slot.draft_checkpoint is not None and slot.draft_checkpoint.target:
                saved[slot.id] = self.backend.clone_sampler(slot.sampler)
            sampling = task.params.sampling
            requests.append(
                VerifyRequest(
                    sampler=slot.sampler,
                    seq_id=slot.id,
                    index=slot.i_batch - offset,
                    draft=slot.draft,
                    replay=slot.draft_is_replay,
                    rejection=sampling.temp > 0,
                    n_top=sampling.n_probs if sampling.n_probs > 0 else -1,
                    post=task.params.post_sampling_probs,
                )
            )
        try:
            results = self.drafter.verify(requests)
            return [
                result if isinstance(result, BackendError) else self._settle(slot, result, saved.get(slot.id))
                for slot, result in zip(slots, results, strict=True)
            ]
        finally:
            for sampler in saved.values():
                sampler.close()

    def _settle(self, slot: Slot, result: Verified, before: Sampler | None) -> Verified | None:
        n_draft = len(slot.draft)
        n_back = n_draft + 1 - len(result.tokens)
        slot.i_batch = -1
        if n_back > 0 and not self._can_drop(n_back):
            self._replay(slot, result, before)
            return None
        self.drafter.accept(slot.id, len(result.tokens) - 1)
        n_accepted = len(result.tokens) - 1
        if slot.draft_is_replay and n_accepted > 0:
            # the last token of a replayed draft is the model's own
            n_accepted -= 1
        slot.draft = []
        slot.draft_is_replay = False
        slot.stats.n_draft_accepted += n_accepted
        slot.stats.n_draft_verif_steps += 1
        if not slot.n_accepted_per_pos:
            slot.n_accepted_per_pos = [0] * self.drafter.n_max
        for position in range(min(n_accepted, len(slot.n_accepted_per_pos))):
            slot.n_accepted_per_pos[position] += 1
        slot.prompt.keep_first(slot.prompt.n_tokens - n_draft)
        slot.prompt.tokens += result.tokens[:-1]
        slot.sampled = result.tokens[-1]
        self.pool.cut_cells(slot, slot.prompt.n_tokens)
        slt_dbg(slot, "verify", "accepted %d/%d draft tokens", n_accepted, n_draft)
        return result

    def _replay(self, slot: Slot, result: Verified, before: Sampler | None) -> None:
        """Go back to before the draft and let the next step compute what stands of it."""
        checkpoint = slot.draft_checkpoint
        assert checkpoint is not None
        assert slot.sampler is not None
        assert before is not None
        if not self.backend.state_set(slot.id, checkpoint.target, partial=True):
            raise BackendError("failed to restore the state before a draft")
        self.pool.cut_cells(slot, checkpoint.n_tokens)
        slot.prompt.keep_first(checkpoint.n_tokens)
        self.backend.copy_sampler(before, slot.sampler)
        slot.draft = result.tokens
        slot.draft_is_replay = True
