"""`vlmserve bench parallel`: two processes of one thread each beside one, and experts beside a dense model.

Each figure is a ratio taken in one run, with its target beside it. What two processes gain is held to what the machine
gives two of them: they share its memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vlmserve.commands.bench.measure import show
from vlmserve.commands.bench.parallel_measures import PARTS, Plan, parts_here
from vlmserve.commands.bench.parallel_subject import Work
from vlmserve.config.flags import CommandParser
from vlmserve.config.number_words import not_negative, positive

_LAYERS, _QUICK_LAYERS = 28, 4
_MOE_LAYERS, _QUICK_MOE_LAYERS = 6, 1
_ROUNDS, _QUICK_ROUNDS = 5, 2


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for; prints a line a figure, and with --json writes them all."""
    args = _parser().parse_args(argv)
    figures = {}
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        plan = Plan(
            folder=Path(folder),
            layers=args.layers or (_QUICK_LAYERS if args.quick else _LAYERS),
            moe_layers=args.moe_layers or (_QUICK_MOE_LAYERS if args.quick else _MOE_LAYERS),
            rounds=args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS),
            work=Work(requests=args.requests, steps=args.steps, prompt=args.prompt),
            wait_s=args.wait_s,
        )
        print(
            f"random bfloat16 weights in the shape of Qwen3-0.6B, {plan.layers} of its {_LAYERS} layers; one thread a "
            f"process; {args.requests} requests, {args.steps} tokens each, prompts of {args.prompt}; "
            f"rounds: {plan.rounds}",
            flush=True,
        )
        for part in args.parts:
            figures[part] = PARTS[part](plan)
            show(part, figures[part])
    if args.json:
        settings = {name: value for name, value in asdict(plan).items() if name != "folder"}
        measures = {part: [one.plain() for one in made] for part, made in figures.items()}
        args.json.write_text(json.dumps({"settings": settings, "measures": measures}, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve bench parallel",
        description="Two processes of one thread each that share a model (tensor parallel, a pipeline) or have one "
        "each (data parallel), beside one process, and beside what the machine gives two; a mixture of experts beside "
        "a dense model with as many weights for a token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    here = parts_here()
    parser.add_argument("--parts", nargs="+", choices=here, default=here, help="what to measure")
    text = f"of the dense model ({_LAYERS}, with --quick {_QUICK_LAYERS})"
    parser.add_argument("--layers", type=positive, help=text)
    text = f"of the mixture of experts ({_MOE_LAYERS}, with --quick {_QUICK_MOE_LAYERS})"
    parser.add_argument("--moe-layers", type=positive, help=text)
    text = "that decode together: in one process, a micro-batch, a replica"
    parser.add_argument("--requests", type=positive, default=4, help=text)
    parser.add_argument("--steps", type=positive, default=24, help="tokens that each gets")
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of each prompt whose prefill is timed")
    text = f"times each alternative runs, in turns ({_ROUNDS}, with --quick {_QUICK_ROUNDS})"
    parser.add_argument("--rounds", type=positive, help=text)
    text = "seconds that each round waits for others to leave the machine alone, at the most"
    parser.add_argument("--wait-s", type=not_negative, default=10, help=text)
    parser.add_argument("--quick", action="store_true", help="fewer layers and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    return parser
