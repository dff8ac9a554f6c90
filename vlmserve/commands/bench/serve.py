"""`vlmserve bench serve`: the server beside a `transformers` loop over the same requests, in one run.

Absolute figures of a shared machine say little; the ratios of one run are what to look at. With --url, a server that
runs already is measured by itself (`vlmserve.commands.bench.running`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from vlmserve.commands.bench.load import LoadClient, Round, Timing
from vlmserve.commands.bench.processes import MIB, tree_memory
from vlmserve.commands.bench.questions import make_questions
from vlmserve.commands.bench.running import measure_running
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.flags import CommandParser
from vlmserve.config.number_words import above_zero, not_negative, positive
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.errors import EngineError

_CONCURRENCY = [1, 16]
_ABOUT = """\
Time to first token, time per token, throughput and memory of the server, one request at a time and several at a time,
beside a loop of transformers generate calls over the same requests. With --url: throughput, and percentiles of the
times, of a server that runs already; nothing else is started then.
"""
_EPILOG = """\
examples:
  vlmserve bench serve                                                    beside transformers; takes minutes
  vlmserve bench serve --url http://127.0.0.1:8000 --concurrency 1 8      a server that runs already
  vlmserve bench serve --url http://127.0.0.1:8000 --request-rate 2 --requests 100 --image-size 512
  vlmserve bench serve -- --enable-mixed-chunk                            flags after -- go to `vlmserve serve`
