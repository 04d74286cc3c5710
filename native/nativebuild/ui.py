"""Builds llama.cpp's web UI from its source, once per version, and packs it for the server.

In the cache a finished build is a folder with the gzipped files and `table.json`; `llamasrv/_ui` is a copy of it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cache import Lock, cache_root, digest, keep_newest, locked, place, read_json, scratch, write_atomically
from .node import Node, find_node
from .report import BuildError, say
from .source import Source, fetch
from .toolchain import last_lines
from .ui_notices import notices
from .ui_tree import check_tree, files_of

SOURCE_FOLDER = "tools/ui"
TABLE = "table.json"
NOTICES = "NOTICES.txt"
MODULES = "llamasrv-modules.txt"
#: Raise it when the same source is to be built or packed in another way.
RECIPE = 2
HEAP_MIB = 3072
NEEDED_GIB = 4
KEPT_VERSIONS = 3
#: Seconds between two words about a step that takes long.
WORD_S = 30.0
NOT_COPIED = ("node_modules", ".svelte-kit", "dist", "tests", "CMakeLists.txt")
# npm or the UI's own scripts would read these: what is built must not depend on who builds it
FOREIGN_VARIABLES = re.compile(
    r"(?i)npm_config_(omit|only|production|include|ignore_scripts|prefix|global)|NODE_(ENV|OPTIONS|PATH)|"
    r"(VITE|PUBLIC|LLAMA_UI|LLAMA_BUILD)_.*"
)

# SvelteKit names a version after the clock, and a variable of the bundle after the version
SVELTE_CONFIG = """\
import config from './svelte.config.original.js';

config.kit.version = { name: process.env.LLAMA_UI_VERSION };

export default config;
"""

# tells which modules the bundle is made of
VITE_CONFIG = """\
import original from './vite.config.original';
import { appendFileSync } from 'node:fs';

export default async (env) => {
	const config = await original(env);
	config.plugins.push({
		generateBundle() {
			appendFileSync('llamasrv-modules.txt', [...this.getModuleIds(), ''].join('\\n'));
		},
		name: 'llamasrv:modules'
	});
	return config;
};
"""
WRAPPED = {"svelte.config.js": SVELTE_CONFIG, "vite.config.ts": VITE_CONFIG}

WITHOUT = "LLAMASRV_NO_UI=1 in the environment builds llamasrv without the web UI."
NO_UI_SOURCE = "{path} holds no web UI of the kind that is known here: {what} is missing. " + WITHOUT
NPM_FAILED = (
    "npm could not fetch the packages that the web UI is built with: {reason}. The whole output is in {log}. Check "
    "the network (npm honours its own configuration files and variables, such as npm_config_registry) and run the "
    "same command again. " + WITHOUT
)
NO_MEMORY = (
    "the memory did not suffice to build the web UI: about {needed} GiB have to be free. The whole output is in "
    "{log}. Close other programs and run the same command again. " + WITHOUT
)
BUILD_FAILED = (
    "the web UI does not build with Node.js {node}; the whole output is in {log}. " + WITHOUT + " The last lines:\n"
    "{tail}"
)
BAD_TREE = (
    "the web UI was built, but what came out is not complete: {reason}. The whole output is in {log}. Run the same "
    "command again. " + WITHOUT
)


def wants_ui(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether llamasrv is to have the web UI: unless LLAMASRV_NO_UI says otherwise."""
    return environment.get("LLAMASRV_NO_UI", "").strip().lower() in ("", "0", "off", "false", "no")


@dataclass(frozen=True, slots=True)
class UiPlan:
    """A build of the UI: the folder of its source, the names it carries, and where it ends up."""

    source: Path
    label: str
    build_number: int
    key: str

    @property
    def version(self) -> str:
        """What a page that is open compares itself with; changes with every other build."""
        return f"{self.label}-{self.key}"

    @property
    def folder(self) -> Path:
        return cache_root() / "ui" / self.version

    @property
    def work(self) -> Path:
        """Where it is built. An interrupted build goes on from here."""
        return cache_root() / "ui" / f".work-{self.version}"

    @property
    def log(self) -> Path:
        return cache_root() / "ui" / f"{self.version}.log"


def plan_ui(source: Source) -> UiPlan:
    """Decide what is to be built. Fetches the source if need be."""
    fetch(source)
    folder = source.path / SOURCE_FOLDER
    for name in ("package.json", "package-lock.json", *WRAPPED):
        if not (folder / name).is_file():
            raise BuildError(NO_UI_SOURCE.format(path=folder, what=name))
    # a checkout may change at any time
    content = list(_source_files(folder)) if source.changes else []
    names = [str(path.relative_to(folder)) for path in content]
    key = digest([source.identity, RECIPE, WRAPPED, names, *content])
    return UiPlan(folder, source.label, source.build_number or 0, key)


def _source_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in NOT_COPIED:
            continue
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            yield path


def build_ui(plan: UiPlan) -> Path:
    """Build the UI if it is not there yet; returns the folder that `install_ui` takes.

    Raises BuildError when it cannot be built or is not complete. An interrupted build goes on where it stopped.
    """
    if _is_complete(plan.folder):
        os.utime(plan.folder)
        return plan.folder
    with locked(f"ui-{plan.version}", f"building the web UI {plan.label}") as lock:
        if _is_complete(plan.folder):
            return plan.folder
        shutil.rmtree(plan.folder, ignore_errors=True)
        tree = _build(plan, find_node(), lock)
        with scratch(plan.folder.parent) as work:
            pack(tree, work / "ui")
            (work / "ui" / NOTICES).write_text(_notices(plan), encoding="utf-8")
            os.replace(work / "ui", plan.folder)
        shutil.rmtree(plan.work, ignore_errors=True)
        keep_newest((path for path in plan.folder.parent.glob("[!.]*-*") if path.is_dir()), KEPT_VERSIONS)
    return plan.folder


