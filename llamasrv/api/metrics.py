"""GET /metrics, in the text format 0.0.4 of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from llamasrv.engine.histogram import Histogram
from llamasrv.engine.result import MetricsResult

CONTENT_TYPE = "text/plain; version=0.0.4"
#: Header that names the start of the server, seconds of the Unix clock.
START_HEADER = "Process-Start-Time-Unix"

_PREFIX = "llamacpp:"
#: Of what llama-server does not have: readers of its metrics meet no names and types that they do not know.
_OWN_PREFIX = "llamasrv:"
#: A counter whose name lacks the ending that the library's counters must have.
_TOKENS_MAX = _PREFIX + "n_tokens_max"


def metrics_text(result: MetricsResult) -> bytes:
    """All metrics: those of the original, with its names and types, and after them our own."""
    text = generate_latest(_Snapshot(result))
    return text.replace(f"# TYPE {_TOKENS_MAX} gauge\n".encode(), f"# TYPE {_TOKENS_MAX} counter\n".encode())


def start_time(result: MetricsResult) -> str:
    """Value of ``START_HEADER``."""
    return str(int(result.metrics.t_start))


class _Snapshot(Collector):
    def __init__(self, result: MetricsResult) -> None:
        self._result = result

    def collect(self) -> Iterator[Metric]:
        metrics = self._result.metrics
        counter, gauge = _counter, _gauge
        yield counter(
            "prompt_tokens", "Number of prompt tokens processed, excluding cached tokens", metrics.prompt.count
        )
        yield counter("prompt_tokens_cached", "Number of prompt tokens reused from the cache", metrics.n_prompt_cached)
        yield counter("prompt_seconds", "Total time spent processing prompts", metrics.prompt.time_us / 1e6)
        yield counter("tokens_predicted", "Number of generation tokens processed", metrics.predict.count)
        yield counter("tokens_predicted_seconds", "Total time spent generating tokens", metrics.predict.time_us / 1e6)
        yield counter(
            "n_decode",
            "Total number of llama_decode() calls, excluding speculative decoding and multimodal decoding",
            metrics.n_decode,
        )
        yield gauge("n_tokens_max", "Largest observed sequence length (prompt + generation)", metrics.n_tokens_max)
        yield counter(
            "spec_decode_num_draft_tokens", "Speculative: Total draft tokens generated", metrics.n_draft_tokens
        )
        yield counter(
            "spec_decode_num_accepted_tokens",
            "Speculative: Total draft tokens accepted by the target model",
            metrics.n_draft_accepted,
        )
        yield counter(
            "spec_decode_num_drafts",
            "Speculative: Total speculative decoding verification steps",
            metrics.n_draft_verif_steps,
        )
        yield gauge("prompt_tokens_seconds", "Average prompt throughput in tokens/s", metrics.prompt_bucket.per_second)
        yield gauge(
            "predicted_tokens_seconds", "Average generation throughput in tokens/s", metrics.predict_bucket.per_second
        )
        yield gauge("requests_processing", "Number of requests processing", self._result.n_processing_slots)
        yield gauge("requests_deferred", "Number of requests deferred", self._result.n_tasks_deferred)
        yield gauge(
            "n_busy_slots_per_decode",
            "Average number of busy slots per llama_decode() call",
            metrics.n_busy_slots / max(metrics.n_decode, 1),
        )
        if metrics.n_accepted_per_pos:
            family = CounterMetricFamily(
                _PREFIX + "spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens per draft position",
                labels=["position"],
            )
            for position, count in enumerate(metrics.n_accepted_per_pos):
                family.add_metric([str(position)], count)
            yield family
        requests = metrics.requests
        for name, text, histogram in (
            ("request_queue_seconds", "Time from a request's arrival in the queue to its start", requests.queue),
            ("time_to_first_token_seconds", "Time from a request's arrival to its first token", requests.first_token),
            ("time_between_tokens_seconds", "Time between two tokens of a completion", requests.token_gap),
            ("request_duration_seconds", "Time from a request's arrival to its last result", requests.duration),
            ("request_prompt_tokens", "Length of a request's prompt in tokens", requests.prompt),
            ("request_cached_share", "Share of a request's prompt that was reused, 0 to 1", requests.cached),
        ):
            yield _histogram(name, text, histogram)
        yield CounterMetricFamily(
            _OWN_PREFIX + "requests_refused",
            "Number of requests refused because the queue was full",
            value=requests.n_refused,
        )


def _counter(name: str, text: str, value: float) -> Metric:
    """The library adds ``_total`` to the name."""
    return CounterMetricFamily(_PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
    return HistogramMetricFamily(_OWN_PREFIX + name, text, buckets=buckets, sum_value=histogram.sum)
