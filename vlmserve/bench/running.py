"""A server that runs already, under load: throughput, and percentiles of what each request waits for.

Any server of OpenAI's API will do that takes `ignore_eos`, as vLLM and SGLang do.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmserve.bench.load import Timing, ask, make_requests, picture_part, refusal
from vlmserve_common.errors import VlmserveError

if TYPE_CHECKING:
    import httpx2

_PERCENTILES = (50, 90, 99)
_SECONDS = {
    "ttft": "first token (TTFT)",
    "tpot": "each further token (TPOT)",
    "itl": "between tokens (ITL)",
    "total": "whole answer",
}


class NoServerError(VlmserveError):
    """The server cannot be reached, or refuses what is asked."""


@dataclass(frozen=True, kw_only=True)
class RunningPlan:
    """What to send where. model: None for the first that the server names. seed: of the pictures; None draws one, so
    that the server's caches know none of them.

    concurrency: requests at a time, a round each; rates: requests a second (Poisson), a round each, with no more at a
    time than the largest of `concurrency` if it is given.
    """

    url: str
    api_key: str | None
    model: str | None
    requests: int
    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    pictures: int
    side: int
    output_tokens: int
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class Round:
    """What came of one round. failures: the words of each."""

    name: str
    timings: tuple[Timing, ...]
    failures: tuple[str, ...]
    wall_s: float

    def figures(self, pictures: int) -> dict[str, Any]:
        """For people and for --json; times in seconds. pictures: in each request."""
        done = self.timings
        spans = {
            "ttft": [t.ttft_s for t in done],
            "tpot": [t.per_token_s for t in done if t.tokens > 1],
            "itl": [gap for t in done for gap in t.gaps_s],
            "total": [t.total_s for t in done],
        }
        return {
            "round": self.name,
            "requests": len(done),
            "failed": len(self.failures),
            "seconds": self.wall_s,
            "requests_per_s": len(done) / self.wall_s,
            "pictures_per_s": pictures * len(done) / self.wall_s,
            "prompt_tokens_per_s": sum(t.prompt_tokens for t in done) / self.wall_s,
            "output_tokens_per_s": sum(t.tokens for t in done) / self.wall_s,
            **{f"{name}_s": _spread(seconds) for name, seconds in spans.items() if seconds},
        }


def measure_running(plan: RunningPlan) -> list[dict[str, Any]]:
    """Send the load, and print a table for each round; the figures of all.

    Raises NoServerError, also where nothing of a round is answered.
    """
    return asyncio.run(_measure(plan))


async def _measure(plan: RunningPlan) -> list[dict[str, Any]]:
    import httpx2

    base = plan.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    seed = secrets.randbelow(2**32) if plan.seed is None else plan.seed
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=None, limits=limits) as client:
            model = plan.model or await _model(client, base)
            await ask(client, model, _conversations(plan, 1, seed + 1)[0], 2)  # nothing is cold, and it works
            print(_about(plan, model, base, seed))
            found = []
            for number, (name, rate, most) in enumerate(_rounds(plan)):
                print(f"{name} ...", file=sys.stderr)
                conversations = _conversations(plan, plan.requests, seed + 2 + number)
                arrivals = _arrivals(plan.requests, rate, seed)
                timings, failures, wall_s = await _run(
                    [_asking(client, model, messages, plan.output_tokens) for messages in conversations], arrivals, most
                )
                done = Round(name=name, timings=timings, failures=failures, wall_s=wall_s)
                if not timings:
                    raise NoServerError(f"no request was answered: {failures[0]}")
                found.append(done.figures(plan.pictures))
                _show(found[-1], failures)
            return found
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise NoServerError(f"no answer from {base}: {str(error) or type(error).__name__}") from None
    except RuntimeError as error:
        raise NoServerError(f"{base}: {error}") from None


async def _model(client: httpx2.AsyncClient, base: str) -> str:
    reply = await client.get("/v1/models")
    if reply.status_code != 200:
        raise RuntimeError(refusal(reply.status_code, reply.content))
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise NoServerError(f"{base}/v1/models does not answer as OpenAI's API does") from None


def _rounds(plan: RunningPlan) -> list[tuple[str, float | None, int | None]]:
    """Name, rate and most requests at a time of each."""
    if plan.rates:
        most = max(plan.concurrency) if plan.concurrency else None
        capped = f", {most} at a time at the most" if most else ""
        return [(f"{rate:g} requests a second{capped}", rate, most) for rate in plan.rates]
    return [(f"{most} at a time", None, most) for most in plan.concurrency]


def _conversations(plan: RunningPlan, count: int, seed: int) -> list[list[dict[str, object]]]:
    drawn = make_requests(count * plan.pictures, side=plan.side, output_tokens=plan.output_tokens, seed=seed)
    parts = [picture_part(request.picture) for request in drawn]
    whole = []
    for number in range(count):
        own = parts[number * plan.pictures : (number + 1) * plan.pictures]
        about = f"What is shown? Answer in a few words. ({seed}-{number})"  # texts differ, too
        whole.append([{"role": "user", "content": [*own, {"type": "text", "text": about}]}])
    return whole  # type: ignore[return-value]


def _arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """When each request is sent, in seconds: all at once without a rate."""
    if rate is None:
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def _asking(client: httpx2.AsyncClient, model: str, messages: object, tokens: int) -> Callable[[], Awaitable[Timing]]:
    return lambda: ask(client, model, messages, tokens)


async def _run(
    requests: Sequence[Callable[[], Awaitable[Timing]]], arrivals: Sequence[float], most: int | None
) -> tuple[tuple[Timing, ...], tuple[str, ...], float]:
    """Timings, failures and seconds in all."""
    import httpx2

    gate = asyncio.Semaphore(most or len(requests))
    timings: list[Timing] = []
    failures: list[str] = []

    async def one(request: Callable[[], Awaitable[Timing]], after_s: float) -> None:
        await asyncio.sleep(after_s)
        async with gate:
            try:
                timings.append(await request())
            except (httpx2.HTTPError, RuntimeError) as error:
                failures.append(str(error) or type(error).__name__)

    started = time.perf_counter()
    await asyncio.gather(*map(one, requests, arrivals))
    return tuple(timings), tuple(failures), time.perf_counter() - started


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    points = np.percentile(seconds, _PERCENTILES).tolist()
    return {"mean": float(np.mean(seconds)), **{f"p{p}": point for p, point in zip(_PERCENTILES, points, strict=True)}}


def _about(plan: RunningPlan, model: str, base: str, seed: int) -> str:
    pictures = "no picture" if not plan.pictures else f"{plan.pictures} of {plan.side}x{plan.side} pixels"
    return (
        f"{model} at {base}: {plan.requests} requests a round, pictures in each: {pictures}, "
        f"{plan.output_tokens} tokens out, seed {seed}"
    )


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
