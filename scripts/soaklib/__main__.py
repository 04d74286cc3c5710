"""The command line; see ``scripts/soak --help``."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path

from soaklib.server import OURS
from soaklib.soak import KINDS, Options, soak
from soaklib.verdict import figures, report


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Load a server with many clients, most of them badly behaved, and check that nothing is lost. "
        "The exit code is 1 if anything was wrong.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of load; the first round is the warm-up")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with one burst")
    parser.add_argument("--clients", type=int, default=24, help="clients beside the bursts")
    parser.add_argument("--burst", type=int, default=1000, help="clients of a burst")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", help="command of another llama-server")
    parser.add_argument("--model", type=Path, help="a .gguf file; the demo model if none is given")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="KIND",
        choices=[kind.name for kind in KINDS],
        help=f"leave out a kind of request: {', '.join(kind.name for kind in KINDS)}",
    )
    parser.add_argument("--flags", default="", help="more flags of the server, in one word")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--log", type=Path, help="write the last lines of the server's log to this file")
    given = parser.parse_args()
    if given.model is None:
        from demo_model import demo_model

        given.model = demo_model()
    # the server must not outlive its soak
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = soak(
        Options(
            model=given.model,
            minutes=given.minutes,
            rounds=given.rounds,
            clients=given.clients,
            burst=given.burst,
            seed=given.seed,
            server=shlex.split(given.server) if given.server else OURS,
            without=frozenset(given.without),
            flags=shlex.split(given.flags),
        )
    )
    found = figures(run)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    if given.log:
        given.log.write_text(run.log + "\n")
    print(report(found))
    sys.exit(0 if run.is_good else 1)


if __name__ == "__main__":
    main()
