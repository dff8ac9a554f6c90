"""`vlmserve bench router`: what a router adds to a request and to a streamed token, beside a server with a fake engine.

Latencies are those of answers through the router beside answers of the server itself. Where there are two CPUs, the
router has the last one to itself. A token's cost is CPU time of the router.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from vlmserve.commands.bench.api import bodies, send_all
from vlmserve.commands.bench.fake_engine import STEP_VARIABLE
from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, ratios, show_and_write
from vlmserve.commands.bench.processes import children_of, cpu_time
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.flags import positive

_REQUEST_MS, _RATIO, _TOKEN_MS = 1.0, 1.05, 0.05


def main(argv: Sequence[str]) -> int:
    """Measure, and print a line for each figure."""
    parser = bench_parser("router", "What `vlmserve router` adds to a request, and to a streamed token.", rounds=5)

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=positive, default=default, metavar="N", help=text)

    number("--requests", 100, "unstreamed requests in a round, one at a time")
    number("--streams", 16, "streams at a time")
    number("--tokens", 128, "tokens of each streamed answer")
    number("--step-ms", 10, "a step of the fake engine, which gives each request a token")
    args = parser.parse_args(argv)
    print(f"{args.rounds} rounds; median (least to most)")
    show_and_write(args, {"router": _measures(args)})
    return 0


def _measures(args: argparse.Namespace) -> Iterator[Measure]:
    words = ["--served-model-name", "bench", "--log-level", "warning", "--max-running-requests", "256"]
    fake = OwnServer(words, {STEP_VARIABLE: str(args.step_ms)}, command=("vlmserve.commands.bench.fake_engine",))
    with fake, OwnServer(["--replica", fake.base_url], command=("vlmserve.cli", "router")) as router:
        apart = _keep_apart([fake.pid, *children_of(fake.pid)], router.pid)
        pids = {"the router": router.pid, "the server's API process": fake.pid}
        urls = {"direct": fake.base_url, "routed": router.base_url}

        def times(count: int, tokens: int, at_a_time: int, *, stream: bool) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {name: [] for name in (*urls, *pids)}
            for number in range(args.rounds + 1):
                for name, url in urls.items():
                    before = {of: cpu_time(pid) for of, pid in pids.items()}
                    wall_s = send_all(url, bodies(count, tokens, stream=stream), at_a_time=at_a_time).wall_s
                    if number:  # the first round warms up
                        found[name].append(wall_s)
                    if number and name == "routed":
                        for of, pid in pids.items():
                            found[of].append(cpu_time(pid) - before[of])
            return found

        whole = times(args.requests, 1, 1, stream=False)
        gaps = [1e3 * (b - a) / args.requests for a, b in zip(whole["direct"], whole["routed"], strict=True)]
        yield _ms("added to a request of one token, one at a time", gaps, apart, _REQUEST_MS)
        for of in pids:
            yield _ms(f"CPU time of {of}", [1e3 * seconds / args.requests for seconds in whole[of]], apart, None)
        long = times(4, args.tokens, 1, stream=True)
        spread = ratios(long["routed"], long["direct"])
        name = f"a stream of {args.tokens} tokens beside the server's own"
        yield Measure(name=name, spread=spread, target=_RATIO, bound="at most", about=apart)
        streamed = times(args.streams, args.tokens, args.streams, stream=True)
        about = f"{args.streams} streams at a time; {apart}"
        for of, target in zip(pids, (_TOKEN_MS, None), strict=True):
            cpu = [1e3 * seconds / args.streams / args.tokens for seconds in streamed[of]]
            yield _ms(f"a token's CPU time of {of}", cpu, about, target)


def _ms(name: str, values: Sequence[float], about: str, target: float | None) -> Measure:
    return Measure(name=name, unit="ms", spread=Spread.of(values), target=target, bound="at most", about=about)


def _keep_apart(servers: Sequence[int], router: int) -> str:
    """Give the router a CPU of its own, if there are two, and return how it was."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return "router, server and client share one CPU"
    for pid, own in ((router, cpus[-1:]), *((pid, cpus[:-1]) for pid in (*servers, os.getpid()))):
        os.sched_setaffinity(pid, own)
    return f"the router on CPU {cpus[-1]}, server and client on the others"
