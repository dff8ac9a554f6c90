"""`vlmserve bench vision`: the vision encoder beside transformers', and what its cache, disk and processes save.

Each figure is a ratio taken in one run, with its target beside it: absolute ones of a shared machine say little.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from vlmserve.commands.bench.measure import Measure, show
from vlmserve.commands.bench.vision_measures import PARTS, Plan
from vlmserve.commands.bench.vision_subject import Subject, use_threads, write_checkpoint
from vlmserve.config.flags import CommandParser
from vlmserve_common.compute.cpus import available_cpus

_DEPTH, _QUICK_DEPTH = 24, 4
_ROUNDS, _QUICK_ROUNDS = 5, 2


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for; prints a line a figure, and with --json writes them all."""
    args = _parser().parse_args(argv)
    depth = args.depth or (_QUICK_DEPTH if args.quick else _DEPTH)
    plan = Plan(
        rounds=args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS),
        threads=args.threads,
        max_patches=args.encoder_max_patches,
    )
    computes = use_threads(torch.device(args.device), plan.threads)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        if args.model:
            model, what = args.model, str(args.model)
        else:
            what = f"random weights in the shape of Qwen3-VL-2B's tower, {depth} of its {_DEPTH} layers"
            print(f"writing {what} ...", file=sys.stderr)
            model = write_checkpoint(Path(folder), depth=depth)
        subject = Subject(model, device=torch.device(args.device), dtype=getattr(torch, args.dtype))
        print(f"{what}; {args.dtype} on {args.device}, threads: {plan.threads}, rounds: {plan.rounds}; {computes}")
        figures = {part: _measure(part, subject, plan) for part in args.parts}
    if args.json:
        settings = {"checkpoint": what, "dtype": args.dtype, "device": args.device, **asdict(plan)}
        measures = {part: [one.plain() for one in made] for part, made in figures.items()}
        args.json.write_text(json.dumps({"settings": settings, "measures": measures}, indent=2) + "\n")
    return 0


def _measure(part: str, subject: Subject, plan: Plan) -> list[Measure]:
    measures = PARTS[part](subject, plan)
    show(part, measures)
    return measures


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve bench vision",
        description="Pictures and clips to embeddings: beside transformers' vision tower; found in memory and on the "
        "disk; clips that overlap; one look-up; encoder processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, help="checkpoint folder; default: random weights, a tower in the shape of Qwen3-VL-2B's"
    )
    parser.add_argument("--depth", type=int, help=f"layers of those ({_DEPTH}, with --quick {_QUICK_DEPTH})")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure")
    parser.add_argument(
        "--rounds", type=int, help=f"times each alternative runs, in turns ({_ROUNDS}, with --quick {_QUICK_ROUNDS})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer layers and rounds")
    parser.add_argument("--device", default="cpu", help="where the tower computes: cpu, cuda, cuda:1 ...")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="in which type")
    parser.add_argument("--threads", type=int, default=available_cpus(), help="CPU threads of each side")
    parser.add_argument("--encoder-max-patches", type=int, default=1024, help="patches that the pool encodes at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    return parser
