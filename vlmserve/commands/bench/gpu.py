"""`vlmserve bench gpu`: the engine on one GPU, offline, against what the device can and beside transformers.

Written without a GPU at hand: it has been run on CPUs only (`--device cpu --small`).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path

import torch

from vlmserve.commands.bench.gpu_figures import BARS, COUNTED, Figure, line, table, write_json
from vlmserve.commands.bench.gpu_measures import PARTS, Bench, Budget, measured
from vlmserve.commands.bench.gpu_shapes import FULL, SHAPES, SMALL, small, write_folder
from vlmserve.config.flags import CommandParser
from vlmserve_common.errors import EngineError
from vlmserve_common.version import __version__

_ROUNDS = 5
_BUDGET_S = 420.0
_WHERE = {"loading": ("cuda", "2b"), "kernels": ("cuda", "8b"), "counts": ("cpu", "8b")}
"""Parts that by default are measured on such a device and with this shape only."""


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for; prints a line a figure as they come, and a table. EngineError without a device."""
    args = _parser().parse_args(argv)
    budget = Budget(args.budget_s)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            f"--device is {args.device}, and torch {torch.__version__} finds no CUDA device here; "
            "--device cpu --small tries the benchmark out on a CPU"
        )
    shape = small(SHAPES[args.model_shape]) if args.small else SHAPES[args.model_shape]
    bars = {} if args.model else BARS[args.model_shape]
    if device.type == "cpu":
        bars = {**bars, **COUNTED}
        os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for GPUs are counted here; read with Triton's import
    counts = device.type == "cuda" and not args.small
    began = time.monotonic()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        what = str(args.model) if args.model else f"random weights, shaped as {shape.what}"
        about = describe(device) | {"model": what, "dtype": args.dtype, "rounds": str(args.rounds)}
        print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
        bench = Bench(
            folder=args.model or write_folder(Path(made), shape),
            work=SMALL if args.small else FULL,
            device=device,
            dtype=getattr(torch, args.dtype),
            rounds=args.rounds,
            budget=budget,
            load_format="auto" if args.model else "dummy",
        )
        with closing(bench):
            for part in args.parts or default_parts(args.model_shape, device):
                for figure in measured(part, bench):
                    figures.append(figure)
                    print(line(figure), flush=True)
                    if args.json:
                        write_json(args.json, about | _lasted(began), figures, bars, counts=counts)
    print(f"\n{table(figures, bars, counts=counts)}\n\n{_lasted(began)['seconds']} s in all")
    return 0


def default_parts(shape: str, device: torch.device) -> list[str]:
    """Of a model shape on a device."""
    here = (device.type, shape)
    return [part for part in PARTS if _WHERE.get(part, here) == here]


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
        **{name: _version(name) for name in ("triton", "flashinfer-python", "transformers")},
    }


def _lasted(began: float) -> dict[str, str]:
    return {"seconds": f"{time.monotonic() - began:.0f}"}


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


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve bench gpu",
        description="The engine on one GPU, offline: what the device reaches at copying and multiplying, how near to "
        "that prefill, decoding and the vision tower come, and transformers' generate with the same weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model-shape", choices=list(SHAPES), default="2b", help="random weights, shaped as published")
    parser.add_argument("--model", type=Path, help="a checkpoint folder instead")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ..., or cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="in which type")
    parser.add_argument("--small", action="store_true", help="a tiny model and little work: to try the benchmark out")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="most times that each is measured")
    parser.add_argument(
        "--budget-s", type=float, default=_BUDGET_S, help="seconds after which rounds and parts are left out"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), help="what to measure; default: all that is asked of the shape"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file, as they come")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
