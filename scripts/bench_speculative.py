"""Tokens per second of one stream on repetitive text, without and with each type of drafter.

    python scripts/bench_speculative.py -m MODEL.gguf [-md DRAFT.gguf] [--server COMMAND] [--types ngram-mod,...]

The prompt holds a text twice and its beginning a third time, so that a greedy model goes on copying: what n-gram
drafters are made for. Rounds alternate over the variants; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import urllib.request
from collections.abc import Sequence

from bench_compare import OURS, server

TEXT = (
    "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius * shape.radius\n"
    "    if shape.kind == 'square':\n        return shape.side * shape.side\n"
    "    if shape.kind == 'rectangle':\n        return shape.width * shape.height\n"
    "    raise ValueError('unknown shape: ' + shape.kind)\n\n\n"
)
DEFAULT_TYPES = "ngram-simple,ngram-map-k,ngram-mod,ngram-cache"


def measure(port: int, n_predict: int) -> tuple[float, float]:
    """``(tokens per second, share of drafted tokens that stood)`` of one completion."""
    body = {
        "prompt": TEXT * 2 + TEXT[: len(TEXT) // 8],
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        timings = json.load(response)["timings"]
    drafted = timings.get("draft_n", 0)
    return timings["predicted_per_second"], timings.get("draft_n_accepted", 0) / drafted if drafted else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-md", "--draft", help="also measure draft-simple with this model")
    parser.add_argument("--server", default=shlex.join(OURS), help="command to measure")
    parser.add_argument("--types", default=DEFAULT_TYPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n-predict", type=int, default=200)
    options = parser.parse_args(arguments)
    variants: dict[str, list[str]] = {"none": []}
    variants.update({name: ["--spec-type", name] for name in options.types.split(",")})
    if options.draft:
        variants["draft-simple"] = ["--spec-type", "draft-simple", "-md", options.draft]
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, flags in variants.items():
            common = ["-m", options.model, "-c", "4096", "-np", "1"]
            with server(shlex.split(options.server), [*common, *flags]) as (port, _):
                measure(port, 8)
                figures[name].append(measure(port, options.n_predict))
    plain = statistics.median(speed for speed, _ in figures["none"])
    print(f"{'drafter':<14} {'tokens/s':>9} {'ratio':>6} {'accepted':>9}")
    for name, values in figures.items():
        speed = statistics.median(value[0] for value in values)
        print(f"{name:<14} {speed:>9.1f} {speed / plain:>6.2f} {statistics.median(value[1] for value in values):>9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