"""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; prints a table, and with --json writes all figures."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    args.concurrency = args.concurrency or ([] if args.request_rate else _CONCURRENCY)
    figures = _measure_own(args) if args.url is None else {"rounds": measure_running(args)}
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "api_key"}
        Path(args.json).write_text(json.dumps({"settings": settings, **figures}, indent=2) + "\n")
    return int(any(one["failed"] for one in figures.get("rounds", [])))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="vlmserve bench serve", usage="%(prog)s [options] [-- FLAGS ...]", description=_ABOUT, epilog=_EPILOG
    )

    def number(*names: str, default: int, text: str, kind: Any = positive) -> None:
        parser.add_argument(
            *names, type=kind, default=default, metavar="N", help=f"{text} [default: %(default)s]" if default else text
        )

    parser.add_argument(
        "--url", "--base-url", metavar="URL", help="measure the server at http://host:port, and start none"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of that server [env: VLMSERVE_API_KEY]")
    parser.add_argument(
        "--model",
        help="checkpoint folder [default: random weights, Qwen3-0.6B-shaped text and a "
        "Qwen3-VL-2B-shaped tower in bfloat16]; with --url, the model's name there [default: the first]",
    )
    text = f"requests at a time, one after the other [default: {' '.join(map(str, _CONCURRENCY))}]"
    parser.add_argument("--concurrency", "--max-concurrency", type=positive, nargs="+", metavar="N", help=text)
    text = "with --url: requests a second, at random times (Poisson), instead of so many at a time"
    parser.add_argument("--request-rate", type=above_zero, nargs="+", default=[], metavar="X", help=text)
    text = "requests in all, for the largest concurrency; with --url, for each"
    number("--requests", "--num-prompts", default=16, text=text)
    text = "with --url: pictures in each request; 0 for text alone"
    number("--images", default=1, kind=not_negative, text=text)
    number("--output-tokens", default=64, text="tokens of each answer")
    number("--image-size", default=256, text="side of the pictures, in pixels")
    text = "of the pictures [default: 0; with --url, one drawn at random]"
    parser.add_argument("--seed", type=not_negative, metavar="N", help=text)
    number("--requests-alone", default=3, text="without --url: requests sent one at a time")
    number("--num-threads", default=available_cpus(), text="without --url: CPU threads of each side")
    parser.add_argument("--no-baseline", action="store_true", help="without --url: leave transformers out")
    text = "without --url: more picture requests after these, of one token each, to see memory stay flat"
    number("--memory-requests", default=0, kind=not_negative, text=text)
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="flags for the server")
    return parser


def _check(parser: CommandParser, args: argparse.Namespace) -> None:
    """Ends the process for flags that do not go together."""
    if args.url is None and (args.request_rate or args.api_key or args.images != 1):
        parser.error("--request-rate, --images and --api-key go with --url")
    if args.url is not None and (args.server_flags or args.memory_requests or args.no_baseline):
        parser.error("with --url no server is started: flags after --, --memory-requests and --no-baseline go without")


def _measure_own(args: argparse.Namespace) -> dict[str, Any]:
    args.seed = args.seed or 0
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        if args.model:
            model = Path(args.model)
        else:
            from vlmserve.commands.bench.random_checkpoint import write_random_checkpoint  # needs torch

            print("writing a random checkpoint ...", file=sys.stderr)
            model = write_random_checkpoint(Path(folder) / "model")
        baseline = None if args.no_baseline else _baseline(model, args)
        served, memory = _served(model, args)
    _print(args, served, memory, baseline)
    return {
        "served": {str(n): _figures(load) for n, load in served.items()},
        "memory_bytes": memory,
        "baseline": None if baseline is None else {**_figures(baseline[0]), "peak_bytes": baseline[1]},
    }


def _baseline(model: Path, args: argparse.Namespace) -> tuple[Round, int]:
    print(f"transformers: {args.requests} requests, one at a time ...", file=sys.stderr)
    plan = {
        "count": args.requests,
        "side": args.image_size,
        "output_tokens": args.output_tokens,
        "seed": args.seed,
        "num_threads": args.num_threads,
    }
    command = [sys.executable, "-m", "vlmserve.commands.bench.baseline", str(model), json.dumps(plan)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise EngineError(f"the baseline failed with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    timings = tuple(Timing(**timing) for timing in found["timings"])
    return Round(timings=timings, wall_s=found["wall_s"]), found["peak_bytes"]


def _served(model: Path, args: argparse.Namespace) -> tuple[dict[int, Round], dict[str, int]]:
    served: dict[int, Round] = {}
    largest, side = max(args.concurrency), args.image_size
    words = [str(model), "--served-model-name", "bench", "--log-level", "warning"]
    # the same pictures for both sides
    words += ["--num-threads", str(args.num_threads), "--max-pixels", "checkpoint", *args.server_flags]
    with (
        OwnServer(words, startup_timeout_s=600.0) as server,
        closing(LoadClient(server.base_url, model="bench", proxies=False)) as client,
    ):

        def measure(count: int, seed: int, tokens: int, at_a_time: int) -> Round:
            done = client.run(make_questions(count, side=side, seed=seed), tokens, at_a_time=at_a_time)
            if done.failures or any(timing.tokens != tokens for timing in done.timings):
                raise EngineError(f"not every answer has the {tokens} tokens asked for: {', '.join(done.failures)}")
            return done

        memory = {"idle": tree_memory(server.pid, "VmRSS")}
        measure(1, args.seed + 1, 2, 1)
        for concurrency in args.concurrency:
            print(f"vlmserve: {concurrency} at a time ...", file=sys.stderr)
            # prefix and embedding caches must not help: every round has pictures of its own
            count = args.requests if concurrency == largest else args.requests_alone
            seed = args.seed if concurrency == largest else args.seed + 2 + concurrency
            served[concurrency] = measure(count, seed, args.output_tokens, concurrency)
        memory["peak"] = tree_memory(server.pid, "VmHWM")
        count = args.memory_requests // 5
        for part in range(5 if args.memory_requests else 0):
            measure(count, args.seed + 1000 + part, 1, largest)
            memory[f"after {(part + 1) * count} more"] = tree_memory(server.pid, "VmRSS")
            print(f"vlmserve: {(part + 1) * count} more requests", file=sys.stderr)
    return served, memory


def _figures(load: Round) -> dict[str, Any]:
    return {
        "requests": len(load.timings),
        "ttft_s": statistics.median(t.ttft_s for t in load.timings),
        "per_token_s": statistics.median(t.per_token_s for t in load.timings),
        "total_s": statistics.median(t.total_s for t in load.timings),
        "tokens_per_s": load.tokens_per_s,
        "pictures_per_s": len(load.timings) / load.wall_s,
    }


def _print(
    args: argparse.Namespace, served: dict[int, Round], memory: dict[str, int], baseline: tuple[Round, int] | None
) -> None:
    rows = [(f"vlmserve, {n} at a time", _figures(load), memory["peak"]) for n, load in served.items()]
    if baseline:
        rows.insert(0, ("transformers, 1 at a time", _figures(baseline[0]), baseline[1]))
    print(
        f"\n{args.image_size}x{args.image_size} pictures, {args.output_tokens} tokens out, {args.num_threads} threads"
    )
    print(f"{'':28}{'TTFT s':>9}{'s/token':>9}{'tokens/s':>10}{'pictures/s':>12}{'peak MiB':>10}{'  throughput':>13}")
    reference = rows[0][1]["tokens_per_s"]
    for name, figures, peak in rows:
        print(
            f"{name:28}{figures['ttft_s']:9.2f}{figures['per_token_s']:9.3f}{figures['tokens_per_s']:10.2f}"
            f"{figures['pictures_per_s']:12.3f}{peak / MIB:10.0f}{figures['tokens_per_s'] / reference:12.2f}x"
        )
    print("server memory, MiB: " + ", ".join(f"{name} {value / MIB:.0f}" for name, value in memory.items()))
    if baseline and len(served[max(served)].timings) == len(baseline[0].timings):
        pairs = zip(served[max(served)].timings, baseline[0].timings, strict=True)
        same = sum(ours.text == theirs.text for ours, theirs in pairs)
        print(f"equal answers: {same} of {len(baseline[0].timings)} (16-bit arithmetic: near ties may fall either way)")
