"""Configures and compiles the libraries of llama.cpp, in a build tree of the cache that its key names."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cache import Lock, cache_root, digest, locked, read_json, write_atomically
from .probe import flags_against_traps, native_macros
from .report import BuildError, Progress, say
from .source import Source, fetch, find_source
from .toolchain import Toolchain, cmake_definition, find_cmake, find_ninja, find_toolchain, last_lines

LIBRARY_TARGETS = ("ggml", "llama", "llama-common", "mtmd")
REFERENCE_TARGET = "llama-server"
SHARED_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
ORIGIN = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"

DEFINITIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=ON",
    # libraries that find each other wherever they are put together, under one name each (a wheel has no symlinks)
    "CMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"CMAKE_INSTALL_RPATH={ORIGIN}",
    "CMAKE_INSTALL_RPATH_USE_LINK_PATH=ON",
    "CMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    # ggml would drop this by itself where SOURCE_DATE_EPOCH is set
    "GGML_NATIVE=ON",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
    "LLAMA_BUILD_TOOLS=ON",
    "LLAMA_BUILD_SERVER=ON",
)
ENVIRONMENT_OF_THE_KEY = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS")

CONFIGURE_FAILED = (
    "cmake could not configure llama.cpp; the whole output is in {log}. Where CMAKE_ARGS ({cmake_args}) asks for a "
    "backend, its development files must be installed. The last lines:\n{tail}"
)
COMPILE_FAILED = "llama.cpp does not compile here; the whole output is in {log}. The first failure:\n{tail}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A build of llama.cpp, decided in full: what is compiled, how, and where."""

    source: Source
    toolchain: Toolchain
    cmake_args: tuple[str, ...]
    definitions: tuple[str, ...]
    key: str

    @property
    def tree(self) -> Path:
        """The build tree, kept for the reference server and for later builds."""
        return cache_root() / "builds" / f"{self.source.label}-{self.key}"

    @property
    def libraries(self) -> Path:
        """The folder of the shared libraries (and of executables)."""
        return self.tree / "bin"

    @property
    def stamp(self) -> Path:
        """Written when the libraries are complete: their names and what they are recognized by."""
        return self.tree / "llamasrv-complete.json"

    @property
    def reference(self) -> Path:
        """Where the genuine llama-server is after `build_reference`."""
        return self.libraries / REFERENCE_TARGET


def make_plan(environment: Mapping[str, str] = os.environ) -> Plan:
    """Decide source, compilers and flags. Raises BuildError when no working compiler is there."""
    source = find_source(environment)
    cmake_args = tuple(shlex.split(environment.get("CMAKE_ARGS", "")))
    toolchain = find_toolchain(cmake_args, environment)
    macros: frozenset[str] = frozenset()
    trap_flags: list[str] = []
    if (cmake_definition(cmake_args, "GGML_NATIVE") or "ON").upper() not in ("OFF", "0", "NO", "FALSE", "N"):
        macros = native_macros(toolchain.c) or macros
        if platform.machine().lower() in ("x86_64", "amd64", "i686"):
            trap_flags = flags_against_traps(toolchain.c, macros)
    definitions = (
        *DEFINITIONS,
        f"CMAKE_C_COMPILER={';'.join(toolchain.c.command)}",
        f"CMAKE_CXX_COMPILER={';'.join(toolchain.cxx.command)}",
        *_version_definitions(source),
    )
    flags = tuple(
        f"{name}={value}"
        for name, variable in (("CMAKE_C_FLAGS", "CFLAGS"), ("CMAKE_CXX_FLAGS", "CXXFLAGS"))
        if (value := _compile_flags(cmake_args, name, environment.get(variable, ""), trap_flags))
    )
    key = digest(
        [
            source.identity,
            platform.machine(),
            definitions,
            cmake_args,
            flags,
            toolchain.c.identity,
            toolchain.cxx.identity,
            sorted(macros),
            {name: environment.get(name, "") for name in ENVIRONMENT_OF_THE_KEY},
        ]
    )
    # CMAKE_ARGS overrides what stands before it; the compile flags are already merged with those of CMAKE_ARGS
    arguments = (*(f"-D{item}" for item in definitions), *cmake_args, *(f"-D{item}" for item in flags))
    return Plan(source, toolchain, cmake_args, arguments, key)


def _compile_flags(cmake_args: Sequence[str], name: str, from_environment: str, extra: Sequence[str]) -> str:
    given = cmake_definition(cmake_args, name)
    return " ".join(filter(None, [from_environment if given is None else given, *extra]))


def _version_definitions(source: Source) -> tuple[str, ...]:
    if (source.path / ".git").exists() and source.changes:
        return ()  # a checkout knows its own number and commit
    return (f"LLAMA_BUILD_NUMBER={source.build_number or 0}", "LLAMA_BUILD_COMMIT=unknown")


def is_complete(plan: Plan) -> bool:
    """Whether the libraries are there, finished and untouched. A checkout that may have changed never counts."""
    return not plan.source.changes and plan.source.path.is_dir() and _stamp_holds(plan)


def _stamp_holds(plan: Plan) -> bool:
    stamp = read_json(plan.stamp)
    return isinstance(stamp, dict) and bool(stamp) and stamp == _describe(plan, stamp)


