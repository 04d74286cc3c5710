"""Which CPU features can be trusted: those that the compiler's native mode switches on are run, one process each.

ggml compiles with -march=native, which believes cpuid. Some virtual machines report features (AMX above all) whose
instructions trap; the libraries would die at the first decode. Each such feature is switched off by its -mno- flag.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .cache import cache_root, digest, read_json, write_atomically
from .report import BuildError, say
from .toolchain import Compiler

PROBE_SOURCE = Path(__file__).with_name("probe.c")
NATIVE_OPTIONS = ("-march=native", "-mcpu=native")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SECONDS_PER_FEATURE = 10


def native_macros(compiler: Compiler, flags: Sequence[str] = ()) -> frozenset[str] | None:
    """Names of the macros that the compiler's native mode defines beyond its default; None if it has no such mode."""
    plain = _macros(compiler, flags)
    for option in NATIVE_OPTIONS:
        native = _macros(compiler, [*flags, option])
        if plain is not None and native is not None:
            return native - plain
    return None


def _macros(compiler: Compiler, flags: Sequence[str]) -> frozenset[str] | None:
    command = [*compiler.command, *flags, "-dM", "-E", "-x", "c", "-"]
    run = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    return frozenset(re.findall(r"^#define (\w+)", run.stdout, re.MULTILINE)) if run.returncode == 0 else None


def flags_against_traps(compiler: Compiler, macros: frozenset[str], boot_id: Path = BOOT_ID) -> list[str]:
    """The -mno- flags for the features of `macros` whose instructions trap.

    The answer is kept until the machine is booted again, for a disk image may wake up on another processor.
    Raises BuildError if the compiler does not obey the flags.
    """
    try:
        boot = boot_id.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    key = digest([PROBE_SOURCE, boot, compiler.identity, sorted(macros)])
    answer = cache_root() / "probe" / f"{key}.json"
    known = read_json(answer)
    if boot and isinstance(known, list):
        return [str(flag) for flag in known]
    trapping = find_trapping(compiler)
    flags = [f"-mno-{feature}" for feature in trapping]
    if trapping:
        say(f"this processor claims features whose instructions trap; building without {', '.join(trapping)}")
        _check_obeyed(compiler, flags, trapping)
    write_atomically(answer, f"{flags}\n".replace("'", '"'))
    return flags


def find_trapping(compiler: Compiler) -> list[str]:
    """Compile the probe in native mode and run it for each feature; the names of those that did not survive."""
    with tempfile.TemporaryDirectory(prefix="llamasrv-probe-") as directory:
        program = str(Path(directory) / "probe")
        command = [*compiler.command, "-O0", "-march=native", str(PROBE_SOURCE), "-o", program]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            say("the CPU probe does not compile here; trusting cpuid in everything but AMX")
            return ["amx-tile", "amx-int8", "amx-bf16"]
        listing = subprocess.run([program], capture_output=True, text=True, check=True)
        return [feature for feature in listing.stdout.split() if not survives([program, feature])]


def survives(command: Sequence[str]) -> bool:
    """Whether a probe process ends with exit code 0 (and not by a signal, a refusal, or never)."""
    try:
        run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=SECONDS_PER_FEATURE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0


def _check_obeyed(compiler: Compiler, flags: Sequence[str], features: Sequence[str]) -> None:
    left = _macros(compiler, [*flags, "-march=native"]) or frozenset()
    disobeyed = [feature for feature in features if _macro(feature) in left]
    if disobeyed:
        raise BuildError(
            f"this processor traps on {', '.join(disobeyed)}, and the compiler keeps using it in spite of -mno- flags. "
            "Use another compiler (CC and CXX), or build for a plain processor: CMAKE_ARGS=-DGGML_NATIVE=OFF."
        )


def _macro(feature: str) -> str:
    return f"__{feature.upper().replace('.', '_').replace('-', '_')}__"
