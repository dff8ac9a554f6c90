"""docs/metrics.md names what /metrics has, and nothing else; the board of Grafana asks for nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import MODEL, Served, make_stats, png_url
from tests.vlmserve.server_process import ROOT
from vision.cache.stats import LinkStats
from vlmserve.api.metrics import ALIASES, ServerMetrics
from vlmserve.frontend.request_stats import MediaTotals, RequestStats, Timings
from vlmserve.ipc.control_messages import sum_stats
from vlmserve.ipc.messages import Guesses, HistogramStats, SchedulerStats, StepStats

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
BOARD = json.loads((ROOT / "configs" / "grafana" / "vlmserve.json").read_text(encoding="utf-8"))
ROWS = re.findall(r"^\| `(vlmserve:\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
PICTURE = {"type": "image_url", "image_url": {"url": png_url()}}


def families(text: str) -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each, by name."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        if not name.endswith("_created"):
            found[name] = (family.type, labels)
    return found


def test_the_page_has_every_metric_with_its_type_and_labels(client: TestClient, served: Served) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": [PICTURE]}], "max_tokens": 4}
    served.scheduler.encodes_pictures = True
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert client.post("/v1/chat/completions", json={}).status_code == 400
    linked = replace(stats(), encoder=replace(stats().encoder, link=LinkStats()))
    replicated = observed([0.0]).render(sum_stats([linked, linked]))
    shown = families(client.get("/metrics").text)
    shown |= {
        name: own
        for name, own in families(replicated.decode()).items()
        if {"replica", "position"} & own[1] or "encoder_link" in name
    }
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROWS} == shown
    assert len(ROWS) == len(shown)


def observed(clock: list[float], *prefixes: str) -> ServerMetrics:
    """Three answers: whole, aborted, timed out."""
    metrics = ServerMetrics("m", prefixes=prefixes, clock=lambda: clock[0])
    timings = Timings(
        prepare_s=0.5, first_token_s=2.0, total_s=4.0, queue_s=0.25, encode_s=1.0, encode_cached=True, prefill_s=0.25
    )
    for finish, status in (("stop", None), ("abort", None), ("error", 504)):
        metrics.observe_request(
            RequestStats(
                rid="r-0",
                finish=finish,
                status=status,
                prompt_tokens=10,
                cached_tokens=4,
                completion_tokens=5,
                timings=timings,
                media=MediaTotals(images=2, patches=96),
            )
        )
    metrics.observe_tokens(1, None)
    metrics.observe_tokens(2, 0.5)
    return metrics


def stats(generated: int = 0, queries: int = 0, hits: int = 0, guesses: int = 1) -> SchedulerStats:
    steps = StepStats(
        prefix_queries_total=queries,
        prefix_hits_total=hits,
        guesses=Guesses(steps=4 * guesses, tokens=10 * guesses, right_at=(3 * guesses, guesses)),
        step_tokens=HistogramStats(bounds=(1, 2), counts=(3, 1, 2), sum=25),
    )
    return replace(make_stats(num_running_reqs=3, num_waiting_reqs=2, generation_tokens_total=generated), steps=steps)


def values(metrics: ServerMetrics, now: SchedulerStats | None = None) -> dict[str, float]:
    """Sample with its labels but the model's -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(now or stats()).decode()):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def test_figures_of_answers() -> None:
    found = values(observed([0.0]))
    assert found["vlmserve:request_timeouts_total"] == 1
    assert found["vlmserve:media_total modality=image"] == 6
    assert found["vlmserve:media_patches_total"] == 3 * 96
    assert found["vlmserve:generation_tokens_total"] == 3
    assert (found["vlmserve:inter_token_latency_seconds_count"], found["vlmserve:inter_token_latency_seconds_sum"]) == (
        2,
        0.5,
    )
    assert found["vlmserve:request_queue_time_seconds_sum"] == 0.25, "of the whole answer only"
    assert found["vlmserve:request_encode_time_seconds_sum cached=true"] == 1.0
    assert found["vlmserve:request_fetch_time_seconds_count"] == 0
    assert [found[f"vlmserve:spec_decode_num_accepted_tokens_per_pos_total position={at}"] for at in (0, 1)] == [3, 1]
    assert found["vlmserve:spec_decode_num_accepted_tokens_total"] == 4
    assert [found[f"vlmserve:iteration_tokens_total_bucket le={le}"] for le in ("1.0", "2.0", "+Inf")] == [3, 4, 6]
    assert not any(name.startswith(("vllm:", "sglang:")) for name in found)