def _describe(plan: Plan, names: Iterable[str]) -> dict[str, list[int]]:
    """Size of each library that exists; also its time where the source changes under the same key."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError):
            status = (plan.libraries / name).stat()
            found[name] = [status.st_size, status.st_mtime_ns] if plan.source.changes else [status.st_size]
    return found


def library_names(plan: Plan) -> list[str]:
    """File names of the finished build's shared libraries."""
    stamp = read_json(plan.stamp)
    return sorted(stamp) if isinstance(stamp, dict) else []


@contextlib.contextmanager
def build_lock(plan: Plan) -> Iterator[Lock]:
    """Hold this build's lock: one process builds, the others wait."""
    with locked(plan.tree.name, f"building llama.cpp {plan.source.label}") as lock:
        yield lock


def build_libraries(plan: Plan) -> None:
    """Make sure that the libraries are built. Resumes where an interrupted run left off.

    Raises BuildError when something is missing or does not compile.
    """
    if is_complete(plan):
        return
    fetch(plan.source)
    with build_lock(plan) as lock:
        if is_complete(plan):
            return
        ninja = _configure(plan, lock)
        _compile(plan, lock, ninja, LIBRARY_TARGETS, f"building llama.cpp {plan.source.label}")
        names = [path.name for path in plan.libraries.glob(f"lib*{SHARED_SUFFIX}") if "server" not in path.name]
        write_atomically(plan.stamp, json.dumps(_describe(plan, sorted(names)), indent=1) + "\n")


def build_reference(plan: Plan) -> Path:
    """Build the genuine llama-server in the same tree with the same flags; returns its path."""
    build_libraries(plan)
    done = plan.tree / "llamasrv-reference.json"
    if read_json(done) == read_json(plan.stamp) and plan.reference.exists() and not plan.source.changes:
        return plan.reference
    with build_lock(plan) as lock:
        ninja = _configure(plan, lock)
        _compile(plan, lock, ninja, (REFERENCE_TARGET,), "building the reference llama-server")
        write_atomically(done, json.dumps(read_json(plan.stamp)) + "\n")
    return plan.reference


def _configure(plan: Plan, lock: Lock) -> str:
    cmake, ninja = find_cmake(), find_ninja()
    # cmake also finds a ccache that is not on PATH, where the compile commands would then miss it
    ccache = "ON" if shutil.which("ccache") else "OFF"
    arguments = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DGGML_CCACHE={ccache}", *plan.definitions]
    command = [cmake, "-S", str(plan.source.path), "-B", str(plan.tree), *arguments]
    configured = plan.tree / "llamasrv-configured.json"
    if read_json(configured) == command and (plan.tree / "build.ninja").exists():
        return ninja
    say(f"configuring llama.cpp {plan.source.label} in {plan.tree}")
    plan.tree.mkdir(parents=True, exist_ok=True)
    log = plan.tree / "llamasrv-configure.log"
    with log.open("w", encoding="utf-8", errors="replace") as file:
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            env=_environment(plan),
            pass_fds=(lock.fd,),
        )
    if run.returncode != 0:
        tail = last_lines(log.read_text(encoding="utf-8", errors="replace"), 15)
        args = shlex.join(plan.cmake_args) or "not set"
        raise BuildError(CONFIGURE_FAILED.format(log=log, cmake_args=args, tail=tail))
    write_atomically(configured, json.dumps(command) + "\n")
    return ninja


def _environment(plan: Plan) -> dict[str, str]:
    environment = dict(os.environ)
    # a git repository around the cache must not lend its commit to the libraries
    environment["GIT_CEILING_DIRECTORIES"] = str(plan.source.path.parent)
    environment["NINJA_STATUS"] = "[%f/%t] "
    return environment


def _compile(plan: Plan, lock: Lock, ninja: str, targets: Sequence[str], what: str) -> None:
    log = plan.tree / "llamasrv-build.log"
    jobs = job_count()
    progress: Progress | None = None
    command = [ninja, "-C", str(plan.tree), "-j", str(jobs), *targets]
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(plan),
            pass_fds=(lock.fd,),
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                if match := re.match(r"\[(\d+)/(\d+)\]", line):
                    if progress is None:
                        say(f"{what} with {jobs} jobs ({match[2]} steps; minutes on a few cores)")
                        progress = Progress(what)
                    progress.update(int(match[1]), int(match[2]))
        except BaseException:
            process.terminate()
            raise
        finally:
            if progress is not None:
                progress.close()
    if process.returncode != 0:
        raise BuildError(COMPILE_FAILED.format(log=log, tail=_first_failure(log.read_text(encoding="utf-8"))))


def _first_failure(log: str) -> str:
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), max(len(lines) - 15, 0))
    return "\n".join(line[:400] for line in lines[start : start + 15])


def job_count(environment: Mapping[str, str] = os.environ) -> int:
    """Compiler processes at once: CMAKE_BUILD_PARALLEL_LEVEL, else the usable CPUs, at most one per free GiB."""
    if (given := environment.get("CMAKE_BUILD_PARALLEL_LEVEL", "")).isdigit() and int(given) > 0:
        return int(given)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError, TypeError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        cpus = min(cpus, int(match[1]) // 2**20) if match else cpus
    return max(cpus, 1)
