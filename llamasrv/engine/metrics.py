"""Counters of the whole server since its start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from llamasrv.engine.histogram import SECONDS, SHARES, TOKENS, Histogram


@dataclass(slots=True)
class Bucket:
    """Tokens, decode steps and time (microseconds). Rates use the steps, so that a token without one is not counted."""

    count: int = 0
    steps: int = 0
    time_us: int = 0

    def add(self, count: int, steps: int, time_us: int) -> None:
        self.count += count
        self.steps += steps
        self.time_us += time_us

    @property
    def per_second(self) -> float:
        return self.steps / self.time_us * 1e6 if self.time_us else 0.0


def _times() -> Histogram:
    return Histogram(SECONDS)


@dataclass(slots=True)
class RequestMetrics:
    """How requests fare, each counted once however many completions it asks for; times in seconds.

    A request with a list of prompts or inputs counts as one for each. One that is cancelled is in those histograms
    whose moment it reached, and has no duration.

    All count from the moment at which a request is in the queue, its prompt tokenized.
    """

    #: Until it has a slot.
    queue: Histogram = field(default_factory=_times)
    #: Until its first token is sampled.
    first_token: Histogram = field(default_factory=_times)
    #: Between two tokens of the same completion; those accepted from one draft come at once.
    token_gap: Histogram = field(default_factory=_times)
    #: Until its last result.
    duration: Histogram = field(default_factory=_times)
    #: Length of the prompt, tokens.
    prompt: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    #: Share of the prompt that was not computed anew, 0 to 1.
    cached: Histogram = field(default_factory=lambda: Histogram(SHARES))
    #: Refused because the queue was full.
    n_refused: int = 0

    def copy(self) -> RequestMetrics:
        return RequestMetrics(
            queue=self.queue.copy(),
            first_token=self.first_token.copy(),
            token_gap=self.token_gap.copy(),
            duration=self.duration.copy(),
            prompt=self.prompt.copy(),
            cached=self.cached.copy(),
            n_refused=self.n_refused,
        )


@dataclass(slots=True)
class ServerMetrics:
    """Cumulative, save the two ``*_bucket`` fields, which cover the time since the last scrape."""

    #: Start of the process' serving, seconds of the Unix clock.
    t_start: float = field(default_factory=time.time)
    prompt: Bucket = field(default_factory=Bucket)
    predict: Bucket = field(default_factory=Bucket)
    prompt_bucket: Bucket = field(default_factory=Bucket)
    predict_bucket: Bucket = field(default_factory=Bucket)
    n_prompt_cached: int = 0
    n_tokens_max: int = 0
    n_decode: int = 0
    n_busy_slots: int = 0
    n_draft_tokens: int = 0
    n_draft_accepted: int = 0
    n_draft_verif_steps: int = 0
    n_accepted_per_pos: list[int] = field(default_factory=list)
    requests: RequestMetrics = field(default_factory=RequestMetrics)

    def add_prompt(self, n_tokens: int, time_us: int) -> None:
        self.prompt.add(n_tokens, n_tokens, time_us)
        self.prompt_bucket.add(n_tokens, n_tokens, time_us)

    def add_predict(self, n_tokens: int, n_steps: int, time_us: int) -> None:
        self.predict.add(n_tokens, n_steps, time_us)
        self.predict_bucket.add(n_tokens, n_steps, time_us)

    def add_accepted(self, per_position: list[int]) -> None:
        """Draft tokens accepted, by their place in the draft."""
        missing = len(per_position) - len(self.n_accepted_per_pos)
        self.n_accepted_per_pos += [0] * missing
        for position, count in enumerate(per_position):
            self.n_accepted_per_pos[position] += count

    def reset_bucket(self) -> None:
        self.prompt_bucket = Bucket()
        self.predict_bucket = Bucket()

    def copy(self) -> ServerMetrics:
        """A snapshot that later counting does not change."""
        return ServerMetrics(
            t_start=self.t_start,
            prompt=Bucket(self.prompt.count, self.prompt.steps, self.prompt.time_us),
            predict=Bucket(self.predict.count, self.predict.steps, self.predict.time_us),
            prompt_bucket=Bucket(self.prompt_bucket.count, self.prompt_bucket.steps, self.prompt_bucket.time_us),
            predict_bucket=Bucket(self.predict_bucket.count, self.predict_bucket.steps, self.predict_bucket.time_us),
            n_prompt_cached=self.n_prompt_cached,
            n_tokens_max=self.n_tokens_max,
            n_decode=self.n_decode,
            n_busy_slots=self.n_busy_slots,
            n_draft_tokens=self.n_draft_tokens,
            n_draft_accepted=self.n_draft_accepted,
            n_draft_verif_steps=self.n_draft_verif_steps,
            n_accepted_per_pos=list(self.n_accepted_per_pos),
            requests=self.requests.copy(),
        )
