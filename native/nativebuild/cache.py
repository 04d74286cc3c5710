"""The per-user cache: where it is, its locks, files written whole or not at all, and content hashes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .report import say


def cache_root() -> Path:
    """The cache directory: LLAMASRV_CACHE, else `llamasrv` in XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("LLAMASRV_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # the XDG specification: a relative path is invalid and to be ignored
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "llamasrv"


class Lock:
    """An exclusive file lock, held by this process and by every child that gets `fd`.

    A compiler run that outlives its killed parent thus keeps the lock until it has finished writing.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd


@contextlib.contextmanager
def locked(name: str, what: str) -> Iterator[Lock]:
    """Hold the lock `name` of the cache; while another process has it, wait and say so (`what`: its work)."""
    directory = cache_root() / "locks"
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(fd, what)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield Lock(fd)
    finally:
        os.close(fd)


def _acquire(fd: int, what: str) -> None:
    started = time.monotonic()
    next_word = 0.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - started
            if waited >= next_word:
                owner = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
                say(f"another process (pid {owner}) is busy with {what}; waiting for it ({waited:.0f} s)")
                next_word = waited + 30
            time.sleep(0.2)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_json(path: Path) -> object:
    """The content of a JSON file, or None where it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def digest(parts: Iterable[object]) -> str:
    """Sixteen hex digits over the parts: paths by name and content, everything else by its JSON text."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.name.encode() + b"\0" + part.read_bytes() if isinstance(part, Path) else _canonical(part)
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()[:16]


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def keep_newest(paths: Iterable[Path], keep: int) -> None:
    """Remove all but the `keep` most recently used of some cache entries."""
    for old in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A temporary folder in `parent`, whose lock the caller holds; what a killed run left there is removed first."""
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(".new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".new-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def place(source: Path, target: Path, link: bool) -> None:
    """Put a copy (link: a hard link where possible) at `target`; a process that has the old file mapped keeps it."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        if not link:
            raise OSError
        os.link(source, temporary)
    except OSError:
        shutil.copy2(source, temporary)
    os.replace(temporary, target)
