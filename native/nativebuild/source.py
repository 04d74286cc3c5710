"""The source of llama.cpp: the pinned archive, fetched and checked by pip, or a checkout of the user's choice."""

from __future__ import annotations

import os
import re
import tarfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from .cache import cache_root, locked, scratch
from .report import BuildError, say
from .toolchain import pip

NATIVE = Path(__file__).resolve().parent.parent
PIN_FILE = NATIVE / "llama-cpp.pin"
FOLDER_IN_ARCHIVE = "thirdparty/llama.cpp"
# two thirds of the archive, of no use to a build
NOT_UNPACKED = ("docs/*", "media/*", "models/*.gguf")

NOT_A_CHECKOUT = (
    "LLAMASRV_LLAMA_CPP_DIR names {path}, which is no llama.cpp checkout: it has no CMakeLists.txt or no "
    "include/llama.h. Correct it, or unset it to use the pinned version."
)


@dataclass(frozen=True, slots=True)
class Pin:
    """A pip requirement with its hash, or one for each platform, of which `sha256` is the first.

    `build_number`: the last part of the version, for llama.cpp its b-number.
    """

    requirement: str
    name: str
    version: str
    sha256: str

    @property
    def build_number(self) -> int:
        return int(self.version.rpartition(".")[2])


@dataclass(frozen=True, slots=True)
class Source:
    """Where llama.cpp's source is. `identity` enters the build's key; `changes`: the user may edit it at any time."""

    path: Path
    identity: str
    label: str
    build_number: int | None
    changes: bool


def read_pin(path: Path) -> Pin:
    """Read a pin file: one `name==version --hash=sha256:...` line and comments. Raises BuildError if it is not that."""
    text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    form = r"([\w.-]+)==([\w.]+)\s+--hash=sha256:([0-9a-f]{64})(?:\s+--hash=sha256:[0-9a-f]{64})*"
    match = re.fullmatch(form, lines[0]) if len(lines) == 1 else None
    if not match:
        raise BuildError(f"{path} must hold one line of the form `name==version --hash=sha256:<64 hex digits>`.")
    return Pin(lines[0], match[1], match[2], match[3])


def find_source(environment: Mapping[str, str]) -> Source:
    """Decide which source is to be built, without fetching anything yet."""
    if own := environment.get("LLAMASRV_LLAMA_CPP_DIR"):
        path = Path(own).expanduser().resolve()
        if not ((path / "CMakeLists.txt").is_file() and (path / "include" / "llama.h").is_file()):
            raise BuildError(NOT_A_CHECKOUT.format(path=path))
        return Source(path, f"directory {path}", "checkout", None, changes=True)
    pin = read_pin(PIN_FILE)
    path = cache_root() / "source" / f"b{pin.build_number}-{pin.sha256[:12]}" / "llama.cpp"
    return Source(path, pin.requirement, f"b{pin.build_number}", pin.build_number, changes=False)


def fetch(source: Source) -> None:
    """Make sure that the source is there. Raises BuildError when it cannot be fetched or is not what was pinned."""
    if source.changes or source.path.is_dir():
        return
    with locked(f"source-{source.path.parent.name}", "fetching llama.cpp"):
        if source.path.is_dir():
            return
        pin = read_pin(PIN_FILE)
        say(f"fetching llama.cpp {source.label} ({pin.name} {pin.version} from the package index, about 40 MB)")
        with scratch(source.path.parent) as work:
            archive = download(pin, work / "archive", sdist=True)
            say("unpacking")
            os.replace(unpack(archive, work / "tree", FOLDER_IN_ARCHIVE), source.path)


def download(pin: Pin, directory: Path, sdist: bool) -> Path:
    """Let pip download a pinned package, checked against its hash, and return the file's path."""
    directory.mkdir(parents=True, exist_ok=True)
    requirements = directory / "requirements.txt"
    requirements.write_text(pin.requirement + "\n", encoding="utf-8")
    kind = ["--no-binary" if sdist else "--only-binary", pin.name]
    options = ["--no-deps", "--require-hashes", "--dest", str(directory), "--requirement", str(requirements)]
    pip(["download", *kind, *options], f"{pin.name} {pin.version}")
    requirements.unlink()
    (file,) = directory.iterdir()
    return file


def unpack(archive: Path, directory: Path, folder: str) -> Path:
    """Unpack what a build needs below `<top>/<folder>/` of a tar file; returns the unpacked folder."""
    now = time.time()
    with tarfile.open(archive) as tar:
        members = []
        top = None
        for member in tar:
            top = top or member.name.split("/")[0]
            name = member.name.removeprefix(f"{top}/{folder}/")
            if name != member.name and not any(fnmatch(name, pattern) for pattern in NOT_UNPACKED):
                # the archive's times may lie in this machine's future, where ninja would build again and again
                member.mtime = int(now)
                members.append(member)
        if not members:
            raise BuildError(f"{archive.name} holds no folder {folder}; the pin names a package of another kind.")
        if hasattr(tarfile, "data_filter"):
            tar.extractall(directory, members, filter="data")
        else:
            tar.extractall(directory, members)
    return directory / str(top) / folder
