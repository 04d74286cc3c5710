#!/usr/bin/env python3
"""Builds the native part of llamasrv: the libraries of llama.cpp, the bridge and the cffi module, in llamasrv/_native,
and llama.cpp's web UI, in llamasrv/_ui.

What takes long is done once per pinned version, flags and processor, in the per-user cache. The environment may name
the cache (LLAMASRV_CACHE), another llama.cpp checkout (LLAMASRV_LLAMA_CPP_DIR), options of its build (CMAKE_ARGS, such
as -DGGML_CUDA=ON; CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS) and the number of jobs (CMAKE_BUILD_PARALLEL_LEVEL). With
LLAMASRV_NO_UI=1 there is no web UI.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nativebuild.llama import build_libraries, build_reference, is_complete, make_plan
from nativebuild.package import install, require_python_headers, stage
from nativebuild.report import BuildError, say
from nativebuild.ui import build_ui, install_ui, plan_ui, wants_ui

PACKAGE = Path(__file__).resolve().parent.parent / "llamasrv"
IN_PLACE = PACKAGE / "_native"
UI_IN_PLACE = PACKAGE / "_ui"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--libraries", action="store_true", help="stop after the libraries of llama.cpp")
    what.add_argument("--print-prefix", action="store_true", help="build the libraries and print their build tree")
    what.add_argument("--reference", action="store_true", help="build the genuine llama-server too and print its path")
    what.add_argument("--ui", action="store_true", help="build the web UI only and print its folder")
    what.add_argument("--into", type=Path, default=IN_PLACE, metavar="DIR", help="target, by default llamasrv/_native")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the warnings of the compiler")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        plan = make_plan()
        if arguments.reference:
            print(build_reference(plan))
            return 0
        if arguments.ui:
            print(build_ui(plan_ui(plan.source)))
            return 0
        if not (arguments.libraries or arguments.print_prefix or is_complete(plan)):
            require_python_headers()
        build_libraries(plan)
        if arguments.print_prefix:
            print(plan.tree)
        elif not arguments.libraries:
            if install(stage(plan, arguments.verbose), arguments.into):
                say(f"the native part is ready in {arguments.into}")
            if arguments.into == IN_PLACE:
                ui = build_ui(plan_ui(plan.source)) if wants_ui() else None
                if install_ui(ui, UI_IN_PLACE):
                    say(f"the web UI is ready in {UI_IN_PLACE}" if ui else "the web UI is left out")
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
