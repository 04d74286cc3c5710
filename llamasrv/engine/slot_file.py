"""Slots on disk, in llama-server's own format, so that each server restores the other's files.

A file is: header (magic, version, number of words), the token list in words, the state of the sequence as libllama
writes it, and, for memories that need them, the context checkpoints ("SCKP" appendix). What the original does not
check lies in a record beside it (``NAME.llamasrv.json``): model, cache types, adapters and check sums. A file without
a record is checked as far as its own content allows.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tempfile
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamasrv.engine.log import srv_wrn
from llamasrv.engine.prompt import Checkpoint

#: LLAMA_STATE_SEQ_MAGIC and LLAMA_STATE_SEQ_VERSION of llama.h
STATE_MAGIC, STATE_VERSION = 0x67677371, 4
#: First word of a packed token list (LLAMA_TOKEN_NULL) and its version; a list without it is plain token ids.
PACKED_MARK, PACKED_VERSION = -1, 1
#: "SCKP"
CKPT_MAGIC, CKPT_VERSION = 0x504B4353, 1

_HEADER = struct.Struct("<III")
_CKPT_HEAD = struct.Struct("<qii")


class SlotFileError(ValueError):
    """The file is not what it should be; the text says why."""


@dataclass(slots=True)
class SlotFile:
    """What was found in a file before anything was loaded.

    ``state_offset``: where the token list ends, in bytes. ``adapter_start``: ``Adapters.start`` of its cells;
    ``n_exact``: as in ``Prompt``.
    """

    tokens: list[int]
    n_words: int
    state_offset: int
    adapter_start: int = 0
    n_exact: int | None = None


def record_path(path: Path) -> Path:
    return path.with_name(path.name + ".llamasrv.json")


def pack_tokens(tokens: list[int]) -> list[int]:
    """Token list in the words that the original stores: mark, version, count, ids, number of media (0)."""
    return [PACKED_MARK, PACKED_VERSION, len(tokens), *tokens, 0]


def unpack_tokens(words: list[int]) -> list[int]:
    """Inverse of :func:`pack_tokens`; also takes a plain list. Raises :class:`SlotFileError`."""
    if not words or words[0] != PACKED_MARK:
        return words
    if len(words) < 4 or words[1] != PACKED_VERSION:
        raise SlotFileError("Unsupported server tokens state version")
    count = words[2]
    if not 0 <= count <= len(words) - 4:
        raise SlotFileError("the token list is damaged")
    if words[3 + count] != 0:
        raise SlotFileError("Cannot restore media tokens without an mmproj")
    return words[3 : 3 + count]


def check_place(path: Path) -> None:
    """Raises :class:`SlotFileError` if something stands there that is no regular file (a link, a pipe, a folder)."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise SlotFileError("the file is a link" if stat.S_ISLNK(mode) else "not a regular file")


def inspect(path: Path, n_vocab: int, n_ctx: int, identity: Mapping[str, Any]) -> SlotFile:
    """Check a file without loading anything of it.

    Raises:
        SlotFileError: missing, damaged, made by another model or settings, or too long for the slot.
    """
    try:
        check_place(path)
        data = path.read_bytes()
    except OSError as exc:
        raise SlotFileError(exc.strerror or str(exc)) from exc
    if len(data) < _HEADER.size:
        raise SlotFileError("the file is too short")
    magic, version, n_words = _HEADER.unpack_from(data)
    if (magic, version) != (STATE_MAGIC, STATE_VERSION):
        raise SlotFileError("not a slot file of this version")
    state_offset = _HEADER.size + 4 * n_words
    if state_offset > len(data):
        raise SlotFileError("the file is cut off")
    tokens = unpack_tokens(list(array("i", data[_HEADER.size : state_offset])))
    start, n_exact = _check_record(path, tokens, data, state_offset, identity)
    if tokens and not (min(tokens) >= 0 and max(tokens) < n_vocab):
        raise SlotFileError("Invalid tokens in slot save file")
    if len(tokens) > n_ctx:
        raise SlotFileError("Restored prompt does not fit in the slot context")
    return SlotFile(tokens, n_words, state_offset, start, n_exact)


