"""Sets up this checkout for use: .venv, the native part, llamasrv installed in place. Repeats only what is stale."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "native"))

from nativebuild.cache import digest, locked, read_json, write_atomically
from nativebuild.report import BuildError, say
from nativebuild.toolchain import last_lines

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "llamasrv-installed.json"
# setuptools: some packages of the extras come as source, and are built with what is in the environment
BUILD_REQUIREMENTS = ("hatchling>=1.27", "cffi>=1.16", "setuptools>=70.1")

NO_VENV = (
    "a virtual environment could not be made in {venv}: {reason}. On Debian or Ubuntu the module is in a package of "
    "its own: `apt-get install python3-venv`."
)
INSTALL_FAILED = (
    "pip could not install {what} into {venv}: {reason}. Check the network (pip honours PIP_INDEX_URL, PIP_PROXY and "
    "its configuration files) and run the same command again."
)


def prepare(extras: Sequence[str] = ()) -> Path:
    """Bring .venv up to date with llamasrv and the named extras; returns its Python. Ends the program on failure."""
    try:
        with locked(f"venv-{digest([str(VENV)])}", f"setting up {VENV}"):
            _prepare(extras)
    except BuildError as error:
        sys.exit(f"llamasrv: error: {error}")
    except KeyboardInterrupt:
        sys.exit("llamasrv: interrupted; the same command goes on from here")
    return PYTHON


def build(*options: str) -> str:
    """Run native/build.py with the Python of .venv; returns what it printed. Its progress goes to stderr."""
    command = [str(PYTHON), str(ROOT / "native" / "build.py"), *options]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
        sys.exit(run.returncode)
    return run.stdout.strip()


def _prepare(extras: Sequence[str]) -> None:
    if not _works(PYTHON):
        say(f"making a virtual environment in {VENV}")
        command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise BuildError(NO_VENV.format(venv=VENV, reason=last_lines(run.stdout + run.stderr, 1).rstrip(".")))
    key = digest([ROOT / "pyproject.toml", str(ROOT), VENV / "pyvenv.cfg"])
    stamp = read_json(STAMP)
    installed = set(stamp.get("extras", ())) if isinstance(stamp, dict) and stamp.get("key") == key else None
    if installed is None:
        _pip_install("the tools of the build", BUILD_REQUIREMENTS)
    build()
    if installed is None or not installed.issuperset(extras):
        wanted = sorted((installed or set()) | set(extras))
        target = f"{ROOT}[{','.join(wanted)}]" if wanted else str(ROOT)
        _pip_install("llamasrv and what it needs", ["--no-build-isolation", "--editable", target])
        write_atomically(STAMP, f'{{"key": "{key}", "extras": {str(wanted).replace(chr(39), chr(34))}}}\n')


def _works(python: Path) -> bool:
    command = [str(python), "-c", "import sys, pip; sys.exit(sys.version_info < (3, 10))"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _pip_install(what: str, arguments: Sequence[str]) -> None:
    say(f"installing {what} into {VENV}")
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", *arguments]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        errors = [line for line in run.stderr.splitlines() if "rror" in line]
        reason = "; ".join(errors[-3:]) or last_lines(run.stderr, 3)
        raise BuildError(INSTALL_FAILED.format(what=what, venv=VENV, reason=reason.rstrip(".")))


def environment() -> dict[str, str]:
    """The environment of programs that run inside .venv."""
    path = os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "VIRTUAL_ENV": str(VENV), "PATH": path}
