"""Prometheus figures: plain statistics (`RequestStats`, `SchedulerStats`) become the text format.

Names are vLLM's if the figure means the same, behind our own prefix (docs/metrics.md).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vlmserve.frontend.request_stats import RequestStats
from vlmserve.ipc.messages import HistogramStats, SchedulerStats

_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class _Alias:
    """Another name of a family. ours: our name, without prefix and `_total`. only: the `finished_reason` to take. over:
    the label to sum over."""

    ours: str
    only: str | None = None
    over: bool = False


_LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
_SAME_IN_VLLM = (
    *_LATENCIES,
    *("num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
    *("request_success", "request_time_per_output_token_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "iteration_tokens_total"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos",
)
ALIASES: Mapping[str, Mapping[str, _Alias]] = {
    "vllm": {
        **{name: _Alias(name) for name in _SAME_IN_VLLM},
        # the names before these
        "gpu_cache_usage_perc": _Alias("kv_cache_usage_perc"),
        "time_per_output_token_seconds": _Alias("inter_token_latency_seconds"),
    },
    "sglang": {
        **{name: _Alias(name) for name in (*_LATENCIES, "prompt_tokens", "generation_tokens")},
        "time_per_output_token_seconds": _Alias("inter_token_latency_seconds"),  # before that
        "queue_time_seconds": _Alias("request_queue_time_seconds"),
        "num_running_reqs": _Alias("num_requests_running"),
        "num_prefill_inflight_queue_reqs": _Alias("num_prefill_inflight_queue_reqs"),
        "num_decode_transfer_queue_reqs": _Alias("num_decode_transfer_queue_reqs"),
        "num_queue_reqs": _Alias("num_requests_waiting"),
        "token_usage": _Alias("kv_cache_usage_perc"),
        "num_used_tokens": _Alias("kv_cache_used_tokens"),
        "max_total_num_tokens": _Alias("kv_cache_tokens"),
        "cached_tokens": _Alias("prompt_tokens_cached"),
        "num_requests": _Alias("request_success", over=True),
        "num_aborted_requests": _Alias("request_success", only="abort"),
    },
}
_LABELS: Mapping[str, Mapping[str, str]] = {"vllm": {"engine": "0"}, "sglang": {}}


class Aliases:
    """Makes the families under other names. prefixes: of `ALIASES`. clock: in seconds, for SGLang's three rates."""

    def __init__(self, prefixes: Sequence[str], model_name: str, *, clock: Callable[[], float]) -> None:
        self._prefixes = prefixes
        self._model_name = model_name
        self._recent = _Recent(clock)

    def of(self, ours: Sequence[Metric], scheduler: SchedulerStats | None) -> Iterator[Metric]:
        """Return the families under other names, made of all our own."""
        known = {metric.name.removeprefix(PREFIX): metric for metric in ours}
        for prefix in self._prefixes:
            for name, alias in ALIASES[prefix].items():
                if alias.ours in known:
                    yield _renamed(known[alias.ours], f"{prefix}:{name}", alias, _LABELS[prefix])
        if "sglang" in self._prefixes and scheduler is not None:
            throughput, hit_rate, accept_length = self._recent.rates(scheduler)
            for name, text, value in (
                ("gen_throughput", "Tokens generated a second, of late", throughput),
                ("cache_hit_rate", "Part of prompts found in the prefix cache, of late", hit_rate),
                ("spec_accept_length", "Tokens of a step with guesses, of late", accept_length),
            ):
                gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=("model_name",))
                gauge.add_metric((self._model_name,), value)
                yield gauge


def _renamed(metric: Metric, name: str, alias: _Alias, labels: Mapping[str, str]) -> Metric:
    new = Metric(name, metric.documentation, metric.type)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        its = {**sample.labels, **labels}
        if alias.over or alias.only is not None:
            reason = its.pop("finished_reason")
            if suffix == "_created" or (alias.only is not None and reason != alias.only):
                continue
        values[name + suffix, tuple(its.items())] += sample.value
    for (sample_name, its_labels), value in values.items():
        new.add_sample(sample_name, dict(its_labels), value)
    return new


