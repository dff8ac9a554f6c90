"""A server that runs already, under load: throughput, and percentiles of what each request waits for.

Any server of OpenAI's API will do that takes `ignore_eos`, as vLLM and SGLang do.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from vlmserve.commands.bench.load import LoadClient, Round
from vlmserve.commands.bench.questions import make_questions

_PERCENTILES = (50, 90, 99)
_SECONDS = {
    "ttft": "first token (TTFT)",
    "tpot": "each further token (TPOT)",
    "itl": "between tokens (ITL)",
    "total": "whole answer",
}


def measure_running(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Send the load that the command line describes, and print a table for each round; the figures of all.

    Without a seed one is drawn, so that the server's caches know none of the pictures. Raises ServerError, also where
    nothing of a round is answered.
    """
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    asked = {"pictures": args.images, "side": args.image_size}
    key = args.api_key or os.environ.get("VLMSERVE_API_KEY")
    with closing(LoadClient(args.url, api_key=key, model=args.model)) as client:
        client.run(make_questions(1, **asked, seed=seed + 1), 2)  # nothing is cold, and it works
        pictures = f"{args.images} of {args.image_size}x{args.image_size} pixels" if args.images else "no picture"
        print(
            f"{client.model} at {client.url}: {args.requests} requests a round, pictures in each: {pictures}, "
            f"{args.output_tokens} tokens out, seed {seed}"
        )
        found = []
        for number, (name, rate, most) in enumerate(_rounds(args)):
            print(f"{name} ...", file=sys.stderr)
            questions = make_questions(args.requests, **asked, seed=seed + 2 + number)
            arrivals = poisson_arrivals(args.requests, rate, seed) if rate else None
            done = client.run(questions, args.output_tokens, at_a_time=most, arrivals=arrivals)
            found.append({"round": name, **round_figures(done, args.images)})
            _show(found[-1], done.failures)
    return found


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each request is sent, in seconds; rate: requests a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def round_figures(done: Round, pictures: int) -> dict[str, Any]:
    """For people and for --json; times in seconds. pictures: in each request."""
    answers = done.timings
    spans = {
        "ttft": [t.ttft_s for t in answers],
        "tpot": [t.per_token_s for t in answers if t.tokens > 1],
        "itl": [gap for t in answers for gap in t.gaps_s],
        "total": [t.total_s for t in answers],
    }
    return {
        "requests": len(answers),
        "failed": len(done.failures),
        "seconds": done.wall_s,
        "requests_per_s": len(answers) / done.wall_s,
        "pictures_per_s": pictures * len(answers) / done.wall_s,
        "prompt_tokens_per_s": sum(t.prompt_tokens for t in answers) / done.wall_s,
        "output_tokens_per_s": done.tokens_per_s,
        **{f"{name}_s": _spread(seconds) for name, seconds in spans.items() if seconds},
    }


def _rounds(args: argparse.Namespace) -> list[tuple[str, float | None, int | None]]:
    """Name, rate and most requests at a time of each."""
    if args.request_rate:
        most = max(args.concurrency, default=None)
        capped = f", {most} at a time at the most" if most else ""
        return [(f"{rate:g} requests a second{capped}", rate, most) for rate in args.request_rate]
    return [(f"{most} at a time", None, most) for most in args.concurrency]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    points = np.percentile(seconds, _PERCENTILES).tolist()
    return {"mean": float(np.mean(seconds)), **{f"p{p}": point for p, point in zip(_PERCENTILES, points, strict=True)}}


def _show(figures: dict[str, Any], failures: Sequence[str]) -> None:
    print(
        f"\n{figures['round']}: {figures['requests']} answered, {figures['failed']} failed, "
        f"{figures['seconds']:.2f} s\n"
        f"  {figures['requests_per_s']:.2f} requests/s, {figures['pictures_per_s']:.2f} pictures/s, "
        f"{figures['output_tokens_per_s']:.1f} tokens/s out, {figures['prompt_tokens_per_s']:.1f} tokens/s in"
    )
    names = ("mean", *(f"p{p}" for p in _PERCENTILES))
    print("  " + "ms".ljust(28) + "".join(name.rjust(10) for name in names))
    for key, title in _SECONDS.items():
        if f"{key}_s" in figures:
            print("  " + title.ljust(28) + "".join(f"{1000 * figures[f'{key}_s'][name]:10.1f}" for name in names))
    for failure in dict.fromkeys(failures):
        print(f"  failed {failures.count(failure)} times: {json.dumps(failure)}")
