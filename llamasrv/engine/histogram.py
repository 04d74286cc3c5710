"""Distribution of a value over fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

#: From a fast token to a long request.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


@dataclass(slots=True)
class Histogram:
    """``counts[i]``: values up to ``bounds[i]`` and above the bound before; the last one: above all bounds."""

    bounds: tuple[float, ...]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 if nothing was observed."""
        return self.sum / n if (n := self.count) else 0.0

    def copy(self) -> Histogram:
        """A snapshot; may be taken while another thread observes."""
        return Histogram(self.bounds, self.sum, list(self.counts))
