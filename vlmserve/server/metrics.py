"""Prometheus figures: plain statistics in (`RequestStats`, `SchedulerStats`), text format out."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vlmserve.messages import SchedulerStats
from vlmserve.tokenizer.tokenizer_manager import RequestStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PREFIX = "vlmserve:"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# name -> what it is, and where `SchedulerStats` has it
_GAUGES = {
    "num_requests_running": ("Requests being computed", "num_running_reqs"),
    "num_requests_waiting": ("Requests waiting to be computed", "num_waiting_reqs"),
    "num_warmups": ("Requests to encode media ahead of time", "num_warmups"),
    "kv_cache_tokens": ("KV cache slots in all", "kv_total_tokens"),
    "kv_cache_free_tokens": ("KV cache slots that hold nothing", "kv_free_tokens"),
    "kv_cache_reusable_tokens": ("KV cache slots of cached prefixes", "kv_cached_tokens"),
    "encoder_queued": ("Pictures and temporal patches of videos that wait to be encoded", "encoder.queued"),
    "encoder_under_way": ("Pictures and temporal patches being encoded, or read from disk", "encoder.under_way"),
}
_COUNTERS = {
    "forward_steps": ("Steps of the model", "forward_steps_total"),
    "retracted_requests": ("Requests taken back when KV slots ran out", "retracted_total"),
    "temporal_patches_encoded": (
        "Pictures and temporal patches of videos computed by the vision tower",
        "encoder.encoded",
    ),
    "vision_patches_encoded": ("Patches computed by the vision tower", "encoder.patches_encoded"),
    "encoder_coalesced": (
        "Pictures and temporal patches that came while an equal one was in work",
        "encoder.coalesced",
    ),
    "encoder_retried": ("Pictures and temporal patches encoded again after a failure", "encoder.retried"),
    "encoder_failed": ("Pictures and temporal patches given up", "encoder.failed"),
    "embedding_cache_saved": ("Embeddings written to disk", "encoder.saved"),
    "embedding_cache_save_failures": ("Embeddings that could not be written to disk", "encoder.save_failures"),
}
_TIER_GAUGES = {
    "embedding_cache_bytes": ("Bytes of embeddings in a tier", "bytes"),
    "embedding_cache_held_bytes": ("Bytes of embeddings that requests need now", "held_bytes"),
    "embedding_cache_entries": ("Pictures and temporal patches in a tier", "entries"),
}
_TIER_COUNTERS = {
    "embedding_cache_hits": ("Look-ups that found embeddings in a tier", "hits"),
    "embedding_cache_misses": ("Look-ups in a tier that did not", "misses"),
    "embedding_cache_evictions": ("Embeddings that gave way to others", "evictions"),
}


class ServerMetrics:
    """The figures of one server, in a registry of its own. model_name is a label of every figure."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._scheduler = _SchedulerCollector(model_name)
        self._registry.register(self._scheduler)
        label = {"model_name": model_name}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(_PREFIX + name, text, ("model_name",), registry=self._registry, buckets=buckets)
            return family.labels(**label)

        self._label = label
        self._http = counter("http_requests", "HTTP requests by path and status", "path", "status")
        self._finished = counter("requests_finished", "Answers by how they ended", "finish_reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests").labels(**label)
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache").labels(**label)
        self._generation_tokens = counter("generation_tokens", "Tokens generated").labels(**label)
        self._ttft = histogram("time_to_first_token_seconds", "Until the first output", _SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "Until the whole answer", _SECONDS)
        self._tpot = histogram("time_per_output_token_seconds", "Mean between tokens of an answer", _SECONDS_PER_TOKEN)

    def observe_request(self, stats: RequestStats) -> None:
        """An answer has ended."""
        self._finished.labels(**self._label, finish_reason=stats.finish).inc()
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._cached_tokens.inc(stats.cached_tokens)
        self._generation_tokens.inc(stats.completion_tokens)
        if stats.ttft_s is not None:
            self._ttft.observe(stats.ttft_s)
        if stats.finish in ("stop", "length"):
            self._e2e.observe(stats.e2e_s)
            if stats.seconds_per_output_token is not None:
                self._tpot.observe(stats.seconds_per_output_token)

    def observe_http(self, path: str, status: int) -> None:
        """An HTTP request was answered. path: the route's, not the client's: there are only so many of them."""
        self._http.labels(**self._label, path=path, status=str(status)).inc()

    def render(self, scheduler: SchedulerStats | None) -> bytes:
        """Everything in the Prometheus text format; without the scheduler's part where it did not answer."""
        self._scheduler.stats = scheduler
        return generate_latest(self._registry)


class _SchedulerCollector(Collector):
    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: SchedulerStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        used = stats.kv_total_tokens - stats.kv_free_tokens - stats.kv_cached_tokens
        usage = GaugeMetricFamily(_PREFIX + "kv_cache_usage", "Part of the KV cache in use", labels=("model_name",))
        usage.add_metric((self._model_name,), used / max(1, stats.kv_total_tokens))
        yield usage
        for family, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, where) in figures.items():
                metric = family(_PREFIX + name, text, labels=("model_name",))
                metric.add_metric((self._model_name,), attrgetter(where)(stats))
                yield metric
        tiers = {"device": stats.encoder.device, "host": stats.encoder.host, "disk": stats.encoder.disk}
        for family, figures in ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS)):
            for name, (text, where) in figures.items():
                metric = family(_PREFIX + name, text, labels=("model_name", "tier"))
                for tier, tier_stats in tiers.items():
                    if tier_stats is not None:
                        metric.add_metric((self._model_name, tier), getattr(tier_stats, where))
                yield metric
