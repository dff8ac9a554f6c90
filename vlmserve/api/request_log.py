"""A line for each answer, with `--log-requests`: how long it was, and where its time went. No contents."""

from __future__ import annotations

import logging

from vlmserve.frontend.request_stats import RequestStats

requests = logging.getLogger("vlmserve.requests")
_STAGES = ("fetch", "preprocess", "encode", "queue", "prefill", "decode")


def log_request(stats: RequestStats) -> None:
    """An answer has ended."""
    requests.info("%s", describe(stats))


def describe(stats: RequestStats) -> str:
    """The line."""
    timings, media = stats.timings, stats.media
    counts = [f"{stats.prompt_tokens} prompt tokens ({stats.cached_tokens} cached)"] if stats.prompt_tokens else []
    counts += [f"{count} {word}" for count, word in ((media.images, "pictures"), (media.videos, "videos")) if count]
    counts.append(f"{stats.completion_tokens} tokens")
    if timings.retractions:
        counts.append(f"retracted {timings.retractions} times")
    stages = []
    for name in _STAGES:
        seconds = getattr(timings, f"{name}_s")
        if seconds is not None:
            found = " (cached)" if name == "encode" and timings.encode_cached else ""
            stages.append(f"{name} {seconds:.3f}{found}")
    stages.append(f"total {timings.total_s:.3f} s")
    status = "" if stats.status is None else f" {stats.status}"
    return f"{stats.rid} {stats.finish}{status}: {', '.join(counts)}; {', '.join(stages)}"
