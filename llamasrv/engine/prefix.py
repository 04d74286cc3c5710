"""Where the beginning of a new prompt can come from: the slot itself, other slots, the RAM cache; the longest wins."""

from __future__ import annotations

from llamasrv.engine.adapters import n_computed
from llamasrv.engine.backend import Backend, SeqRm
from llamasrv.engine.config import EngineConfig
from llamasrv.engine.log import slt_inf, slt_trc, slt_wrn
from llamasrv.engine.prompt import Prompt, common_prefix
from llamasrv.engine.slot import Slot, SlotState, WaitFor
from llamasrv.engine.slots import SlotPool
from llamasrv.engine.task import Task

#: A prefix of another slot is taken, or waited for, only if it saves at least so many tokens.
MIN_GAIN = 32

_COMPUTING = (SlotState.STARTED, SlotState.PROCESSING_PROMPT, SlotState.DONE_PROMPT)


class PrefixSources:
    """Fills a slot with the longest known beginning of its new prompt.

    Called between steps only: what a slot's prompt lists then is in its cells.
    """

    def __init__(self, backend: Backend, config: EngineConfig, pool: SlotPool) -> None:
        self.backend = backend
        self.config = config
        self.pool = pool
        #: Taking a part of another sequence needs a memory that can drop the rest, and keeps all positions.
        self.can_share = (
            config.share_prefix
            and backend.has_memory
            and backend.seq_rm_type is SeqRm.PART
            and (backend.n_swa == 0 or config.swa_full)
        )

    def fill(self, slot: Slot, task: Task) -> WaitFor | None:
        """Bring the best prefix of ``task.tokens`` into the slot, whose ``adapters`` are those of the task.

        Returns what to wait for instead, if a busy slot is computing a longer one.
        """
        if not task.reuses_prompt or not self.backend.has_memory:
            return None
        tokens = task.tokens
        n_own = slot.prompt.prefix(tokens)
        n_best, donor = n_own, None
        if self.can_share:
            for other in self.pool.slots:
                if other is not slot:
                    n = n_computed(other, tokens, slot.adapters)
                    if n >= n_own + MIN_GAIN and n > n_best:
                        n_best, donor = n, other
        entry = self._cached(slot, tokens, n_best)
        if entry is not None:
            n_best = entry
        if self.can_share:
            wait = self._computing(slot, tokens, n_best + MIN_GAIN)
            if wait is not None:
                slt_inf(slot, "prefix", "waiting for %d tokens that slot %d computes", wait.n_tokens, wait.slot.id)
                return wait
        if entry is not None:
            self._load_cached(slot, tokens, n_best)
        elif donor is not None:
            self.copy(donor, slot, n_best)
        return None

    def _computing(self, slot: Slot, tokens: list[int], n_min: int) -> WaitFor | None:
        """The busy slot that will soon hold the longest prefix of at least ``n_min`` tokens."""
        best: WaitFor | None = None
        for other in self.pool.slots:
            if other is slot or other.state not in _COMPUTING:
                continue
            assert other.task is not None
            if other.task.is_stateless:
                continue
            n = min(common_prefix(other.task.tokens, tokens), other.adapters.n_alike(slot.adapters))
            if n >= n_min and (best is None or n > best.n_tokens):
                best = WaitFor(other, other.task.id, n)
        return best

    def _cached(self, slot: Slot, tokens: list[int], n_best: int) -> int | None:
        """Length of the prefix that the RAM cache holds, if it is longer than ``n_best``."""
        cache = self.pool.cache
        if cache is None:
            return None
        entry = cache.longest(tokens, slot.adapters, n_best)
        if entry is None:
            return None
        return n_computed(entry, tokens, slot.adapters)

    def _load_cached(self, slot: Slot, tokens: list[int], n_best: int) -> None:
        cache = self.pool.cache
        assert cache is not None
        entry = cache.longest(tokens, slot.adapters, n_best - 1)
        assert entry is not None
        self.pool.clear_prompt(slot)
        if not self.backend.state_set(slot.id, entry.data):
            slt_wrn(slot, "prefix", "failed to load prompt from cache")
            return
        slot.prompt = entry.prompt.copy()
        is_other = entry.adapters != slot.adapters
        # an entry of which little is used stays for those who want more of it
        if n_best >= 0.25 * entry.prompt.n_tokens and not is_other:
            cache.remove(entry)
        if is_other:
            self.pool.keep_first(slot, n_best)
        slt_trc(slot, "prefix", "loaded %d of %d cached tokens", n_best, entry.prompt.n_tokens)

    def copy(self, donor: Slot, slot: Slot, n_tokens: int) -> bool:
        """Replace the slot's content by the first ``n_tokens`` tokens of another's. False: there was no room."""
        if not self.pool.copy_cells(donor, slot, n_tokens):
            slt_wrn(slot, "prefix", "no room for a copy of slot %d", donor.id)
            return False
        slot.prompt = Prompt(donor.prompt.tokens[:n_tokens])
        slt_trc(slot, "prefix", "took %d tokens from slot %d", n_tokens, donor.id)
        return True

    def wake(self, slot: Slot) -> None:
        """Start a waiting slot if its donor got far enough or will not; called between steps."""
        wait, task = slot.wait, slot.task
        assert wait is not None
        assert task is not None
        donor = wait.slot
        n_ready = n_computed(donor, task.tokens, slot.adapters)
        # a part of it can be taken from some memories only
        if n_ready >= wait.n_tokens and (self.can_share or n_ready == donor.prompt.n_tokens):
            slot.wait = None
            self.copy(donor, slot, n_ready)
        elif donor.task is not None and donor.task.id == wait.id_task and donor.state in _COMPUTING:
            return
        else:
            # the donor was cancelled, failed, or already went on to something else
            slot.wait = self.fill(slot, task)
        if slot.wait is None:
            slot.state = SlotState.STARTED
