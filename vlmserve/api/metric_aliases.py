"""Our figures under the names of vLLM's and SGLang's dashboards (`--metrics-prefixes`).

A name is here only if the figure means the same there. Its value is made of our own families at that moment, so the two
cannot differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from vlmserve.api.scheduler_metrics import PREFIX
from vlmserve.ipc.messages import SchedulerStats

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
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
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
    """Makes the families under other names. prefixes: of `ALIASES`. clock: in seconds, for SGLang's two rates."""

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
            throughput, hit_rate = self._recent.rates(scheduler)
            for name, text, value in (
                ("gen_throughput", "Tokens generated a second, of late", throughput),
                ("cache_hit_rate", "Part of prompts found in the prefix cache, of late", hit_rate),
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

    def rates(self, now: SchedulerStats) -> tuple[float, float]:
        """Return the tokens generated a second, and the cached part of prompts; 0 while nothing is known."""
        at = self._clock()
        if not self._marks or at - self._marks[-1][0] >= _WINDOW_S:
            self._marks = [*self._marks[-1:], (at, now)]
        since, before = self._marks[0]
        queries = now.steps.prefix_queries_total - before.steps.prefix_queries_total
        hits = now.steps.prefix_hits_total - before.steps.prefix_hits_total
        generated = now.generation_tokens_total - before.generation_tokens_total
        return generated / (at - since) if at > since else 0.0, hits / queries if queries else 0.0