class _Recent:
    """Rates since the last scrape, or since the one before if the last one was just now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: list[tuple[float, SchedulerStats]] = []

    def rates(self, now: SchedulerStats) -> tuple[float, float, float]:
        """Return the tokens generated a second, the cached part of prompts, and the mean tokens of a step with guesses;
        0 while nothing is known."""
        at = self._clock()
        if not self._marks or at - self._marks[-1][0] >= _WINDOW_S:
            self._marks = [*self._marks[-1:], (at, now)]
        since, before = self._marks[0]
        queries = now.steps.prefix_queries_total - before.steps.prefix_queries_total
        hits = now.steps.prefix_hits_total - before.steps.prefix_hits_total
        generated = now.generation_tokens_total - before.generation_tokens_total
        guesses = now.steps.guesses.plus(before.steps.guesses, -1)
        throughput = generated / (at - since) if at > since else 0.0
        return throughput, hits / queries if queries else 0.0, guesses.accept_length


PREFIX = "vlmserve:"
LONGEST_TURN = "api_longest_turn_seconds"
# name -> its meaning, and its place in `SchedulerStats`
_GAUGES = {
    "num_requests_running": ("Requests being computed", "num_running_reqs"),
    "num_requests_waiting": ("Requests waiting to be computed", "num_waiting_reqs"),
    "num_requests_encoding": ("Requests that wait for the vision encoder", "steps.encoding_reqs"),
    "num_warmups": ("Requests to encode media ahead of time", "num_warmups"),
    "num_prefill_inflight_queue_reqs": ("Prompts whose KV a decode server may still read", "handover.inflight"),
    "num_decode_transfer_queue_reqs": ("Requests whose KV a prefill server is to bring", "handover.transferring"),
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
    "encode_seconds": ("Seconds of the model's thread for encoding", "steps.encode_seconds_total"),
    "prefill_seconds": ("Seconds of the model's thread for prompts", "steps.prefill_seconds_total"),
    "decode_seconds": ("Seconds of the model's thread for answers", "steps.decode_seconds_total"),
    "decode_steps": ("Steps of the model that made tokens of answers", "steps.decode_steps_total"),
    "decode_requests": ("Requests in these steps, step by step", "steps.decode_reqs_total"),
    "num_preemptions": ("Requests whose KV slots were taken back", "steps.preempted_total"),
    "retracted_requests": ("Running requests taken back when KV slots ran out", "retracted_total"),
    "prefix_cache_queries": ("Tokens of prompts looked up in the prefix cache", "steps.prefix_queries_total"),
    "prefix_cache_hits": ("Tokens of prompts found in the prefix cache", "steps.prefix_hits_total"),
    "spec_decode_num_drafts": ("Times that next tokens of an answer were guessed", "steps.guesses.steps"),
    "spec_decode_num_draft_tokens": ("Tokens of answers that were guessed", "steps.guesses.tokens"),
    "spec_decode_num_accepted_tokens": ("Guessed tokens that were right", "steps.guesses.right"),
    "expert_rebalances": ("Times that experts were placed anew", "experts.rebalances_total"),
    "remote_prompts": ("Prompts that a prefill server computed", "handover.prompts_total"),
    "remote_prompt_tokens": ("Tokens of prompts whose KV came from a prefill server", "handover.tokens_total"),
    "remote_prompts_failed": ("Prompts computed here as no prefill server did", "handover.failed_total"),
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

# with --encoder-urls, or of an encoder for these
_LINK_GAUGES = {
    "encoder_links": ("Usable links to encoders on other servers, or to their consumers", "links"),
    "encoder_link_requests": ("Pictures and temporal patches asked for over links, and not there yet", "open"),
}
_LINK_COUNTERS = {
    "encoder_link_queries": ("Pictures and temporal patches asked for over links", "asked"),
    "encoder_link_misses": ("Those whose pixels were sent, since no cache had their embeddings", "pixels"),
    "encoder_link_received": ("Those whose embeddings came over links", "rows"),
    "encoder_link_fallbacks": ("Those encoded at home after all", "home"),
    "encoder_link_timeouts": ("Those that took longer than --encoder-peer-timeout-s", "late"),
    "encoder_link_sent_bytes": ("Bytes sent over links", "sent_bytes"),
    "encoder_link_received_bytes": ("Bytes received over links", "received_bytes"),
}

# for each of several replicas; all other figures are sums
_REPLICA_GAUGES = {
    "replica_requests_running": ("Requests being computed by a replica", "num_running_reqs"),
    "replica_requests_waiting": ("Requests waiting at a replica", "num_waiting_reqs"),
    "replica_kv_cache_free_tokens": ("KV cache slots of a replica that hold nothing", "kv_free_tokens"),
}
_REPLICA_COUNTERS = {
    "replica_prompt_tokens": ("Prompt tokens of a replica's requests", "prompt_tokens_total"),
    "replica_prompt_tokens_cached": ("Prompt tokens found in a replica's prefix cache", "cached_tokens_total"),
    "replica_generation_tokens": ("Tokens generated by a replica", "generation_tokens_total"),
}


class SchedulerCollector(Collector):
    """Shows `stats`, or nothing if there are none."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: SchedulerStats | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the scheduler's figures."""
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
        whole = [(labels, stats)]
        encoder = {"device": stats.encoder.device, "host": stats.encoder.host, "disk": stats.encoder.disk}
        tiers = [((*labels, name), tier) for name, tier in encoder.items() if tier is not None]
        replicas = [((*labels, str(number)), one) for number, one in enumerate(stats.replicas)]
        yield from _families(_GAUGES, _COUNTERS, whole)
        yield from _families(_TIER_GAUGES, _TIER_COUNTERS, tiers, "tier")
        if stats.encoder.link is not None:
            yield from _families(_LINK_GAUGES, _LINK_COUNTERS, [(labels, stats.encoder.link)])
        if replicas:
            yield from _families(_REPLICA_GAUGES, _REPLICA_COUNTERS, replicas, "replica")
        right = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place among those of a step",
            labels=("model_name", "position"),
        )
        for position, count in enumerate(stats.steps.guesses.right_at):
            right.add_metric((*labels, str(position)), count)
        yield right
        for name, (text, where) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
            values: HistogramStats = attrgetter(where)(stats)
            histogram.add_metric(labels, _buckets(values), values.sum)
            yield histogram


