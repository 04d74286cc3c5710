"""All slots: which one a task gets, and what happens to the prompt that was in it."""

from __future__ import annotations

from llamasrv.engine.adapters import Adapters, n_computed
from llamasrv.engine.backend import Backend
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.log import slt_dbg, slt_inf, slt_trc, slt_wrn, srv_trc, srv_wrn
from llamasrv.engine.prompt_cache import PromptCache
from llamasrv.engine.shared_cells import SharedCells
from llamasrv.engine.slot import Slot
from llamasrv.engine.task import Task, TaskType


class SlotPool:
    """The slots of one context, and every change of their cells that concerns more than one of them.

    ``cache`` is None when the RAM cache is off.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        n_ctx_slot: int,
        adapters: Adapters,
        cache: PromptCache | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.shared = SharedCells(config.n_parallel)
        #: Of the step under way; capacity for one token and a draft of every slot, or a whole batch.
        n_draft = backend.drafter.n_max if backend.drafter is not None else 0
        self.batch = backend.new_batch(max(backend.n_batch, config.n_parallel * (1 + n_draft)))
        self.slots = [Slot(i, n_ctx_slot, adapters) for i in range(config.n_parallel)]
        self.cache = cache
        if cache is None and config.cache_ram_mib != 0:
            self.cache = PromptCache(config.cache_ram_mib, backend.n_ctx)

    def by_id(self, id_slot: int) -> Slot:
        """The slot with this number; numbers beyond the last wrap around."""
        return self.slots[id_slot % len(self.slots)]

    def free(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.is_processing]

    @property
    def n_processing(self) -> int:
        return sum(slot.is_processing for slot in self.slots)

    def select(self, task: Task, adapters: Adapters) -> tuple[Slot | None, bool]:
        """The slot for a task, and whether the prompt in it should go to the RAM cache first.

        A named slot is returned even if it is busy. Otherwise the free slot whose tokens share the largest part of
        the prompt, if that exceeds ``slot_prompt_similarity``, else the least recently used free one, else None.
        """
        threshold = self.config.slot_prompt_similarity
        chosen: Slot | None = None
        save = False
        if task.id_slot != -1:
            chosen = self.by_id(task.id_slot)
            if chosen.is_processing:
                return chosen, False
        candidates = self.free() if chosen is None else [chosen]
        if threshold != 0.0 and task.tokens:
            best = 0.0
            for slot in candidates:
                similarity = n_computed(slot, task.tokens, adapters) / task.n_tokens
                if similarity > best and similarity > threshold:
                    best, chosen = similarity, slot
            if chosen is not None:
                keep = best * task.n_tokens / max(1, chosen.prompt.n_tokens)
                save = keep < 0.5
                if best > 0.0:
                    slt_inf(chosen, "select", "selected slot by LCP similarity, sim = %.3f, keep = %.3f", best, keep)
        if chosen is None:
            # of equally old ones the last, as the original does
            chosen = min(reversed(candidates), key=lambda slot: slot.t_last_used, default=None)
            save = True
            if chosen is not None:
                slt_inf(chosen, "select", "selected slot by LRU, t_last = %d", chosen.t_last_used)
        return chosen, save and task.type is TaskType.COMPLETION

    def swap_prompt(self, slot: Slot, tokens: list[int]) -> None:
        """Load the RAM entry that fits ``tokens`` better than what the slot holds, if there is one."""
        if self.cache is None:
            return
        n_shared = slot.prompt.prefix(tokens)
        entry = self.cache.best(tokens, slot.adapters, n_shared, slot.prompt.n_tokens)
        if entry is None:
            return
        self.cache.remove(entry)
        if self.backend.state_set(slot.id, entry.data):
            slot.prompt = entry.prompt
        else:
            slt_wrn(slot, "swap_prompt", "failed to load prompt from cache")
            self.clear_prompt(slot)

    def save_prompt(self, slot: Slot) -> bool:
        """Copy the slot's prompt and state to the RAM cache. False if it was not wanted there."""
        if self.cache is None or not slot.prompt.tokens or not self.backend.has_memory:
            return False
        backend = self.backend
        return self.cache.save(
            slot.prompt, slot.adapters, backend.state_size(slot.id), lambda: backend.state_get(slot.id)
        )

    def clear_prompt(self, slot: Slot) -> None:
        """Remove all cells of the slot and forget its tokens."""
        slt_trc(slot, "clear_prompt", "clearing prompt with %d tokens", slot.prompt.n_tokens)
        if self.backend.has_memory:
            self.backend.seq_rm(slot.id, -1, -1)
        self.shared.cut(slot.id, 0)
        slot.prompt.clear()

    def cut_cells(self, slot: Slot, n_tokens: int) -> bool:
        """Remove the slot's cells from token ``n_tokens`` on. False if this memory cannot; then nothing changed."""
        if not self.backend.has_memory:
            return True
        if not self.backend.seq_rm(slot.id, n_tokens, -1):
            return False
        self.shared.cut(slot.id, n_tokens)
        return True

    def keep_first(self, slot: Slot, n_tokens: int) -> None:
        """Drop what the slot holds from token ``n_tokens`` on; everything, if this memory cannot drop a part."""
        prompt = slot.prompt
        if n_tokens >= prompt.n_tokens:
            return
        if n_tokens > 0 and self.cut_cells(slot, n_tokens):
            prompt.keep_first(n_tokens)
            prompt.checkpoints = [cur for cur in prompt.checkpoints if cur.n_tokens <= n_tokens]
        else:
            self.clear_prompt(slot)

    def copy_cells(self, src: Slot, dst: Slot, n_tokens: int) -> bool:
        """Replace all cells of ``dst`` by the first ``n_tokens`` of ``src``, which must hold that many.

        In a unified buffer the cells are shared at no cost. Between split buffers the state goes through memory:
        the library's own copy would be carried out later, when the source may have changed. False if there is no
        room; ``dst`` is then empty.
        """
        self.clear_prompt(dst)
        if self.config.kv_unified or self.config.n_parallel == 1:
            self.backend.seq_cp(src.id, dst.id, 0, n_tokens)
            self.shared.copied(src.id, dst.id, n_tokens)
            return True
        if not self.backend.state_set(dst.id, self.backend.state_get(src.id)):
            return False
        return n_tokens >= src.prompt.n_tokens or self.backend.seq_rm(dst.id, n_tokens, -1)

    def unshare(self, slot: Slot, n_tokens: int) -> bool:
        """Give the slot cells of its own from token ``n_tokens`` on. False if there is no room for them.

        Idle sharers lose theirs, after a copy went to the RAM cache. Against busy ones the slot's state is written
        anew; if that fails its cells are gone.
        """
        for id_slot in self.shared.sharers(slot.id, n_tokens):
            if not self.slots[id_slot].is_processing:
                self.save_prompt(self.slots[id_slot])
                self.clear_prompt(self.slots[id_slot])
        if self.shared.n_shared(slot.id) <= n_tokens:
            return True
        data = self.backend.state_get(slot.id)
        self.backend.seq_rm(slot.id, -1, -1)
        self.shared.cut(slot.id, 0)
        return self.backend.state_set(slot.id, data)

    def publish_idle(self) -> None:
        """Copy the prompts of idle slots to the RAM cache; in a unified buffer also give their cells back."""
        if not self.config.cache_idle_slots or self.cache is None:
            return
        for slot in self.free():
            if not slot.prompt.tokens:
                continue
            slt_trc(slot, "publish_idle", "saving idle slot to prompt cache")
            if self.save_prompt(slot):
                slt_dbg(slot, "publish_idle", "__TEST_TAG_CACHE_IDLE_SLOT__")
                self.cache.update()
            if self.config.kv_unified:
                self.clear_prompt(slot)

    def clear_one_idle(self) -> bool:
        """Give back the cells of one idle slot of a unified buffer. False if none holds any."""
        if not self.config.kv_unified:
            return False
        for slot in self.free():
            if slot.prompt.tokens:
                srv_wrn("clear_one_idle", "purging slot %d with %d tokens", slot.id, slot.prompt.n_tokens)
                self.clear_prompt(slot)
                return True
        srv_trc("clear_one_idle", "no idle slot to purge")
        return False
