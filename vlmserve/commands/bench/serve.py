"""`vlmserve bench serve`: a server beside a loop of `transformers` calls, or a server that runs already.

Without --url, both sides answer the same requests in one run: figures of a shared machine say little, ratios of one run
say more. The server of --url may be of any make that speaks OpenAI's API and takes `ignore_eos`, as vLLM and SGLang do.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vlmserve.commands.bench.figures import bench_parser, write_json
from vlmserve.commands.bench.load import Answered, LoadClient, Round
from vlmserve.commands.bench.media import make_questions
from vlmserve.commands.bench.processes import MIB, tree_memory
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.flags import CommandParser, above_zero, not_negative, positive
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.errors import EngineError

_CONCURRENCY = [1, 16]
_ABOUT = """\
Time to first token, time per token, throughput and memory of a server, one request at a time and several at a time,
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
_PERCENTILES = (50, 90, 99)
_SECONDS = {
    "ttft_s": "first token (TTFT)",
    "tpot_s": "each further token (TPOT)",
    "itl_s": "between tokens (ITL)",
    "total_s": "whole answer",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, print a table, and return 1 if a request failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.url is None and (args.request_rate or args.api_key or args.images != 1):
        parser.error("--request-rate, --images and --api-key go with --url")
    if args.url is not None and (args.server_flags or args.memory_requests or args.no_baseline):
        parser.error("with --url no server is started: flags after --, --memory-requests and --no-baseline go without")
    args.concurrency = args.concurrency or ([] if args.request_rate else _CONCURRENCY)
    figures = _measure_own(args) if args.url is None else {"rounds": _measure_running(args)}
    write_json(args, figures)
    return int(any(one["failed"] for one in figures.get("rounds", [])))


def _parser() -> CommandParser:
    parser = bench_parser("serve", _ABOUT, usage="%(prog)s [options] [-- FLAGS ...]", epilog=_EPILOG)
    add = parser.add_argument
    add("--url", "--base-url", metavar="URL", help="measure the server at http://host:port, and start none")
    add("--api-key", metavar="KEY", help="the key of that server [env: VLMSERVE_API_KEY]")
    text = "checkpoint folder, or random weights (text like Qwen3-0.6B, tower like Qwen3-VL-2B, bfloat16) if left out; "
    add("--model", help=text + "with --url, the model's name there, or the first one if left out")
    text = f"requests at a time, one number after the other (default: {' '.join(map(str, _CONCURRENCY))})"
    add("--concurrency", "--max-concurrency", type=positive, nargs="+", metavar="N", help=text)
    text = "with --url: requests a second, at random times (Poisson), instead of a number at a time"
    add("--request-rate", type=above_zero, nargs="+", default=[], metavar="X", help=text)
    text = "requests of the largest concurrency; with --url, of each"
    add("--requests", "--num-prompts", type=positive, default=16, metavar="N", help=text)
    text = "with --url: pictures in each request; 0 for text alone"
    add("--images", type=not_negative, default=1, metavar="N", help=text)
    add("--output-tokens", type=positive, default=64, metavar="N", help="tokens of each answer")
    add("--image-size", type=positive, default=256, metavar="N", help="side of the pictures, in pixels")
    text = "seed of the pictures (default: 0; with --url, drawn at random)"
    add("--seed", type=not_negative, metavar="N", help=text)
    text = "without --url: requests of each smaller concurrency"
    add("--requests-alone", type=positive, default=3, metavar="N", help=text)
    text = "without --url: CPU threads of each side"
    add("--num-threads", type=positive, default=available_cpus(), metavar="N", help=text)
    add("--no-baseline", action="store_true", help="without --url: leave transformers out")
    text = "without --url: picture requests of one token each that follow, to see that memory stays flat"
    add("--memory-requests", type=not_negative, default=0, metavar="N", help=text)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="flags for the server")
    return parser


def _measure_own(args: argparse.Namespace) -> dict[str, Any]:
    args.seed = args.seed or 0
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        if args.model:
            model = Path(args.model)
        else:
            from vlmserve.commands.bench.checkpoints import write_random_checkpoint  # needs torch

            print("writing a random checkpoint ...", file=sys.stderr)
            model = write_random_checkpoint(Path(folder) / "model")
        baseline = None if args.no_baseline else _baseline(model, args)
        served, memory = _served(model, args)
    _print_own(args, served, memory, baseline)
    return {
        "served": {str(n): _medians(done) for n, done in served.items()},
        "memory_bytes": memory,
        "baseline": None if baseline is None else {**_medians(baseline[0]), "peak_bytes": baseline[1]},
    }


