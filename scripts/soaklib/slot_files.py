"""Slots that are saved, restored and erased, with room on the disk and without."""

from __future__ import annotations

import contextlib
from pathlib import Path

from soaklib.ledger import ANSWERED, BUSY, REFUSED
from soaklib.server import N_SLOTS
from soaklib.visit import Kind, Visit, error_of, is_busy, json_of
from soaklib.wire import Reply, WrongError, ask


async def _act(visit: Visit, slot: int, action: str, name: str) -> Reply:
    body = {} if action == "erase" else {"filename": name}
    return await ask(visit.address, "POST", f"/slots/{slot}?action={action}", body)


def _files(visit: Visit) -> set[str]:
    return {path.name for path in visit.scene.server.slot_folder.iterdir()}


def _remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


async def saved(visit: Visit) -> str:
    """What is restored is what was saved."""
    slot, name = visit.chance.randrange(N_SLOTS), f"soak-{visit.number}.bin"
    async with visit.scene.disk:
        try:
            reply = await _act(visit, slot, "save", name)
            if is_busy(reply):
                return BUSY
            n_saved = json_of(reply)["n_saved"]
            await _expect(visit, slot, name, n_saved)
            if visit.chance.random() < 0.3:
                json_of(await _act(visit, slot, "erase", name))
        finally:
            _remove_all(visit.scene.server.slot_folder)
    return ANSWERED


async def _expect(visit: Visit, slot: int, name: str, n_saved: int) -> None:
    n_restored = json_of(await _act(visit, slot, "restore", name))["n_restored"]
    if n_restored != n_saved:
        raise WrongError(f"{n_restored} tokens restored of {n_saved}")


async def disk_full(visit: Visit) -> str:
    """A save onto a full disk either succeeds wholly, or is an error and leaves the former file and nothing else."""
    slot, name = visit.chance.randrange(N_SLOTS), f"soak-{visit.number}.bin"
    async with visit.scene.disk:
        try:
            reply = await _act(visit, slot, "save", name)
            if is_busy(reply):
                return BUSY
            n_saved = json_of(reply)["n_saved"]
            before = _files(visit)
            size = (visit.scene.server.slot_folder / name).stat().st_size
            room = visit.chance.choice([0, 20, size // 2, size - 4000, size - 100, size - 1])
            with visit.scene.server.full_disk(max(0, room)):
                reply = await _act(visit, slot, "save", name)
            if reply.status == 200:
                outcome, n_saved = ANSWERED, reply.json()["n_saved"]
            else:
                if reply.status not in (500, 507):
                    raise WrongError(f"status {reply.status}: {reply.body[:200]!r}")
                error_of(reply)
                outcome = REFUSED
            if _files(visit) != before:
                raise WrongError(f"left behind: {sorted(_files(visit) ^ before)}")
            await _expect(visit, slot, name, n_saved)
        finally:
            _remove_all(visit.scene.server.slot_folder)
    return outcome


KINDS = (Kind("slot saved, restored", 2, saved), Kind("slot saved, disk full", 2, disk_full))