_Figures: TypeAlias = Mapping[str, tuple[str, str]]


def _families(
    gauges: _Figures, counters: _Figures, labelled: Sequence[tuple[tuple[str, ...], object]], *more: str
) -> Iterator[Metric]:
    """Yield the families of some figures. labelled: where they come from, each with its values of the labels. more: the
    labels besides the model's."""
    for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (text, where) in figures.items():
            metric = family(PREFIX + name, text, labels=("model_name", *more))
            for labels, stats in labelled:
                metric.add_metric(labels, attrgetter(where)(stats))
            yield metric


def _buckets(stats: HistogramStats) -> list[tuple[str, float]]:
    """Return the buckets of Prometheus: each counts all values up to its bound."""
    bounds = [*(str(float(bound)) for bound in stats.bounds), "+Inf"]
    return list(zip(bounds, accumulate(map(float, stats.counts)), strict=True))


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

    prefixes: engines whose names the figures have as well ("vllm", "sglang"). clock: in seconds. longest_turn_s: of the
    event loop.
    """

    def __init__(
        self,
        model_name: str,
        *,
        prefixes: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        longest_turn_s: Callable[[], float] = lambda: 0.0,
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
        self._pruned = counter("media_tokens_left_out", "Tokens that left pictures and videos of requests, if asked")
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
        self.watch(LONGEST_TURN, "The event loop's longest turn of late", longest_turn_s)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show a figure, which is read whenever the page is asked for."""
        gauge = Gauge(PREFIX + name, text, self._label, registry=self._registry)
        gauge.labels(**self._label).set_function(value)

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
        self._pruned.inc(stats.media.pruned_tokens)


class _Collected(Collector):
    """Families that were collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)
