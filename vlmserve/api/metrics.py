"""Prometheus figures: plain statistics (`RequestStats`, `SchedulerStats`) become the text format.

Names are vLLM's if the figure means the same, behind our own prefix (docs/metrics.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from vlmserve.api.metric_aliases import Aliases
from vlmserve.api.scheduler_metrics import PREFIX, SchedulerCollector
from vlmserve.frontend.request_stats import RequestStats
from vlmserve.ipc.messages import SchedulerStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
# From a text request on a GPU to a video on a CPU.
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)
_SECONDS_PER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_TIMEOUTS = (408, 504)
# the stages of `Timings`, except encode
_STAGES = {
    "queue": "Ready to be computed, and waiting for it",
    "fetch": "Until the last of a request's media was fetched",
    "preprocess": "From then on, until all were decoded and resized",
    "prefill": "From the first chunk of a prompt to the first token",
    "decode": "From the first token to the last",
}


class ServerMetrics:
    """The figures of one server, in a registry of its own. Every figure has the label model_name.

    prefixes: engines whose names the figures have as well ("vllm", "sglang"). clock: in seconds.
    """

    def __init__(
        self, model_name: str, *, prefixes: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = CollectorRegistry()
        self._scheduler = SchedulerCollector(model_name)
        self._registry.register(self._scheduler)
        self._aliases = Aliases(prefixes, model_name, clock=clock)
        label = {"model_name": model_name}

        def counter(name: str, text: str, *labels: str) -> Counter:
            family = Counter(PREFIX + name, text, ("model_name", *labels), registry=self._registry)
            return family if labels else family.labels(**label)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            names = ("model_name", *labels)
            family = Histogram(PREFIX + name, text, names, registry=self._registry, buckets=buckets)
            return family if labels else family.labels(**label)

        self._label = label
        self._http = counter("http_requests", "HTTP requests by path and status", "path", "status")
        self._refused = counter("requests_refused", "Requests that were turned away", "reason")
        self._finished = counter("request_success", "Answers by how they ended", "finished_reason")
        self._timeouts = counter("request_timeouts", "Answers that took too long")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._media = counter("media", "Pictures and videos of requests", "modality")
        self._patches = counter("media_patches", "Vision patches of requests, cached or not")
        self._ttft = histogram("time_to_first_token_seconds", "Until the first output", _SECONDS)
        self._itl = histogram("inter_token_latency_seconds", "Between tokens", _SECONDS_PER_TOKEN)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean between tokens of an answer", _SECONDS_PER_TOKEN
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Until the whole answer", _SECONDS)
        self._stages = {
            name: histogram(f"request_{name}_time_seconds", text, _SECONDS) for name, text in _STAGES.items()
        }
        self._encode = histogram(
            "request_encode_time_seconds", "Until a request's embeddings were there", _SECONDS, "cached"
        )
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._answer_lengths = histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)

    def observe_request(self, stats: RequestStats) -> None:
        """Count an answer that has ended."""
        self._finished.labels(**self._label, finished_reason=stats.finish).inc()
        if stats.status in _TIMEOUTS:
            self._timeouts.inc()
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._cached_tokens.inc(stats.cached_tokens)
        self._count_media(stats)
        timings = stats.timings
        if timings.first_token_s is not None:
            self._ttft.observe(timings.first_token_s)
        if stats.finish not in ("stop", "length"):
            return
        self._e2e.observe(timings.total_s)
        if stats.prompt_tokens:
            self._prompt_lengths.observe(stats.prompt_tokens)
        self._answer_lengths.observe(stats.completion_tokens)
        if stats.seconds_per_output_token is not None:
            self._tpot.observe(stats.seconds_per_output_token)
        for name, stage in self._stages.items():
            seconds = getattr(timings, f"{name}_s")
            if seconds is not None:
                stage.observe(seconds)
        if timings.encode_s is not None:
            self._encode.labels(**self._label, cached=str(bool(timings.encode_cached)).lower()).observe(
                timings.encode_s
            )

    def observe_tokens(self, count: int, gap_s: float | None) -> None:
        """Count new tokens of an answer. gap_s: seconds since the tokens before; None for the first."""
        self._generation_tokens.inc(count)
        if gap_s is not None:
            for _ in range(count):
                self._itl.observe(gap_s / count)

    def observe_http(self, path: str, status: int) -> None:
        """Count an answered HTTP request. path: the route's path, since clients can make up any number of paths."""
        self._http.labels(**self._label, path=path, status=str(status)).inc()

    def observe_refusal(self, reason: str) -> None:
        """Count an HTTP request that was turned away. reason: the code of its error."""
        self._refused.labels(**self._label, reason=reason).inc()

    def render(self, scheduler: SchedulerStats | None) -> bytes:
        """Return all figures in the Prometheus text format, without the scheduler's if it did not answer."""
        self._scheduler.stats = scheduler
        ours = list(self._registry.collect())
        return generate_latest(_Collected([*ours, *self._aliases.of(ours, scheduler)]))

    def _count_media(self, stats: RequestStats) -> None:
        for modality, count in (("image", stats.media.images), ("video", stats.media.videos)):
            if count:
                self._media.labels(**self._label, modality=modality).inc(count)
        self._patches.inc(stats.media.patches)


class _Collected(Collector):
    """Families that were collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)
