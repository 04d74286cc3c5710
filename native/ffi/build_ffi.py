"""Writes the C source of the cffi module `llamasrv._native._llama` (API mode: checked against the real headers).

Run as `python build_ffi.py OUTPUT.c`; needs cffi. Compiling it is the business of native/build.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

MODULE = "llamasrv._native._llama"
DECLARATIONS = sorted(Path(__file__).parent.glob("cdef*.h"))
INCLUDES = """
#include "llama.h"
#include "mtmd.h"
#include "mtmd-helper.h"
#include "bridge.h"
#include "bridge_chat.h"
#include "bridge_decision.h"
#include "bridge_logprobs.h"
#include "bridge_spec.h"
"""


def make_ffi() -> cffi.FFI:
    """The declarations of cdef*.h, bound to the headers of llama.cpp and of the bridge."""
    ffi = cffi.FFI()
    for file in DECLARATIONS:
        ffi.cdef(file.read_text(encoding="utf-8"))
    ffi.set_source(MODULE, INCLUDES)
    return ffi


def main(output: str) -> None:
    make_ffi().emit_c_code(output)


if __name__ == "__main__":
    main(sys.argv[1])
