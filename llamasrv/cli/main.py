"""Start-up, main loop and end of the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from llamasrv import binding
from llamasrv.cli import flags
from llamasrv.cli.serve import serve
from llamasrv.engine import log


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is told to end; returns the exit code.

    ``argv``: the arguments without the program's name, by default those of the process.
    """
    binding.heap.limit()
    try:
        own, rest = flags.split(sys.argv[1:] if argv is None else argv, os.environ)
    except flags.FlagError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    try:
        params = binding.Params.parse([_program(), *rest], flags.usage())
    except binding.NativeError:
        return 1  # the parser has already said why
    events = binding.log.event if binding.log.is_jsonl() else None
    log.set_sink(binding.log.log, binding.log.verbosity(), events)
    try:
        with params:
            return serve(params, own)
    finally:
        binding.log.flush()


def _program() -> str:
    """How the program was called, for the usage text."""
    name = os.path.basename(sys.argv[0])
    return "python -m llamasrv" if name == "__main__.py" else name
