"""The scheduler's plain figures as Prometheus families."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vlmserve.messages import HistogramStats, SchedulerStats

PREFIX = "vlmserve:"
# name -> what it is, and where `SchedulerStats` has it
_GAUGES = {
    "num_requests_running": ("Requests being computed", "num_running_reqs"),
    "num_requests_waiting": ("Requests waiting to be computed", "num_waiting_reqs"),
    "num_requests_encoding": ("Requests that wait for the vision encoder", "steps.encoding_reqs"),
    "num_warmups": ("Requests to encode media ahead of time", "num_warmups"),
    "kv_cache_tokens": ("KV cache slots in all", "kv_total_tokens"),
    "kv_cache_free_tokens": ("KV cache slots that hold nothing", "kv_free_tokens"),
    "kv_cache_reusable_tokens": ("KV cache slots of cached prefixes", "kv_cached_tokens"),
    "expert_imbalance": (
        "What the busiest ranks of --ep-size had to do before experts were placed anew, in times of the mean",
        "experts.imbalance",
    ),
    "expert_imbalance_after": ("What it would have been with the new placement", "experts.imbalance_after"),
    "encoder_queued": ("Pictures and temporal patches of videos that wait to be encoded", "encoder.queued"),
    "encoder_under_way": ("Pictures and temporal patches being encoded, or read from disk", "encoder.under_way"),
}
_COUNTERS = {
    "forward_steps": ("Steps of the model", "forward_steps_total"),
    "num_preemptions": ("Requests whose KV slots were taken back", "steps.preempted_total"),
    "retracted_requests": ("Running requests taken back when KV slots ran out", "retracted_total"),
    "prefix_cache_queries": ("Tokens of prompts looked up in the prefix cache", "steps.prefix_queries_total"),
    "prefix_cache_hits": ("Tokens of prompts found in the prefix cache", "steps.prefix_hits_total"),
    "spec_decode_num_draft_tokens": ("Tokens of answers that were guessed", "steps.draft_tokens_total"),
    "spec_decode_num_accepted_tokens": ("Guessed tokens that were right", "steps.accepted_tokens_total"),
    "expert_rebalances": ("Times that experts were placed anew", "experts.rebalances_total"),
    "experts_moved": ("Experts that got another place", "experts.moved_total"),
    "prompt_tokens_computed": ("Tokens of prompts that were computed", "steps.prompt_tokens_computed_total"),
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
_HISTOGRAMS = {
    "iteration_tokens_total": ("Tokens of a step of the model", "steps.step_tokens"),
    "iteration_requests": ("Requests in a step of the model", "steps.step_reqs"),
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


class SchedulerCollector(Collector):
    """Shows `stats`, or nothing where there are none."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: SchedulerStats | None = None

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        stats = self.stats
        if stats is None:
            return
        labels = (self._model_name,)
        used = stats.kv_total_tokens - stats.kv_free_tokens - stats.kv_cached_tokens
        for name, text, value in (
            ("kv_cache_used_tokens", "KV cache slots of requests", float(used)),
            ("kv_cache_usage_perc", "Part of the KV cache in use", used / max(1, stats.kv_total_tokens)),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
            gauge.add_metric(labels, value)
            yield gauge
        for family, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (text, where) in figures.items():
                metric = family(PREFIX + name, text, labels=("model_name",))
                metric.add_metric(labels, attrgetter(where)(stats))
                yield metric
        for name, (text, where) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
            values: HistogramStats = attrgetter(where)(stats)
            histogram.add_metric(labels, _buckets(values), values.sum)
            yield histogram
        yield from self._tiers(stats)

    def _tiers(self, stats: SchedulerStats) -> Iterator[Metric]:
        tiers = {"device": stats.encoder.device, "host": stats.encoder.host, "disk": stats.encoder.disk}
        for family, figures in ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS)):
            for name, (text, where) in figures.items():
                metric = family(PREFIX + name, text, labels=("model_name", "tier"))
                for tier, tier_stats in tiers.items():
                    if tier_stats is not None:
                        metric.add_metric((self._model_name, tier), getattr(tier_stats, where))
                yield metric


def _buckets(stats: HistogramStats) -> list[tuple[str, float]]:
    """As Prometheus has them: each counts all values up to its bound."""
    bounds = [*(str(float(bound)) for bound in stats.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, stats.counts)), strict=True))