def _is_complete(folder: Path) -> bool:
    table = read_json(folder / TABLE)
    return isinstance(table, dict) and all((folder / f"{name}.gz").is_file() for name in table)


def _build(plan: UiPlan, node: Node, lock: Lock) -> Path:
    work, tree = plan.work, plan.work / "llamasrv-out"
    fetched = work / "node_modules" / ".llamasrv-complete"
    environment = build_environment(plan, node, tree)
    if not fetched.exists() or fetched.read_text(encoding="utf-8") != node.version:
        shutil.rmtree(work, ignore_errors=True)
        _copy_source(plan.source, work)
        say("fetching what the web UI is built with (npm, 1,100 packages, 0.7 GB that are removed afterwards)")
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        code = _run(command, work, environment, plan.log, lock, "fetching the packages of the web UI")
        if code != 0:
            raise BuildError(_failure(NPM_FAILED, plan, node, code))
        write_atomically(fetched, node.version)
    shutil.rmtree(tree, ignore_errors=True)
    (work / MODULES).unlink(missing_ok=True)
    if (free := _free_gib()) is not None and free < NEEDED_GIB:
        say(f"building the web UI takes about {NEEDED_GIB} GiB of memory, of which {free:.1f} are free")
    say(f"building the web UI {plan.label} with Node.js {node.version} (minutes on a few cores)")
    code = _run(["npm", "run", "build"], work, environment, plan.log, lock, "building the web UI")
    if code != 0:
        raise BuildError(_failure(BUILD_FAILED, plan, node, code))
    if reason := check_tree(tree):
        shutil.rmtree(work, ignore_errors=True)
        raise BuildError(BAD_TREE.format(reason=reason, log=plan.log))
    return tree


def _notices(plan: UiPlan) -> str:
    own = plan.source.parent.parent / "LICENSE"
    modules = (plan.work / MODULES).read_text(encoding="utf-8").splitlines()
    return notices(own.read_text(encoding="utf-8"), plan.work, modules)


def _copy_source(source: Path, work: Path) -> None:
    shutil.copytree(source, work, ignore=lambda folder, names: NOT_COPIED if folder == str(source) else ())
    for name, text in WRAPPED.items():
        stem, suffix = os.path.splitext(name)
        (work / name).rename(work / f"{stem}.original{suffix}")
        (work / name).write_text(text, encoding="utf-8")


def build_environment(plan: UiPlan, node: Node, tree: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of npm: the caller's (its network settings count), less what would change the outcome."""
    environment = {name: value for name, value in base.items() if not FOREIGN_VARIABLES.fullmatch(name)}
    environment.update(
        CI="1",
        LLAMA_BUILD_NUMBER=str(plan.build_number),
        LLAMA_UI_OUT_DIR=str(tree),
        LLAMA_UI_VERSION=plan.version,
        NODE_OPTIONS=f"--max-old-space-size={HEAP_MIB}",
        PATH=node.path(base),
        TZ="UTC",
    )
    return environment


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, lock: Lock, what: str) -> int:
    """Run with all output in the log and a word now and then; returns the exit code."""
    program = shutil.which(command[0], path=environment["PATH"])
    assert program is not None  # find_node has seen it
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            pass_fds=(lock.fd,),
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return process.wait(timeout=WORD_S)
                except subprocess.TimeoutExpired:
                    say(f"{what}: {time.monotonic() - started:.0f} s")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise


def _failure(text: str, plan: UiPlan, node: Node, code: int) -> str:
    output = plan.log.read_text(encoding="utf-8", errors="replace")
    # npm hands on the code of what it ran: that of a shell whose child was killed, or 128 and the signal's number
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if killed or "heap out of memory" in output or "ENOMEM" in output:
        return NO_MEMORY.format(needed=NEEDED_GIB, log=plan.log)
    errors = [line.removeprefix("npm error").strip() for line in output.splitlines() if line.startswith("npm error")]
    lines = [line for line in errors if line and "complete log" not in line]
    reason = "; ".join(lines[:3]) or last_lines(output, 2) or f"exit code {code}"
    tail = last_lines(output, 15)
    return text.format(reason=reason.rstrip(". "), log=plan.log, node=node.version, tail=tail)


def _free_gib() -> float | None:
    with contextlib.suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        return int(match[1]) / 2**20 if match else None
    return None


def pack(tree: Path, target: Path) -> None:
    """Gzip each file of a built tree, and write the table of their names and ETags."""
    table = {}
    for name in files_of(tree):
        data = gzip.compress((tree / name).read_bytes(), 9, mtime=0)
        file = target / f"{name}.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        table[name] = f'"{hashlib.sha256(data).hexdigest()}"'
    write_atomically(target / TABLE, json.dumps(table, indent=1) + "\n")


def install_ui(packed: Path | None, target: Path) -> bool:
    """Make `target` a copy of a packed UI (None: of nothing); returns whether anything had to change."""
    table = (packed / TABLE).read_bytes() if packed else b""
    with contextlib.suppress(OSError):
        if packed and (target / TABLE).read_bytes() == table and _is_complete(target):
            return False
    if packed is None and not target.exists():
        return False
    # a server reads all of it when it starts; one that starts just now finds no table, not a wrong one
    shutil.rmtree(target, ignore_errors=True)
    if packed is None:
        return True
    for name in files_of(packed):
        if name != TABLE:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            place(packed / name, target / name, link=False)
    place(packed / TABLE, target / TABLE, link=False)
    return True
