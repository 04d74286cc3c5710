"""What goes into `llamasrv/_native`: libraries, bridge and cffi module, each rebuilt when its inputs change."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .cache import digest, keep_newest, place, read_json, scratch
from .llama import ORIGIN, SHARED_SUFFIX, Plan, build_lock, job_count, library_names
from .report import BuildError, say
from .source import NATIVE
from .toolchain import last_lines, package_from_pypi

BRIDGE = NATIVE / "bridge"
FFI = NATIVE / "ffi"
BRIDGE_LIBRARY = f"libllamasrv-bridge{SHARED_SUFFIX}"
LINKED = ("llama-common", "mtmd", "llama", "ggml", "ggml-base")
LICENSES = "LICENSE.llama.cpp"
INIT = '"""Built by native/build.py: the libraries of llama.cpp, the bridge and the cffi module over them."""\n'
KEPT_VERSIONS = 4

# C that still compiles although a declaration does not fit the header would fail, or worse, at run time
STRICT_C = ("-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types", "-Werror=int-conversion")

NO_PYTHON_H = (
    "Python.h was not found in {include}. The cffi module is compiled against the headers of this Python ({python}): "
    "on Debian or Ubuntu `apt-get install python3-dev`, on Fedora `dnf install python3-devel`."
)
FAILED = "{what} does not {verb} against llama.cpp {label}. The command:\n  {command}\nThe compiler's answer:\n{tail}"


def stage(plan: Plan, verbose: bool = False) -> Path:
    """Build what is missing and return a folder with exactly the files of `llamasrv/_native`.

    The libraries must have been built. Raises BuildError when something does not compile, link or load.
    """
    inputs = _Inputs(plan)
    folder = plan.tree / "llamasrv-stage" / inputs.stage_key
    if folder.is_dir():
        os.utime(folder)
        return folder
    with build_lock(plan):
        if folder.is_dir():
            return folder
        bridge = _part(plan, "bridge", inputs.bridge_key, lambda target: _build_bridge(plan, target, verbose))
        module = _part(plan, "module", inputs.module_key, lambda target: _build_module(plan, bridge, target, verbose))
        with scratch(folder.parent) as work:
            new = work / "_native"
            new.mkdir()
            libraries = (plan.libraries / name for name in library_names(plan))
            for file in (*libraries, *bridge.iterdir(), *module.iterdir()):
                place(file, new / file.name, link=True)
            (new / LICENSES).write_text(_licenses(plan.source.path), encoding="utf-8")
            (new / "__init__.py").write_text(INIT, encoding="utf-8")
            _check_loads(new)
            os.replace(new, folder)
        keep_newest(folder.parent.iterdir(), KEPT_VERSIONS)
    return folder


def install(staged: Path, target: Path) -> bool:
    """Make `target` hold the files of the staged folder; returns whether anything had to change.

    Files are replaced, never overwritten: a running server keeps the libraries that it has loaded.
    """
    target.mkdir(parents=True, exist_ok=True)
    changed = False
    for file in staged.iterdir():
        if _signature(file) != _signature(target / file.name):
            place(file, target / file.name, link=False)
            changed = True
    wanted = {file.name for file in staged.iterdir()}
    for old in target.iterdir():
        if old.name not in wanted and old.is_file() and old.suffix in (SHARED_SUFFIX, ".so"):
            old.unlink()
            changed = True
    return changed


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def module_suffix() -> str:
    """File suffix of the cffi module: the stable ABI's, except on a Python that has none (free-threaded)."""
    if _has_stable_abi():
        return ".abi3.so"
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def wheel_tag() -> str:
    """The tag of a wheel that holds this machine's libraries."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if _has_stable_abi():
        return f"cp310-abi3-{platform}"
    version = f"cp{sys.version_info.major}{sys.version_info.minor}t"
    return f"{version}-{version}-{platform}"


def _has_stable_abi() -> bool:
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


class _Inputs:
    """Keys over everything that decides the bytes of the bridge, of the module, and of the whole folder."""

    def __init__(self, plan: Plan) -> None:
        libraries = [plan.key, read_json(plan.stamp)]
        headers = sorted(BRIDGE.glob("*.h"))
        recipe = Path(__file__)
        python = [sys.implementation.cache_tag, module_suffix(), _python_includes(), _cffi_version()]
        self.bridge_key = digest([*libraries, recipe, *headers, *sorted(BRIDGE.glob("*.cpp"))])
        self.module_key = digest([*libraries, recipe, *headers, *_ffi_files(), python])
        self.stage_key = digest([self.bridge_key, self.module_key])


def _ffi_files() -> list[Path]:
    return sorted(path for path in FFI.iterdir() if path.suffix in (".h", ".py"))


def _part(plan: Plan, name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder of a built part; `build` is called with a new folder to fill when it does not exist yet."""
    folder = plan.tree / "llamasrv-parts" / f"{name}-{key}"
    if folder.is_dir():
        os.utime(folder)
        return folder
    with scratch(folder.parent) as work:
        new = work / name
        new.mkdir()
        build(new)
        os.replace(new, folder)
    keep_newest(folder.parent.glob(f"{name}-*"), KEPT_VERSIONS)
    return folder