def _check_record(
    path: Path, tokens: list[int], data: bytes, state_offset: int, identity: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Compare with the record, if there is one; returns its ``adapter_start`` and ``n_exact``."""
    record = record_path(path)
    try:
        found = json.loads(record.read_bytes())
        n_state = int(found["n_state"])
        start = max(0, int(found.get("adapter_start", 0)))
        n_exact = found.get("n_exact")
        n_exact = None if n_exact is None else max(0, int(n_exact))
        kept = found["identity"]
    except FileNotFoundError:
        return 0, None
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise SlotFileError(f"the record {record.name} beside it cannot be read") from exc
    for name, value in identity.items():
        if kept.get(name) != value:
            raise SlotFileError(f"the slot was saved with another {name}")
    same_tokens = found.get("tokens") == _digest(array("i", tokens).tobytes())
    if not same_tokens or found.get("state") != _digest(data[state_offset : state_offset + n_state]):
        raise SlotFileError(f"the content does not match the record {record.name} beside it")
    return start, n_exact


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def finish(
    temporary: Path,
    path: Path,
    n_state_end: int,
    checkpoints: list[Checkpoint],
    split_state: Callable[[bytes], tuple[bytes, bytes, bytes]],
    identity: Mapping[str, Any],
    adapter_start: int = 0,
    n_exact: int | None = None,
) -> int:
    """Add checkpoints and the record to a file that libllama wrote, and put it in place under its name.

    ``n_state_end``: bytes that libllama wrote. ``split_state``: see ``Backend.split_state``. ``adapter_start``,
    ``n_exact``: as in :class:`SlotFile`. Returns the file's size. Raises OSError.
    """
    with temporary.open("r+b") as file:
        data = file.read(n_state_end)
        if checkpoints:
            file.seek(n_state_end)
            file.write(struct.pack("<III", CKPT_MAGIC, CKPT_VERSION, len(checkpoints)))
            for cur in checkpoints:
                file.write(_CKPT_HEAD.pack(cur.n_tokens, cur.pos_min, cur.pos_max))
                # target, draft and speculative state
                for blob in split_state(cur.data):
                    file.write(struct.pack("<Q", len(blob)))
                    file.write(blob)
        file.flush()
        os.fsync(file.fileno())
        size = file.seek(0, os.SEEK_END)
    n_words = _HEADER.unpack_from(data)[2]
    state_offset = _HEADER.size + 4 * n_words
    tokens = unpack_tokens(list(array("i", data[_HEADER.size : state_offset])))
    record = {
        "identity": dict(identity),
        "adapter_start": adapter_start,
        "n_exact": n_exact,
        "tokens": _digest(array("i", tokens).tobytes()),
        "state": _digest(data[state_offset:]),
        "n_state": n_state_end - state_offset,
    }
    beside = temporary.with_name(temporary.name + ".json")
    beside.write_text(json.dumps(record))
    # an old record must never stand beside a new file
    record_path(path).unlink(missing_ok=True)
    os.replace(temporary, path)
    os.replace(beside, record_path(path))
    return size


def temporary_beside(path: Path) -> Path:
    """A new empty file in the folder of ``path``, so that it can be renamed onto it. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=".slot-", suffix=".tmp", dir=path.parent)
    os.close(handle)
    return Path(name)


def read_checkpoints(
    path: Path, offset: int, n_max: int, join_state: Callable[[bytes, bytes, bytes], bytes]
) -> tuple[list[Checkpoint], int]:
    """Checkpoints behind the state, the latest ``n_max`` of them, and the bytes they take; ([], 0) if unusable."""
    data = path.read_bytes()[offset:]
    if len(data) < 12:
        return [], 0
    magic, version, count = struct.unpack_from("<III", data)
    if magic != CKPT_MAGIC:
        return [], 0
    found: list[Checkpoint] = []
    pos = 12
    try:
        if version != CKPT_VERSION:
            raise SlotFileError("unknown version")
        for _ in range(count):
            n_tokens, pos_min, pos_max = _CKPT_HEAD.unpack_from(data, pos)
            pos += _CKPT_HEAD.size
            blobs: list[bytes] = []
            for _ in range(3):
                (size,) = struct.unpack_from("<Q", data, pos)
                pos += 8
                if size > len(data) - pos:
                    raise SlotFileError("cut off")
                blobs.append(data[pos : pos + size])
                pos += size
            if not blobs[0]:
                raise SlotFileError("a checkpoint without state")
            found.append(Checkpoint(n_tokens, pos_min, pos_max, join_state(*blobs), id_task=-1))
            del found[: -n_max or len(found)]
    except (struct.error, SlotFileError) as exc:
        srv_wrn("read_checkp", "invalid context checkpoint appendix in '%s' - ignored: %s", path.name, exc)
        return [], 0
    return found, pos
