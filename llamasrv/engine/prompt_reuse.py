"""How much of a new prompt need not be computed, because its cells or a checkpoint are there."""

from __future__ import annotations

from llamasrv.engine.backend import Backend, SeqRm
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.log import slt_trc, slt_wrn
from llamasrv.engine.prompt import Checkpoint
from llamasrv.engine.shared_cells import SharedCells
from llamasrv.engine.slot import Slot
from llamasrv.engine.task import TaskType

#: A checkpoint is taken so many tokens before the end of the prompt, and one ubatch earlier.
N_LAST = 4


class PromptReuse:
    """Reuse of what a slot's own sequence holds: common prefix, shifted chunks, checkpoints."""

    def __init__(self, backend: Backend, config: EngineConfig, shared: SharedCells) -> None:
        self.backend = backend
        self.config = config
        self.shared = shared
        self.n_swa = 0 if config.swa_full else backend.n_swa
        #: Whether the memory has a part that cannot be rolled back token by token.
        self.needs_checkpoints = (
            backend.has_memory
            and config.n_ctx_checkpoints > 0
            and (backend.seq_rm_type in (SeqRm.FULL, SeqRm.RS) or self.n_swa > 0)
        )

    def n_past(self, slot: Slot) -> int:
        """Tokens of the new task's prompt that the slot's cells already hold; cells are shifted or restored to fit.

        ``slot.prompt`` may be rearranged; the caller cuts it to the returned length.
        """
        task = slot.task
        assert task is not None
        if not task.reuses_prompt or not self.backend.has_memory:
            slot.prompt.checkpoints = []
            return 0
        n_past = slot.prompt.prefix(task.tokens)
        if task.n_tokens_shared:
            # the children begin at the end of what they share
            n_past = min(n_past, task.n_tokens_shared)
        if task.decision is not None and task.decision.first_read >= 0:
            # outputs are read from there on
            n_past = min(n_past, task.decision.first_read)
        if task.params.n_cache_reuse > 0 and slot.adapters.start == 0:
            if self.backend.can_shift:
                n_past = self._shift_chunks(slot, n_past, task.params.n_cache_reuse)
            else:
                slt_wrn(slot, "n_past", "cache reuse is not supported - ignoring n_cache_reuse")
        n_past = self._restore_checkpoint(slot, n_past)
        # at least one token has to be evaluated: its logits give the first new one
        if n_past == task.n_tokens and n_past > 0:
            n_past -= 1
        return n_past

    def _shift_chunks(self, slot: Slot, n_past: int, n_min: int) -> int:
        """Move chunks of at least ``n_min`` equal tokens from behind a gap to where the new prompt has them.

        Cells that other sequences hold, too, stay where they are.
        """
        assert slot.task is not None
        held, wanted = slot.prompt.tokens, slot.task.tokens
        head_p = n_past
        head_c = max(n_past, self.shared.n_shared(slot.id))
        self.shared.cut(slot.id, n_past)
        while head_c < len(held) and head_p < len(wanted):
            n_match = 0
            limit = min(len(held) - head_c, len(wanted) - head_p)
            while n_match < limit and held[head_c + n_match] == wanted[head_p + n_match]:
                n_match += 1
            if n_match < n_min:
                head_c += 1
                continue
            slt_trc(slot, "shift_chunks", "reusing %d tokens, shifting [%d, ...) -> [%d, ...)", n_match, head_c, head_p)
            if head_p != head_c:
                self.backend.seq_rm(slot.id, head_p, head_c)
                self.backend.seq_add(slot.id, head_c, head_c + n_match, head_p - head_c)
            slot.prompt.moved(head_p)
            held[head_p : head_p + n_match] = held[head_c : head_c + n_match]
            head_c += n_match
            head_p += n_match
        return head_p

    def _restore_checkpoint(self, slot: Slot, n_past: int) -> int:
        """Check that the memory still covers what ``n_past`` needs; else go back to a checkpoint, or to 0.

        A sliding window or a recurrent state keeps only the latest positions. Checkpoints beyond the position that
        is kept are dropped.
        """
        task = slot.task
        assert task is not None
        prompt = slot.prompt
        pos_next = n_past
        has_new_tokens = n_past < task.n_tokens
        pos_min_needed = max(0, pos_next - self.n_swa - (0 if has_new_tokens else 1))
        # -1: what was cut off left nothing of the window
        pos_min = self.backend.seq_pos_min(slot.id)
        if 0 < n_past <= prompt.n_tokens and (pos_min < 0 or pos_min >= pos_min_needed):
            found = self._usable_checkpoint(prompt.checkpoints, pos_min_needed, pos_next)
            if found is not None and self.backend.state_set(slot.id, found.data, partial=True):
                n_past = min(pos_next, max(found.pos_min + 1, found.pos_max), found.n_tokens)
                if found.pos_min > max(0, n_past - self.n_swa + 1):
                    # its window reaches back from its very end only
                    n_past = min(pos_next, found.n_tokens)
                pos_next = n_past
                slt_trc(slot, "restore_checkpoint", "restored checkpoint of %d tokens", found.n_tokens)
            else:
                if found is not None:
                    slt_wrn(slot, "restore_checkpoint", "failed to load context checkpoint")
                slt_trc(slot, "restore_checkpoint", "forcing full prompt re-processing due to lack of cache data")
                pos_next = n_past = 0
        prompt.checkpoints = [cur for cur in prompt.checkpoints if cur.pos_max <= pos_next]
        return n_past

    def has_window(self, slot: Slot) -> bool:
        """Whether the memory still holds all positions that the slot's next token looks at."""
        n_tokens = slot.prompt.n_tokens
        if self.n_swa == 0 or n_tokens == 0:
            return True
        return 0 <= self.backend.seq_pos_min(slot.id) <= max(0, n_tokens - self.n_swa)

    @staticmethod
    def _usable_checkpoint(checkpoints: list[Checkpoint], pos_min_needed: int, pos_next: int) -> Checkpoint | None:
        for cur in reversed(checkpoints):
            if cur.pos_max <= pos_next and (cur.pos_min < pos_min_needed or cur.pos_min == 0):
                return cur
        return None

    def wants_checkpoints(self, slot: Slot) -> bool:
        assert slot.task is not None
        return self.needs_checkpoints and slot.task.type is TaskType.COMPLETION

    def breaks(self, slot: Slot, n_batch: int, n_ubatch: int) -> list[int]:
        """Token counts at which the slot's prompt is interrupted, so that a checkpoint can be taken there."""
        task = slot.task
        assert task is not None
        out = {task.n_tokens - min(n_batch, offset) for offset in (N_LAST + n_ubatch, N_LAST)}
        starts = task.user_starts
        checkpoints = slot.prompt.checkpoints
        last = checkpoints[-1].n_tokens if checkpoints else None
        for start in starts:
            if start == starts[-1] or last is None or start > last + self.config.checkpoint_min_step:
                out.add(start)
        return sorted(n for n in out if n > slot.prompt.n_tokens)

    def checkpoint(self, slot: Slot, n_added: int, n_ubatch: int, is_bounded: bool) -> None:
        """Take a checkpoint of what was in memory before the ``n_added`` tokens that this batch adds, if one is due.

        ``is_bounded``: prompts go in small pieces at the moment; then not every piece near the end is worth one.
        """
        task = slot.task
        assert task is not None
        prompt = slot.prompt
        n_start = prompt.n_tokens - n_added
        is_user_start = n_start in task.user_starts
        is_last_user = bool(task.user_starts) and n_start == task.user_starts[-1]
        near_end = task.n_tokens < prompt.n_tokens + n_ubatch
        if is_bounded:
            near_end = task.n_tokens - n_start in (N_LAST, N_LAST + n_ubatch)
        done = prompt.n_tokens == task.n_tokens
        if not done and not is_user_start and not near_end:
            return
        pos_min = self.backend.seq_pos_min(slot.id)
        if pos_min < 0:
            return
        last = prompt.checkpoints[-1].n_tokens if prompt.checkpoints else None
        if last is not None and not (is_last_user or near_end or n_start > last + self.config.checkpoint_min_step):
            return
        self._make_room(slot, task.id)
        prompt.checkpoints = [cur for cur in prompt.checkpoints if cur.n_tokens != n_start]
        prompt.checkpoints.append(
            Checkpoint(
                n_tokens=n_start,
                pos_min=pos_min,
                pos_max=self.backend.seq_pos_max(slot.id),
                data=self.backend.state_get(slot.id, partial=True),
                id_task=task.id,
            )
        )
        slt_trc(slot, "checkpoint", "created context checkpoint %d, n_tokens = %d", len(prompt.checkpoints), n_start)

    def _make_room(self, slot: Slot, id_task: int) -> None:
        """When the list is full: drop what lies too close behind an earlier one, unless this task made it; then the
        oldest."""
        prompt = slot.prompt
        limit = self.config.n_ctx_checkpoints
        kept: list[Checkpoint] = []
        excess = len(prompt.checkpoints) + 1 - limit
        for cur in prompt.checkpoints:
            close = bool(kept) and cur.n_tokens <= kept[-1].n_tokens + self.config.checkpoint_min_step
            if excess >= 0 and close and cur.id_task != id_task:
                excess -= 1
                continue
            kept.append(cur)
        prompt.checkpoints = kept[max(0, len(kept) - limit + 1) :]
