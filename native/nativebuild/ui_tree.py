"""Whether a built web UI is complete: the files it must have, and those that its files name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

# the UI's build has an exit code of zero even where its last steps failed
REQUIRED = (
    "index.html",
    "build.json",
    "manifest.webmanifest",
    "sw.js",
    "workbox-*.js",
    "_app/version.json",
    "_app/immutable/bundle.*.js",
    "_app/immutable/assets/bundle.*.css",
)


def files_of(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def check_tree(tree: Path) -> str:
    """What is wrong with a built tree; empty when it is complete and works below any path."""
    names = files_of(tree) if tree.is_dir() else []
    missing = [pattern for pattern in REQUIRED if not any(fnmatchcase(name, pattern) for name in names)]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for page, named in _named_files(tree):
        if named.startswith("/"):
            return f"{page} names {named} with an absolute path"
        if named not in names:
            return f"{page} names {named}, which is not there"
    for name in names:
        if not (tree / name).stat().st_size:
            return f"{name} is empty"
    return ""


def _named_files(tree: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a file and a file of the same tree that it names."""
    page = (tree / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r'(?:href|src)="([^"#]+)"|import\("([^"]+)"\)', page):
        yield from _local("index.html", "".join(name))
    manifest = json.loads((tree / "manifest.webmanifest").read_text(encoding="utf-8"))
    for icon in manifest.get("icons", []):
        yield from _local("manifest.webmanifest", icon["src"])
    worker = (tree / "sw.js").read_text(encoding="utf-8")
    for name in re.findall(r'url:"([^"]+)"', worker):
        yield from _local("sw.js", name)
    for name in re.findall(r'\["(\./workbox-[^"]+)"\]', worker):
        yield from _local("sw.js", f"{name}.js")


def _local(page: str, name: str) -> Iterator[tuple[str, str]]:
    if re.match(r"[a-z]+:|//", name):
        return
    # "./" is the page itself
    if name := name.removeprefix("./"):
        yield page, name
