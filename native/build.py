#!/usr/bin/env python3
"""Builds the native part of llamasrv: the libraries of llama.cpp, the bridge and the cffi module, in llamasrv/_native.

What takes long is done once per pinned version, flags and processor, in the per-user cache. The environment may name
the cache (LLAMASRV_CACHE), another llama.cpp checkout (LLAMASRV_LLAMA_CPP_DIR), options of its build (CMAKE_ARGS, such
as -DGGML_CUDA=ON; CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS) and the number of jobs (CMAKE_BUILD_PARALLEL_LEVEL).
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nativebuild.llama import build_libraries, build_reference, make_plan
from nativebuild.package import install, stage
from nativebuild.report import BuildError, say

IN_PLACE = Path(__file__).resolve().parent.parent / "llamasrv" / "_native"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--libraries", action="store_true", help="stop after the libraries of llama.cpp")
    what.add_argument("--print-prefix", action="store_true", help="build the libraries and print their build tree")
    what.add_argument("--reference", action="store_true", help="build the genuine llama-server too and print its path")
    what.add_argument("--into", type=Path, default=IN_PLACE, metavar="DIR", help="target, by default llamasrv/_native")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the warnings of the compiler")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        plan = make_plan()
        if arguments.reference:
            print(build_reference(plan))
            return 0
        build_libraries(plan)
        if arguments.print_prefix:
            print(plan.tree)
        elif not arguments.libraries and install(stage(plan, arguments.verbose), arguments.into):
            say(f"the native part is ready in {arguments.into}")
        return 0
    except BuildError as error:
        print(f"llamasrv: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("llamasrv: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
