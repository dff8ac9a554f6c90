"""`vlmserve bench gpu`: the engine on one GPU beside transformers, offline and in one run.

Written without a GPU at hand: it has been run on CPUs only (`--device cpu --small`).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch

from vlmserve.bench.gpu_measures import PARTS, Bench, Figure
from vlmserve.bench.gpu_sizes import FULL, SMALL
from vlmserve.bench.interleaved import Spread
from vlmserve.bench.random_checkpoint import write_random_checkpoint
from vlmserve.config.flags import CommandParser
from vlmserve_common.errors import EngineError
from vlmserve_common.version import __version__

_ROUNDS = 5


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for; prints a line a figure, and with --json writes all. EngineError without a device."""
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            f"--device is {args.device}, and torch {torch.__version__} finds no CUDA device here; "
            "--device cpu --small tries the benchmark out on a CPU"
        )
    sizes, dtype = SMALL if args.small else FULL, getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        if args.model:
            folder, what = args.model, str(args.model)
        else:
            what = sizes.what
            print(f"writing {what} ...", file=sys.stderr)
            folder = write_random_checkpoint(Path(made), text_sizes=sizes.text, vision_sizes=sizes.vision)
        about = describe(device) | {"checkpoint": what, "dtype": args.dtype, "rounds": args.rounds}
        print("\n".join(f"{name}: {value}" for name, value in about.items()))
        figures: dict[str, list[Figure]] = {}
        with closing(Bench(folder, sizes, device=device, dtype=dtype, rounds=args.rounds)) as bench:
            for part in args.parts:
                figures[part] = PARTS[part](bench)
                for figure in figures[part]:
                    print(_line(figure), flush=True)
    if args.json:
        plain = {part: [asdict(one) for one in some] for part, some in figures.items()}
        args.json.write_text(json.dumps({"about": about, "figures": plain}, indent=2) + "\n")
    return 0


def describe(device: torch.device) -> dict[str, str]:
    """The machine and the versions that figures depend on."""
    gpu = device.type == "cuda"
    return {
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if gpu else f"{device} ({platform.machine()})",
        "vlmserve": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        **{name: _version(name) for name in ("triton", "transformers")},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no repository here"


def _line(figure: Figure) -> str:
    text = f"{figure.name}: {_shown(figure.ours)} {figure.unit}"
    if figure.theirs is not None and figure.ratio is not None:
        text += f"; transformers {_shown(figure.theirs)}; {_shown(figure.ratio)} times as good"
    return f"{text}; {figure.about}" if figure.about else text


def _shown(spread: Spread) -> str:
    return f"{spread.median:.4g}" if spread.least == spread.most else spread.shown(".4g")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve bench gpu",
        description="The engine on one GPU, offline, beside transformers' generate on the same: vision tower, prefill, "
        "decoding, first token about a picture, embeddings found in memory, peak memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: random weights shaped as Qwen3-VL-2B")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ..., or cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="in which type")
    parser.add_argument("--small", action="store_true", help="a tiny model and short answers: to try the benchmark out")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="times each alternative runs, in turns")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    return parser
