"""What a run must show beside its answers, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen import percentile
from soaklib.burst import Burst
from soaklib.ledger import ANSWERED, BUSY, LEFT, LOST, OUTCOMES, REFUSED, TWICE, WRONG, Ledger
from soaklib.probe import Sample, Watched

#: Violations that the report shows.
MAX_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Limits:
    """``rss_mib``: by how much memory at rest may be larger at the end than after the first round.

    ``late_s``: by how many seconds a client may have come before one that is served before it. The kernel's queue of
    connections and the threads that read requests are no strict line.
    """

    rss_mib: float = 24.0
    late_s: float = 1.0
    health_s: float = 10.0
    stop_s: float = 10.0


@dataclass(slots=True)
class Run:
    """``at_rest``: before the load, and after each round. ``exit_code`` None: it had to be killed."""

    ledger: Ledger
    command: str = ""
    seconds: float = 0.0
    at_rest: list[Sample] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    watched: Watched = field(default_factory=Watched)
    ended_early: int | None = None
    exit_code: int | None = None
    stop_s: float = 0.0
    log: str = ""

    @property
    def is_good(self) -> bool:
        return not self.ledger.n_violations


def slope(samples: Sequence[Sample]) -> float:
    """Growth of memory in MiB per hour, by least squares."""
    n = len(samples)
    if n < 2:
        return 0.0
    mean_t, mean_rss = sum(each.t for each in samples) / n, sum(each.rss for each in samples) / n
    square = sum((each.t - mean_t) ** 2 for each in samples)
    return 3600 * sum((each.t - mean_t) * (each.rss - mean_rss) for each in samples) / square


def judge(run: Run, limits: Limits) -> None:
    """Add to the ledger what is wrong with the run as a whole."""
    wrong = run.ledger.violation
    if run.ended_early is not None:
        wrong("the server", f"ended by itself with code {run.ended_early}")
        return
    if run.exit_code != 0:
        wrong("SIGTERM", "did not end it" if run.exit_code is None else f"ended with code {run.exit_code}")
    elif run.stop_s > limits.stop_s:
        wrong("SIGTERM", f"took {run.stop_s:.1f} s")
    for fault in run.watched.faults:
        wrong("watching", fault)
    if not run.watched.health or not run.watched.metrics or not run.watched.slots:
        wrong("watching", "nothing was seen")
    elif max(run.watched.health) > limits.health_s:
        wrong("/health", f"took {max(run.watched.health):.1f} s")
    for i, burst in enumerate(run.bursts):
        late = max(burst.late(), default=0.0)
        if late > limits.late_s:
            wrong("order", f"burst {i}: a client was served after one that came {late:.2f} s after it")
    settled = run.at_rest[1:]
    if len(settled) < 2:
        wrong("at rest", "fewer than two rounds were seen to their end")
        return
    first, last = settled[0], settled[-1]
    if last.rss - first.rss > limits.rss_mib:
        wrong("memory", f"grew from {first.rss:.1f} to {last.rss:.1f} MiB")
    if last.threads > first.threads:
        wrong("threads", f"were {first.threads} and are {last.threads}")
    if last.files > first.files:
        wrong("open files", f"were {first.files} and are {last.files}")


def figures(run: Run) -> dict[str, Any]:
    """Everything measured, as JSON."""
    watched, settled = run.watched, run.at_rest[1:]

    def at(sample: Sample) -> dict[str, float]:
        return {"rss_mib": round(sample.rss, 1), "threads": sample.threads, "files": sample.files}

    def times(values: Sequence[float]) -> dict[str, float | int | None]:
        shares = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "max": max(values, default=None)}
        return {"count": len(values), **{k: None if v is None else round(1e3 * v, 1) for k, v in shares.items()}}

    late = [each for burst in run.bursts for each in burst.late()]
    return {
        "server": run.command,
        "seconds": round(run.seconds, 1),
        "ok": run.is_good,
        "requests": sum(run.ledger.counts.values()),
        "outcomes": {outcome: run.ledger.total(outcome) for outcome in OUTCOMES},
        "kinds": run.ledger.table(),
        "health_ms": times(watched.health),
        "metrics_ms": times(watched.metrics),
        "slots_ms": times(watched.slots),
        "bursts": {
            "count": len(run.bursts),
            "clients": sum(burst.clients for burst in run.bursts),
            "served": len(late),
            "overtaken_by_places": max((burst.overtaken() for burst in run.bursts), default=0),
            "overtaken_by_s": round(max(late, default=0.0), 3),
        },
        "at_rest": [at(each) for each in run.at_rest],
        "peak": {
            "rss_mib": round(max((each.rss for each in watched.samples), default=0.0), 1),
            "threads": max((each.threads for each in watched.samples), default=0),
            "files": max((each.files for each in watched.samples), default=0),
        },
        "rss_mib_per_hour": round(slope(settled), 1),
        "exit_code": run.exit_code if run.ended_early is None else run.ended_early,
        "stop_s": round(run.stop_s, 2),
        "violations": run.ledger.n_violations,
        "violation_texts": [
            f"{each.first:.1f} s: {text}" + (f" ({each.count} times)" if each.count > 1 else "")
            for text, each in run.ledger.violations.items()
        ],
    }


def report(found: dict[str, Any]) -> str:
    """The figures as text, a table of Markdown for the requests."""
    columns = (ANSWERED, REFUSED, LEFT, BUSY, LOST, TWICE, WRONG)
    lines = [
        f"{found['requests']} requests in {found['seconds']:.0f} s to {found['server']}",
        "",
        f"| requests | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for kind, counts in {**found["kinds"], "all": found["outcomes"]}.items():
        lines.append(f"| {kind} | {' | '.join(str(counts.get(column, 0)) for column in columns)} |")
    lines.append("")
    for name in ("health", "metrics", "slots"):
        times = found[f"{name}_ms"]
        lines.append(
            f"/{name}: {times['count']} times, p50 {times['p50']} ms, p99 {times['p99']} ms, max {times['max']} ms"
        )
    bursts = found["bursts"]
    lines.append(
        f"bursts: {bursts['count']} of {bursts['clients']} clients in all, {bursts['served']} served; "
        f"overtaken by {bursts['overtaken_by_places']} places, {bursts['overtaken_by_s']} s at most"
    )
    for name, place in (("before the load", 0), ("after the first round", 1), ("at the end", -1)):
        if len(found["at_rest"]) > max(place, 0):
            at = found["at_rest"][place]
            lines.append(f"{name}: {at['rss_mib']} MiB, {at['threads']} threads, {at['files']} open files")
    peak = found["peak"]
    lines.append(f"at most: {peak['rss_mib']} MiB, {peak['threads']} threads, {peak['files']} open files")
    lines.append(f"growth of memory at rest: {found['rss_mib_per_hour']} MiB per hour")
    lines.append(f"ended with code {found['exit_code']} {found['stop_s']} s after SIGTERM")
    lines.append("")
    texts = found["violation_texts"]
    lines += [f"VIOLATION {text}" for text in texts[:MAX_SHOWN]]
    if len(texts) > MAX_SHOWN:
        lines.append(f"... and {len(texts) - MAX_SHOWN} others, see --json")
    lines.append("nothing lost, nothing twice, nothing wrong" if found["ok"] else f"{found['violations']} violations")
    return "\n".join(lines)
