"""What became of every request, and what was found wrong."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field

from soaklib.wire import LostError, TwiceError, WrongError

#: Outcomes of one visit. "left": the client hung up on purpose, and nothing was demanded of the answer.
ANSWERED, REFUSED, BUSY, LEFT = "answered", "refused", "busy", "left"
#: Outcomes that are violations.
LOST, TWICE, WRONG = "lost", "twice", "wrong"
OUTCOMES = (ANSWERED, REFUSED, BUSY, LEFT, LOST, TWICE, WRONG)


@dataclass(slots=True)
class Violation:
    """``first``: when it was seen first, seconds after the start."""

    first: float
    count: int = 0


@dataclass(slots=True)
class Ledger:
    """``counts``: by kind and outcome. ``violations``: by text."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: dict[str, Violation] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def violation(self, what: str, text: str) -> None:
        self.violations.setdefault(f"{what}: {text}", Violation(time.monotonic() - self.started)).count += 1

    @property
    def n_violations(self) -> int:
        return sum(each.count for each in self.violations.values())

    async def note(self, kind: str, visit: Awaitable[str], patience: float) -> None:
        """Make a visit and write down its outcome. ``patience``: seconds after which an answer counts as lost."""
        try:
            outcome = await asyncio.wait_for(visit, patience)
        except asyncio.TimeoutError:  # another class in Python 3.10
            outcome, text = LOST, f"no answer within {patience:g} s"
        except LostError as exc:
            outcome, text = LOST, str(exc)
        except TwiceError as exc:
            outcome, text = TWICE, str(exc)
        except WrongError as exc:
            outcome, text = WRONG, str(exc)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as exc:
            # an answer of another shape than its dialect has
            outcome, text = WRONG, f"an answer of another shape: {exc!r}"
        else:
            text = ""
        self.counts[kind, outcome] += 1
        if text:
            self.violation(f"{kind}: {outcome}", text)

    def total(self, *outcomes: str) -> int:
        return sum(count for (_, outcome), count in self.counts.items() if outcome in outcomes)

    def table(self) -> dict[str, dict[str, int]]:
        """Kind -> outcome -> count."""
        out: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.counts.items()):
            out.setdefault(kind, {})[outcome] = count
        return out
