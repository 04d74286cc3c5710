"""SLOT_SAVE, SLOT_RESTORE and SLOT_ERASE on a slot that is free."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamasrv.engine import slot_file
from llamasrv.engine.adapters import Adapters
from llamasrv.engine.backend import Backend
from llamasrv.engine.log import slt_inf
from llamasrv.engine.prompt import Prompt
from llamasrv.engine.result import ErrorResult, ErrorType, Result, SlotEraseResult, SlotSaveLoadResult
from llamasrv.engine.slot import Slot
from llamasrv.engine.slots import SlotPool
from llamasrv.engine.task import Task, TaskType


class SlotActions:
    """``identity``: what a saved state depends on, beside the adapters of its slot; compared on restore."""

    def __init__(self, backend: Backend, pool: SlotPool, n_checkpoints: int, identity: Mapping[str, Any]) -> None:
        self.backend = backend
        self.pool = pool
        self.n_checkpoints = n_checkpoints
        self._identity = dict(identity)

    def run(self, task: Task, slot: Slot) -> Result:
        """Do what the task asks with this free slot. Failures are results, too."""
        try:
            if task.type is TaskType.SLOT_SAVE:
                return self._save(task, slot)
            if task.type is TaskType.SLOT_RESTORE:
                return self._restore(task, slot)
            n_erased = slot.prompt.n_tokens
            self.pool.clear_prompt(slot)
            return SlotEraseResult(id=task.id, id_slot=slot.id, n_erased=n_erased)
        except slot_file.SlotFileError as exc:
            verb = "save" if task.type is TaskType.SLOT_SAVE else "restore"
            return ErrorResult(id=task.id, type=ErrorType.INVALID_REQUEST, message=f"Unable to {verb} slot: {exc}")
        except OSError as exc:
            return ErrorResult(id=task.id, message=f"Unable to save slot: {exc.strerror or exc}")

    def identity(self, slot: Slot) -> dict[str, Any]:
        return {**self._identity, "adapters": list(slot.adapters.scales)}

    def _save(self, task: Task, slot: Slot) -> Result:
        assert task.slot_action is not None
        started = time.monotonic()
        path = Path(task.slot_action.filepath)
        slot_file.check_place(path)
        temporary = slot_file.temporary_beside(path)
        try:
            n_state = self.backend.state_save_file(str(temporary), slot.id, slot_file.pack_tokens(slot.prompt.tokens))
            if n_state == 0:
                return ErrorResult(id=task.id, message="Unable to save slot")
            size = slot_file.finish(
                temporary,
                path,
                n_state,
                slot.prompt.checkpoints,
                self.backend.split_state,
                self.identity(slot),
                slot.adapters.start,
                slot.prompt.n_exact,
            )
        finally:
            temporary.unlink(missing_ok=True)
            temporary.with_name(temporary.name + ".json").unlink(missing_ok=True)
        slt_inf(slot, "slot_save", "saved %d tokens, %d bytes", slot.prompt.n_tokens, size)
        return SlotSaveLoadResult(
            id=task.id,
            id_slot=task.slot_action.id_slot,
            filename=task.slot_action.filename,
            is_save=True,
            n_tokens=slot.prompt.n_tokens,
            n_bytes=size,
            t_ms=(time.monotonic() - started) * 1e3,
        )

    def _restore(self, task: Task, slot: Slot) -> Result:
        assert task.slot_action is not None
        started = time.monotonic()
        path = Path(task.slot_action.filepath)
        found = slot_file.inspect(path, self.backend.n_vocab, slot.n_ctx, self.identity(slot))
        # libllama overwrites the sequence while it reads: keep a copy until it has succeeded
        kept = self.backend.state_get(slot.id) if slot.prompt.tokens else None
        n_read, _ = self.backend.state_load_file(str(path), slot.id, max(1, found.n_words))
        if n_read == 0:
            prompt = slot.prompt
            slot.prompt = Prompt()
            self.pool.clear_prompt(slot)
            if kept is not None and self.backend.state_set(slot.id, kept):
                slot.prompt = prompt
            raise slot_file.SlotFileError("No available space in KV cache or invalid slot save file")
        self.pool.shared.cut(slot.id, 0)
        if not found.tokens:
            # libllama takes an empty state for nothing to do
            self.backend.seq_rm(slot.id, -1, -1)
        checkpoints, n_checkpoints = slot_file.read_checkpoints(
            path, n_read, self.n_checkpoints, self.backend.join_state
        )
        slot.prompt = Prompt(found.tokens, checkpoints, found.n_exact)
        slot.adapters = Adapters(slot.adapters.scales, found.adapter_start)
        slt_inf(slot, "slot_restore", "restored %d tokens, %d checkpoints", len(found.tokens), len(checkpoints))
        return SlotSaveLoadResult(
            id=task.id,
            id_slot=task.slot_action.id_slot,
            filename=task.slot_action.filename,
            is_save=False,
            n_tokens=len(found.tokens),
            n_bytes=n_read + n_checkpoints,
            t_ms=(time.monotonic() - started) * 1e3,
        )