def _baseline(model: Path, args: argparse.Namespace) -> tuple[Round, int]:
    """Return what a process with transformers answers, and the peak of its memory in bytes."""
    print(f"transformers: {args.requests} requests, one at a time ...", file=sys.stderr)
    numbers = (args.requests, args.image_size, args.output_tokens, args.seed, args.num_threads)
    command = [sys.executable, "-m", "vlmserve.commands.bench.reference", str(model), *map(str, numbers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise EngineError(f"the baseline failed with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    answers = tuple(Answered(**one) for one in found["answers"])
    return Round(answers=answers, wall_s=found["wall_s"]), found["peak_bytes"]


def _served(model: Path, args: argparse.Namespace) -> tuple[dict[int, Round], dict[str, int]]:
    """Return the answers of a server by concurrency, and its memory in bytes by the time of the run."""
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
            if done.failures or any(answer.tokens != tokens for answer in done.answers):
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


def _medians(done: Round) -> dict[str, Any]:
    return {
        "requests": len(done.answers),
        **{
            name: statistics.median(getattr(one, name) for one in done.answers)
            for name in ("ttft_s", "per_token_s", "total_s")
        },
        "tokens_per_s": done.tokens_per_s,
        "pictures_per_s": len(done.answers) / done.wall_s,
        "work": None if done.work is None else asdict(done.work),
    }


def _print_own(
    args: argparse.Namespace, served: dict[int, Round], memory: dict[str, int], baseline: tuple[Round, int] | None
) -> None:
    rows = [(f"vlmserve, {n} at a time", _medians(done), memory["peak"]) for n, done in served.items()]
    if baseline:
        rows.insert(0, ("transformers, 1 at a time", _medians(baseline[0]), baseline[1]))
    size = f"{args.image_size}x{args.image_size}"
    print(f"\n{size} pictures, {args.output_tokens} tokens out, {args.num_threads} threads")
    print(f"{'':28}{'TTFT s':>9}{'s/token':>9}{'tokens/s':>10}{'pictures/s':>12}{'peak MiB':>10}{'  throughput':>13}")
    reference = rows[0][1]["tokens_per_s"]
    for name, figures, peak in rows:
        print(
            f"{name:28}{figures['ttft_s']:9.2f}{figures['per_token_s']:9.3f}{figures['tokens_per_s']:10.2f}"
            f"{figures['pictures_per_s']:12.3f}{peak / MIB:10.0f}{figures['tokens_per_s'] / reference:12.2f}x"
        )
    for n, done in served.items():
        print(f"{n} at a time: {done.work}")
    print("server memory, MiB: " + ", ".join(f"{name} {value / MIB:.0f}" for name, value in memory.items()))
    if baseline and len(served[max(served)].answers) == len(baseline[0].answers):
        pairs = zip(served[max(served)].answers, baseline[0].answers, strict=True)
        same = sum(ours.text == theirs.text for ours, theirs in pairs)
        print(f"equal answers: {same} of {len(baseline[0].answers)} (16-bit arithmetic: near ties may fall either way)")


def _measure_running(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Load a server that runs already, print a table for each round, and return all figures.

    Without --seed one is drawn, so that the server's caches know none of the pictures. Raises ServerError if a round
    has no answer.
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
            _print_round(found[-1], done.failures)
            if done.work is not None:
                print(f"  {done.work}")
    return found


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return when each request is sent, in seconds. rate: requests a second."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def round_figures(done: Round, pictures: int) -> dict[str, Any]:
    """Return the figures of a round, times in seconds. pictures: in each request."""
    answers = done.answers
    spans = {
        "ttft_s": [one.ttft_s for one in answers],
        "tpot_s": [one.per_token_s for one in answers if one.tokens > 1],
        "itl_s": [gap for one in answers for gap in one.gaps_s],
        "total_s": [one.total_s for one in answers],
    }
    return {
        "requests": len(answers),
        "failed": len(done.failures),
        "seconds": done.wall_s,
        "requests_per_s": len(answers) / done.wall_s,
        "pictures_per_s": pictures * len(answers) / done.wall_s,
        "prompt_tokens_per_s": sum(one.prompt_tokens for one in answers) / done.wall_s,
        "output_tokens_per_s": done.tokens_per_s,
        "work": None if done.work is None else asdict(done.work),
        **{name: _percentiles(seconds) for name, seconds in spans.items() if seconds},
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    points = np.percentile(seconds, _PERCENTILES).tolist()
    return {"mean": float(np.mean(seconds)), **{f"p{p}": point for p, point in zip(_PERCENTILES, points, strict=True)}}


def _rounds(args: argparse.Namespace) -> list[tuple[str, float | None, int | None]]:
    if args.request_rate:
        most = max(args.concurrency, default=None)
        capped = f", {most} at a time at the most" if most else ""
        return [(f"{rate:g} requests a second{capped}", rate, most) for rate in args.request_rate]
    return [(f"{most} at a time", None, most) for most in args.concurrency]


def _print_round(figures: dict[str, Any], failures: Sequence[str]) -> None:
    print(
        f"\n{figures['round']}: {figures['requests']} answered, {figures['failed']} failed, "
        f"{figures['seconds']:.2f} s\n"
        f"  {figures['requests_per_s']:.2f} requests/s, {figures['pictures_per_s']:.2f} pictures/s, "
        f"{figures['output_tokens_per_s']:.1f} tokens/s out, {figures['prompt_tokens_per_s']:.1f} tokens/s in"
    )
    names = ("mean", *(f"p{p}" for p in _PERCENTILES))
    print("  " + "ms".ljust(28) + "".join(name.rjust(10) for name in names))
    for key, title in _SECONDS.items():
        if key in figures:
            print("  " + title.ljust(28) + "".join(f"{1000 * figures[key][name]:10.1f}" for name in names))
    for failure in dict.fromkeys(failures):
        print(f"  failed {failures.count(failure)} times: {json.dumps(failure)}")