def consumer_flags(commands: object) -> list[str]:
    """Flags with which the build itself compiles a user of libllama-common, from its compile_commands.json.

    The layout of common's structures depends on them. Raises BuildError when there is no such entry.
    """
    entries = commands if isinstance(commands, list) else []
    for entry in entries:
        if Path(entry["file"]).name == "server-context.cpp":
            words = shlex.split(entry["command"].replace("-isystem ", "-isystem"))
            return [word for word in words if _is_interface_flag(word)]
    raise BuildError(
        "this llama.cpp does not build tools/server/server-context.cpp; it is of another kind than the pin."
    )


def _is_interface_flag(word: str) -> bool:
    if word.startswith("-I"):
        return not word.rstrip("/").endswith("tools/server")
    return word.startswith(("-D", "-std", "-m", "-f", "-O", "-isystem"))


def _build_bridge(plan: Plan, target: Path, verbose: bool) -> None:
    say("compiling the bridge over libllama-common")
    flags = consumer_flags(read_json(plan.tree / "compile_commands.json"))
    # llama.cpp's headers as system headers: the warnings shown are those of our own code
    flags = [f"-isystem{flag[2:]}" if flag.startswith("-I") else flag for flag in flags]
    compiler = [*plan.toolchain.cxx.command, *flags, "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{BRIDGE}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as objects:
        sources = {str(Path(objects) / f"{path.stem}.o"): str(path) for path in sorted(BRIDGE.glob("*.cpp"))}
        commands = [[*compiler, "-c", path, "-o", output] for output, path in sources.items()]
        with ThreadPoolExecutor(job_count()) as pool:
            list(pool.map(lambda command: _run(plan, "the bridge", "compile", command, verbose), commands))
        link = [*plan.toolchain.cxx.command, "-shared", "-pthread", *sources, "-o", str(target / BRIDGE_LIBRARY)]
        if sys.platform == "darwin":
            link += [f"-Wl,-install_name,@rpath/{BRIDGE_LIBRARY}"]
        else:
            link += ["-Wl,-z,defs", f"-Wl,-soname,{BRIDGE_LIBRARY}"]
        _run(plan, "the bridge", "link", [*link, *_link_flags(plan, LINKED)], verbose)


def require_python_headers() -> None:
    """Raise BuildError where the cffi module cannot be compiled; to be known before the libraries take minutes."""
    includes = _python_includes()
    if not any((Path(include) / "Python.h").exists() for include in includes):
        raise BuildError(NO_PYTHON_H.format(include=" or ".join(includes), python=sys.executable))


def _build_module(plan: Plan, bridge: Path, target: Path, verbose: bool) -> None:
    say("compiling the cffi module")
    require_python_headers()
    flags = consumer_flags(read_json(plan.tree / "compile_commands.json"))
    flags = [flag for flag in flags if not flag.startswith("-std")]
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        source = str(Path(work) / "_llama.c")
        command = [sys.executable, str(FFI / "build_ffi.py"), source]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=_python_environment())
        if run.returncode != 0:
            raise BuildError(f"native/ffi/cdef.h is not understood by cffi:\n{last_lines(run.stderr, 12)}")
        command = [*plan.toolchain.c.command, *flags, "-fPIC", "-shared", *STRICT_C, f"-I{BRIDGE}"]
        command += [f"-I{include}" for include in _python_includes()]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        command += [source, "-o", str(target / f"_llama{module_suffix()}"), f"-L{bridge}", "-lllamasrv-bridge"]
        _run(plan, "the cffi module", "compile", [*command, *_link_flags(plan, LINKED[1:])], verbose)


def _link_flags(plan: Plan, libraries: Sequence[str]) -> list[str]:
    return [f"-L{plan.libraries}", *(f"-l{name}" for name in libraries), f"-Wl,-rpath,{ORIGIN}"]


def _run(plan: Plan, what: str, verb: str, command: Sequence[str], verbose: bool) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if run.returncode != 0:
        lines = run.stderr.splitlines()
        start = next((i for i, line in enumerate(lines) if "error" in line or "undefined" in line), 0)
        tail = "\n".join(line[:400] for line in lines[start : start + 20])
        label = plan.source.label
        raise BuildError(FAILED.format(what=what, verb=verb, label=label, command=shlex.join(command), tail=tail))
    if verbose and run.stderr:
        print(run.stderr, file=sys.stderr)


def _python_includes() -> list[str]:
    return sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})


def _cffi_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("cffi")
    return "from the cache"


def _python_environment() -> dict[str, str]:
    """The environment of a child that imports cffi, which is fetched where this Python has none."""
    environment = dict(os.environ)
    if importlib.util.find_spec("cffi") is None:
        own = [str(package_from_pypi("cffi", "cffi>=1.16"))]
        environment["PYTHONPATH"] = os.pathsep.join(own + list(filter(None, [environment.get("PYTHONPATH")])))
    return environment


def _check_loads(folder: Path) -> None:
    """Load the module in a child: cffi compares every structure with the headers, the linker finds every symbol."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); import _llama; _llama.lib.lsrv_build_number()"
    command = [sys.executable, "-c", program, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=_python_environment())
    if run.returncode != 0:
        reason = last_lines(run.stderr, 3) or f"the process ended with {run.returncode}"
        raise BuildError(f"the native module was built but does not load: {reason}")


def _licenses(source: Path) -> str:
    """The licenses of everything that the libraries are made of, in one text."""
    parts = []
    for pattern in ("LICENSE", "licenses/LICENSE*", "vendor/**/LICENSE*"):
        for file in sorted(source.glob(pattern)):
            parts.append(f"{file.relative_to(source)}\n\n{file.read_text(encoding='utf-8', errors='replace')}")
    return "\n\n".join(parts)
