"""File names and requests of slot actions."""

from __future__ import annotations

from typing import Any

import pytest

from llamasrv.api.errors import ApiError
from llamasrv.api.slot_actions import is_valid_filename, slot_action_json, slot_task
from llamasrv.engine.result import SlotEraseResult, SlotSaveLoadResult
from llamasrv.engine.task import SlotAction, TaskType


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "a\\b", "x..y", " a", "a ", "a.", "a\0b", "a\nb", "a\x7f", "a\x85", "x" * 300),
        *("CON", "con", "nul.txt", "COM1", "lpt9.bin", "a:b", "a*", "a?", 'a"', "<a>", "a|b"),
        *("a\u2215b", "a\u2216b", "\uff0e\uff0e", "a\ufffd", "\ufeffa", "a\ud800"),
        *("a.llamasrv.json", "a.LLAMASRV.json", ".llamasrv.json"),
    ],
)
def test_names_that_reach_elsewhere_or_differ_between_systems_are_refused(name: str) -> None:
    assert not is_valid_filename(name)
    with pytest.raises(ApiError, match="Invalid filename") as caught:
        slot_task("save", "0", "/slots/", {"filename": name})
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["a", "slot1.bin", "ckpt_é.bin", ".hidden", "console", "日本", "a b", "x" * 200])
def test_plain_names_are_taken(name: str) -> None:
    assert is_valid_filename(name)
    assert slot_task("restore", "7", "/slots/", {"filename": name}) == (
        TaskType.SLOT_RESTORE,
        SlotAction(7, name, "/slots/" + name),
    )


@pytest.mark.parametrize(
    ("action", "id_slot", "folder", "data", "status", "message"),
    [
        ("save", "0", "", {}, 501, "This server does not support slots action. Start it with `--slot-save-path`"),
        ("save", "x", "/s/", {}, 400, "Invalid slot ID"),
        ("save", "-1", "/s/", {}, 400, "Invalid slot ID"),
        ("save", "9" * 30, "/s/", {}, 400, "Invalid slot ID"),
        ("drop", "0", "/s/", {}, 400, "Invalid action"),
        ("", "0", "/s/", {}, 400, "Invalid action"),
        ("save", "0", "/s/", {}, 400, '"filename" must be a string'),
        ("save", "0", "/s/", {"filename": 5}, 400, '"filename" must be a string'),
    ],
)
def test_requests_that_name_no_action_are_refused(
    action: str, id_slot: str, folder: str, data: dict[str, Any], status: int, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        slot_task(action, id_slot, folder, data)
    assert (caught.value.status, caught.value.message) == (status, message)


def test_erase_needs_no_file() -> None:
    assert slot_task("erase", "1", "/s/", {}) == (TaskType.SLOT_ERASE, SlotAction(1))


def test_answers_have_the_fields_of_the_original() -> None:
    assert slot_action_json(SlotEraseResult(id=1, id_slot=2, n_erased=3)) == {"id_slot": 2, "n_erased": 3}
    saved = SlotSaveLoadResult(id=1, id_slot=2, filename="f", is_save=True, n_tokens=3, n_bytes=4, t_ms=5.5)
    assert slot_action_json(saved) == {
        "id_slot": 2,
        "filename": "f",
        "n_saved": 3,
        "n_written": 4,
        "timings": {"save_ms": 5.5},
    }
    restored = SlotSaveLoadResult(id=1, id_slot=2, filename="f", is_save=False, n_tokens=3, n_bytes=4, t_ms=5.5)
    assert slot_action_json(restored) == {
        "id_slot": 2,
        "filename": "f",
        "n_restored": 3,
        "n_read": 4,
        "timings": {"restore_ms": 5.5},
    }
