"""The licenses of what ends up in the web UI's bundle, which carries none itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

LICENSE_NAME = re.compile(r"(?i)(licen[cs]e|copying|notice)([.-].*)?")
_NAME = r"(?:@[^/]+/)?[^@/][^/]*"
#: A module of a package; the group is the package's folder, which may be inside another package's.
PACKAGE = re.compile(rf".*?/node_modules/({_NAME}(?:/node_modules/{_NAME})*)/.*")
# added to the bundle by a tool that does not tell of modules
ALWAYS = "workbox-*"

HEADER = """\
The web page of llamasrv is the web UI of llama.cpp, which is part of the project llama.cpp:

{own}

It is built from the packages below, each under the license that follows it.
"""


def notices(own_license: str, work: Path, modules: Iterable[str]) -> str:
    """One text with the licenses of all packages that the modules (their paths) belong to.

    ``work``: the folder of the UI's source in which it was built.
    """
    installed = work / "node_modules"
    folders = {installed / match[1] for name in modules if (match := PACKAGE.fullmatch(name))}
    folders.update(installed.glob(ALWAYS))
    # source of others that the UI carries itself
    folders.update(path.parent for path in (work / "src").rglob("*") if LICENSE_NAME.fullmatch(path.name))
    by_text: dict[str, list[str]] = {}
    for folder in sorted(folders):
        name, text = _license_of(folder, work)
        by_text.setdefault(text, []).append(name)
    parts = [HEADER.format(own=own_license.strip())]
    parts += ["\n".join([*dict.fromkeys(names), "", text, ""]) for text, names in by_text.items()]
    return ("\n" + "-" * 80 + "\n\n").join(parts)


def _license_of(folder: Path, work: Path) -> tuple[str, str]:
    """A package's name with its version, and the text of its license or, where it has none, the license's name."""
    try:
        package = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    except OSError:
        package = {"name": folder.relative_to(work).as_posix()}
    name = f"{package['name']} {package.get('version', '')}".strip()
    files = sorted(path for path in folder.iterdir() if LICENSE_NAME.fullmatch(path.name) and path.is_file())
    texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in files]
    kind = package.get("license")
    return name, "\n\n".join(texts) or f"License: {kind if isinstance(kind, str) else json.dumps(kind)}"
