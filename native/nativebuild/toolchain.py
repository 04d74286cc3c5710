"""The tools of the build: C and C++ compiler from the machine, cmake and ninja from there or from PyPI, pip."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_root, locked, scratch
from .report import BuildError, say

MINIMUM_CMAKE = (3, 18)

NO_COMPILER = (
    "no {language} compiler was found ({tried}). llama.cpp is compiled for this very machine, which takes a C and a "
    "C++ compiler: on Debian or Ubuntu `apt-get install g++`, on Fedora `dnf install gcc-c++`, on macOS "
    "`xcode-select --install`. A compiler in another place is named by the environment variables CC and CXX."
)
BROKEN_COMPILER = (
    "the {language} compiler `{command}` does not work: {reason}. Repair it, or name another one by the environment "
    "variables CC and CXX."
)
NO_PIP = (
    "{what} has to be fetched, but {python} has no pip and none could be set up ({reason}). Install it (on Debian or "
    "Ubuntu `apt-get install python3-pip python3-venv`), or run the build from a virtual environment that has pip."
)
PIP_FAILED = (
    "pip could not fetch {what}: {reason}. The build takes it from the Python package index once; check the network "
    "(pip honours PIP_INDEX_URL, PIP_PROXY and its configuration files) and run the same command again."
)
PIP_HASH = (
    "pip refused {what}: what the package index served does not have the pinned hash ({reason}). Nothing of it was "
    "used. Check which index or mirror pip is configured for."
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler: `command` as a list of words, `identity` its version and target, for the build's key."""

    command: tuple[str, ...]
    identity: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    c: Compiler
    cxx: Compiler


def cmake_definition(arguments: Sequence[str], name: str) -> str | None:
    """The value of the last `-DNAME[:TYPE]=value` among cmake arguments, or None."""
    value = None
    words = iter(arguments)
    for word in words:
        if word == "-D":
            word = "-D" + next(words, "")
        match = re.fullmatch(rf"-D{re.escape(name)}(?::\w+)?=(.*)", word, re.DOTALL)
        if match:
            value = match[1]
    return value


def find_toolchain(cmake_args: Sequence[str], environment: Mapping[str, str]) -> Toolchain:
    """The compilers that cmake will use: from CMAKE_ARGS, from CC and CXX, or the usual names on PATH.

    Raises BuildError when one is missing or does not run.
    """
    c = cmake_definition(cmake_args, "CMAKE_C_COMPILER") or environment.get("CC")
    cxx = cmake_definition(cmake_args, "CMAKE_CXX_COMPILER") or environment.get("CXX")
    return Toolchain(
        c=_find_compiler("C", c, ("cc", "gcc", "clang"), environment),
        cxx=_find_compiler("C++", cxx, ("c++", "g++", "clang++"), environment),
    )


def _find_compiler(language: str, given: str | None, names: Sequence[str], environment: Mapping[str, str]) -> Compiler:
    candidates = [given] if given else list(names)
    for candidate in candidates:
        program, *options = shlex.split(candidate) or [""]
        if path := shutil.which(program, path=environment.get("PATH")):
            command = (path, *options)
            return Compiler(command, _identify(language, command))
    raise BuildError(NO_COMPILER.format(language=language, tried=", ".join(candidates)))


def _identify(language: str, command: tuple[str, ...]) -> str:
    lines = []
    for option in ("--version", "-dumpmachine"):
        try:
            run = subprocess.run([*command, option], capture_output=True, text=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            reason = last_lines(getattr(error, "stderr", None) or str(error), 1).rstrip(".")
            text = BROKEN_COMPILER.format(language=language, command=shlex.join(command), reason=reason)
            raise BuildError(text) from None
        lines.append(run.stdout.strip().splitlines()[0] if run.stdout.strip() else "")
    return " ".join(lines)


def last_lines(text: str, count: int) -> str:
    """The last `count` lines of `text` that are not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def find_cmake() -> str:
    """Path of a cmake that is new enough: the machine's, else one from PyPI kept in the cache."""
    for path in filter(None, (shutil.which("cmake"),)):
        version = _cmake_version(path)
        if version >= MINIMUM_CMAKE:
            return path
    return _tool_from_pypi("cmake", f"cmake>={MINIMUM_CMAKE[0]}.{MINIMUM_CMAKE[1]}")


def _cmake_version(path: str) -> tuple[int, ...]:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"cmake version (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else ()


def find_ninja() -> str:
    """Path of ninja: the machine's, else one from PyPI kept in the cache."""
    return shutil.which("ninja") or shutil.which("ninja-build") or _tool_from_pypi("ninja", "ninja>=1.10")


def _tool_from_pypi(name: str, requirement: str) -> str:
    directory = package_from_pypi(name, requirement)
    for path in (directory / name / "data" / "bin" / name, directory / "bin" / name):
        if os.access(path, os.X_OK):
            return str(path)
    raise BuildError(f"the PyPI package {name} holds no executable for this platform; install {name} by other means.")


def package_from_pypi(name: str, requirement: str) -> Path:
    """Install a package into a directory of its own in the cache, once per Python version, and return it."""
    target = cache_root() / "tools" / f"{name}-{sys.implementation.cache_tag}"
    if target.is_dir():
        return target
    with locked("tools", f"fetching {name}"):
        if not target.is_dir():
            say(f"fetching {name} with pip (this machine has none)")
            with scratch(target.parent) as work:
                pip(["install", "--only-binary", ":all:", "--target", str(work / name), requirement], name)
                os.replace(work / name, target)
    return target


def pip(arguments: Sequence[str], what: str) -> None:
    """Run pip quietly. Raises BuildError with pip's own last words."""
    command = [*_pip_command(what), "--disable-pip-version-check", "--no-input", *arguments]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        errors = [line.removeprefix("ERROR:").strip() for line in run.stderr.splitlines() if "ERROR" in line]
        reason = "; ".join(errors[-2:]) or last_lines(run.stderr, 2) or f"exit code {run.returncode}"
        text = PIP_HASH if "DO NOT MATCH THE HASHES" in run.stderr else PIP_FAILED
        raise BuildError(text.format(what=what, reason=reason.rstrip(". ")))


def _pip_command(what: str) -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    # a Python without pip (Debian's, or a build environment): one that has it, made once
    directory = cache_root() / "tools" / f"pip-{sys.implementation.cache_tag}"
    python = directory / "bin" / "python"
    if not python.exists():
        with locked("pip", "setting up pip"):
            if not python.exists():
                shutil.rmtree(directory, ignore_errors=True)
                run = subprocess.run(
                    [sys.executable, "-m", "venv", str(directory)], capture_output=True, text=True, check=False
                )
                if run.returncode != 0:
                    shutil.rmtree(directory, ignore_errors=True)
                    reason = last_lines(run.stdout + run.stderr, 1) or f"exit code {run.returncode}"
                    raise BuildError(NO_PIP.format(what=what, python=sys.executable, reason=reason))
    return [str(python), "-m", "pip"]
