"""`vlmserve bench serve`: the server beside a `transformers` loop over the same requests, in one run.

Absolute figures of a shared machine say little; the ratios of one run are what to look at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmserve.bench.load import LoadResult, Timing, make_requests, run_load
from vlmserve.bench.processes import MIB, BenchServer
from vlmserve.common.cpus import available_cpus
from vlmserve.common.errors import EngineError
from vlmserve.flags import CommandParser


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; prints a table, and with --json writes all figures."""
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        model = Path(args.model) if args.model else _default_model(Path(folder))
        baseline = None if args.no_baseline else _baseline(model, args)
        served, memory = _served(model, args)
    _print(args, served, memory, baseline)
    if args.json:
        figures = {
            "settings": vars(args),
            "served": {str(n): _figures(load) for n, load in served.items()},
            "memory_bytes": memory,
            "baseline": None if baseline is None else {**_figures(baseline[0]), "peak_bytes": baseline[1]},
        }
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve bench serve",
        description="Time to first token, time per token, throughput and memory of the server, one request at a time "
        "and several at a time, beside a loop of transformers generate calls over the same requests.",
        epilog="Flags after -- go to `vlmserve serve`, e.g. vlmserve bench serve -- --enable-mixed-chunk",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        help="checkpoint folder; default: random weights, Qwen3-0.6B-shaped text and a "
        "Qwen3-VL-2B-shaped tower in bfloat16",
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="requests at a time")
    parser.add_argument("--requests", type=int, default=16, help="requests in all, for the largest concurrency")
    parser.add_argument("--requests-alone", type=int, default=3, help="requests sent one at a time")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--image-size", type=int, default=256, help="side of the pictures, in pixels")
    parser.add_argument("--num-threads", type=int, default=available_cpus(), help="CPU threads of each side")
    parser.add_argument("--seed", type=int, default=0, help="seed of the pictures")
    parser.add_argument("--no-baseline", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--memory-requests",
        type=int,
        default=0,
        help="more picture requests after these, of one token each, to see memory stay flat",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="flags for the server")
    return parser


def _default_model(folder: Path) -> Path:
    from vlmserve.bench.random_checkpoint import write_random_checkpoint

    print("writing a random checkpoint ...", file=sys.stderr)
    return write_random_checkpoint(folder / "model")


def _baseline(model: Path, args: argparse.Namespace) -> tuple[LoadResult, int]:
    print(f"transformers: {args.requests} requests, one at a time ...", file=sys.stderr)
    plan = {
        "count": args.requests,
        "side": args.image_size,
        "output_tokens": args.output_tokens,
        "seed": args.seed,
        "num_threads": args.num_threads,
    }
    command = [sys.executable, "-m", "vlmserve.bench.baseline", str(model), json.dumps(plan)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise EngineError(f"the baseline failed with status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    timings = tuple(Timing(ttft_s=a, total_s=b, tokens=c, text=d) for a, b, c, d in found["timings"])
    return LoadResult(timings=timings, wall_s=found["wall_s"]), found["peak_bytes"]


def _served(model: Path, args: argparse.Namespace) -> tuple[dict[int, LoadResult], dict[str, int]]:
    served: dict[int, LoadResult] = {}
    largest = max(args.concurrency)
    with BenchServer(model, ["--num-threads", str(args.num_threads), *args.server_flags]) as server:
        memory = {"idle": server.memory("VmRSS")}
        warm = make_requests(1, side=args.image_size, output_tokens=2, seed=args.seed + 1)
        run_load(server.base_url, server.model, warm, 1)
        for concurrency in args.concurrency:
            print(f"vlmserve: {concurrency} at a time ...", file=sys.stderr)
            # prefix and embedding caches must not help: every round has pictures of its own
            count = args.requests if concurrency == largest else args.requests_alone
            seed = args.seed if concurrency == largest else args.seed + 2 + concurrency
            requests = make_requests(count, side=args.image_size, output_tokens=args.output_tokens, seed=seed)
            served[concurrency] = run_load(server.base_url, server.model, requests, concurrency)
        memory["peak"] = server.memory("VmHWM")
        for part in range(5 if args.memory_requests else 0):
            requests = make_requests(
                args.memory_requests // 5, side=args.image_size, output_tokens=1, seed=args.seed + 1000 + part
            )
            run_load(server.base_url, server.model, requests, largest)
            memory[f"after {(part + 1) * len(requests)} more"] = server.memory("VmRSS")
            print(f"vlmserve: {(part + 1) * len(requests)} more requests", file=sys.stderr)
    return served, memory


def _figures(load: LoadResult) -> dict[str, Any]:
    return {
        "requests": len(load.timings),
        "ttft_s": statistics.median(t.ttft_s for t in load.timings),
        "per_token_s": statistics.median(t.per_token_s for t in load.timings),
        "total_s": statistics.median(t.total_s for t in load.timings),
        "tokens_per_s": load.tokens_per_s,
        "pictures_per_s": load.pictures_per_s,
    }


def _print(
    args: argparse.Namespace,
    served: dict[int, LoadResult],
    memory: dict[str, int],
    baseline: tuple[LoadResult, int] | None,
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
    if baseline and max(served) in served and len(served[max(served)].timings) == len(baseline[0].timings):
        pairs = zip(served[max(served)].timings, baseline[0].timings, strict=True)
        same = sum(ours.text == theirs.text for ours, theirs in pairs)
        print(f"equal answers: {same} of {len(baseline[0].timings)} (16-bit arithmetic: near ties may fall either way)")