def test_figures_of_replicas() -> None:
    whole = sum_stats([stats(generated=10 * n) for n in range(2)])
    found = values(observed([0.0]), whole)
    assert found["vlmserve:num_requests_running"] == 6
    for replica in "01":
        assert found[f"vlmserve:replica_requests_running replica={replica}"] == 3
        assert found[f"vlmserve:replica_generation_tokens_total replica={replica}"] == 10 * int(replica)
    assert not any("replica" in name for name in values(observed([0.0])))


def test_vllms_names_have_the_same_figures() -> None:
    found = values(observed([0.0], "vllm"))
    checked = 0
    for name, value in found.items():
        theirs = name.replace("vlmserve:", "vllm:")
        sample, *labels = theirs.split(" ")
        theirs = " ".join([sample, *sorted([*labels, "engine=0"])])
        if name.startswith("vlmserve:") and theirs in found and not sample.endswith("_created"):
            assert found[theirs] == value
            checked += 1
    assert checked > 100
    for name in ("num_requests_running", "kv_cache_usage_perc", "prompt_tokens_total", "num_preemptions_total"):
        assert f"vllm:{name} engine=0" in found
    assert found["vllm:request_success_total engine=0 finished_reason=stop"] == 1
    assert found["vllm:time_per_output_token_seconds_count engine=0"] == 2
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total engine=0 position=1"] == 1


def test_sglangs_names() -> None:
    clock = [100.0]
    metrics = observed(clock, "sglang")
    found = values(metrics, stats(generated=50, queries=10, hits=10))
    assert (found["sglang:num_running_reqs"], found["sglang:num_queue_reqs"]) == (3, 2)
    assert (found["sglang:token_usage"], found["sglang:num_used_tokens"]) == (0.3, 30)
    assert (found["sglang:num_requests_total"], found["sglang:num_aborted_requests_total"]) == (3, 1)
    assert found["sglang:cached_tokens_total"] == 12
    assert (found["sglang:gen_throughput"], found["sglang:cache_hit_rate"]) == (0, 0), "nothing to compare with yet"
    assert found["sglang:spec_accept_length"] == 0
    clock[0] += 10.0
    found = values(metrics, stats(generated=150, queries=30, hits=15, guesses=3))
    assert (found["sglang:gen_throughput"], found["sglang:cache_hit_rate"]) == (10.0, 0.25)
    assert found["sglang:spec_accept_length"] == 2.0
    clock[0] += 1.0  # somebody else asks just after
    assert values(metrics, stats(generated=161, queries=30, hits=15))["sglang:gen_throughput"] == 111 / 11


def test_the_page_lists_other_engines_names() -> None:
    listed = set(re.findall(r"^\| `((?:vllm|sglang):\w+)`", PAGE, re.MULTILINE))
    computed = {"sglang:gen_throughput", "sglang:cache_hit_rate", "sglang:spec_accept_length"}
    assert listed == {f"{prefix}:{name}" for prefix, names in ALIASES.items() for name in names} | computed


SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def test_queries_are_of_metrics_that_there_are() -> None:
    """Of the page and of the board."""
    known = {
        name + suffix: {"model_name", "le", *re.findall(r"`(\w+)`", labels)}
        for name, kind, labels in ROWS
        for suffix in SUFFIXES[kind]
    }
    queries = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
    assert len(queries) == 1
    queries += [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"vlmserve:\w+", query)}
    assert len(asked) > 30
    assert asked <= known.keys()
    for query in queries:
        for name, filters in re.findall(r"(vlmserve:\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~?\"", filters)) <= known[name]
        assert query.count("(") == query.count(")")
