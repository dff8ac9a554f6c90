"""`vlmserve bench gpu`: its figures, the bars that they are held to, and how both are shown and written.

It has been run on CPUs only (`--device cpu --small`).
"""

from __future__ import annotations

import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from vlmserve.commands.bench.checkpoints import SHAPES, small, write_folder
from vlmserve.commands.bench.figures import Spread, bench_parser
from vlmserve.commands.bench.gpu.measures import PARTS, GpuFigure, measured
from vlmserve.commands.bench.gpu.run import FULL, SMALL, Budget, GpuRun
from vlmserve.config.flags import CommandParser
from vlmserve_common.errors import EngineError
from vlmserve_common.files import replacing
from vlmserve_common.version import __version__

NOT_MEASURED = "not measured"


class Bar(NamedTuple):
    """A limit of a figure's `value`."""

    sign: Literal["<=", ">="]
    limit: float

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"


_EVERY = {"overlap": Bar(">=", 0.9), "many-batched": Bar(">=", 3), "many-alone": Bar(">=", 8)}
_8B = {"decode-1": Bar("<=", 1.35), "decode-64": Bar("<=", 1.5), "prefill": Bar(">=", 0.6), "tower": Bar(">=", 0.45)}
BARS: Mapping[str, Mapping[str, Bar]] = MappingProxyType(
    {
        "2b": _EVERY | {"decode-1": Bar("<=", 2), "loading": Bar("<=", 20)},
        "8b": _EVERY | _8B,
        "qwen2.5-7b": _EVERY,
        "30b-a3b": _EVERY,
    }
)
"""The bars on one H200, by model shape and key of a figure: ratios to what the same run measures."""


def verdict(figure: GpuFigure, bar: Bar | None, *, counts: bool) -> str:
    """Return "met", "not met", "not measured" or "". counts: True on a GPU at full size, where bars have a meaning."""
    if bar is None:
        return ""
    if figure.value is None or not counts:
        return NOT_MEASURED
    met = figure.value <= bar.limit if bar.sign == "<=" else figure.value >= bar.limit
    return "met" if met else "not met"


def line(figure: GpuFigure) -> str:
    """Return a figure as a line, for people who wait."""
    if figure.error:
        return f"{figure.name}: {NOT_MEASURED}: {figure.error}"
    parts = [f"{_shown(figure.ours)} {figure.unit}".strip()] if figure.ours else []
    if figure.value is not None:
        parts.append(f"{figure.value:.3g} {figure.of}".strip())
    if figure.theirs:
        parts.append(f"transformers {_shown(figure.theirs)} {figure.unit}")
    return f"{figure.name}: {'; '.join([*parts, *[figure.about] * bool(figure.about)])}"


def table(figures: Sequence[GpuFigure], bars: Mapping[str, Bar], *, counts: bool) -> str:
    """Return all figures as a Markdown table, with a row for each bar whose figure is missing."""
    rows = [("figure", "ours", "transformers", "ratio to ...", "bar", ""), ("---",) * 6]
    for figure in figures:
        value = "" if figure.value is None else f"{figure.value:.3g} {figure.of}"
        ours = f"{_shown(figure.ours)} {figure.unit}" if figure.ours else figure.error and NOT_MEASURED
        bar = bars.get(figure.key)
        met = verdict(figure, bar, counts=counts)
        rows.append((figure.name, ours, _shown(figure.theirs), value, str(bar or ""), met))
    there = {figure.key for figure in figures}
    rows += [(key, "", "", "", str(bar), NOT_MEASURED) for key, bar in bars.items() if key not in there]
    return "\n".join("| " + " | ".join(cell.replace("|", "/").strip() for cell in row) + " |" for row in rows)


def write_figures(
    path: Path, about: Mapping[str, str], figures: Sequence[GpuFigure], bars: Mapping[str, Bar], *, counts: bool
) -> None:
    """Write all figures so far. A reader sees the old file or the new one."""
    rows: list[dict[str, Any]] = [
        asdict(one) | {"bar": str(bars.get(one.key, "")), "verdict": verdict(one, bars.get(one.key), counts=counts)}
        for one in figures
    ]
    with replacing(path, on_disk=False) as part:
        part.write_text(json.dumps({"about": dict(about), "figures": rows}, indent=2) + "\n", encoding="utf-8")


def _shown(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.4g}" if spread.least == spread.most else spread.shown(".4g")


_ABOUT = """\
The engine on one GPU, offline: what the device reaches at copying and multiplying, how near to that prefill, decoding
and the vision tower come, and transformers' generate with the same weights.
"""


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for, print a line for each figure, and a table. Raises EngineError without a device."""
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
    counts = device.type == "cuda" and not args.small
    began = time.monotonic()
    figures: list[GpuFigure] = []
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        what = str(args.model) if args.model else f"random weights, shaped as {shape.what}"
        about = describe(device) | {"model": what, "dtype": args.dtype, "rounds": str(args.rounds)}
        print("\n".join(f"{name}: {value}" for name, value in about.items()), flush=True)
        run = GpuRun(
            folder=args.model or write_folder(Path(made), shape),
            load=SMALL if args.small else FULL,
            device=device,
            dtype=getattr(torch, args.dtype),
            rounds=args.rounds,
            budget=budget,
            load_format="auto" if args.model else "dummy",
        )
        with closing(run):
            for part in args.parts or default_parts(args.model_shape, device):
                for figure in measured(part, run):
                    figures.append(figure)
                    print(line(figure), flush=True)
                    if args.json:
                        write_figures(args.json, about | _lasted(began), figures, bars, counts=counts)
    print(f"\n{table(figures, bars, counts=counts)}\n\n{_lasted(began)['seconds']} s in all")
    return 0


def default_parts(shape: str, device: torch.device) -> list[str]:
    """Return the parts that are measured by default: a start from files for the smallest model, and on a GPU alone."""
    return [part for part in PARTS if part != "loading" or (device.type, shape) == ("cuda", "2b")]


def describe(device: torch.device) -> dict[str, str]:
    """Return the machine and the versions that figures depend on."""
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


def _parser() -> CommandParser:
    parser = bench_parser("gpu", _ABOUT, rounds=5)
    add = parser.add_argument
    add("--model-shape", choices=list(SHAPES), default="2b", help="random weights, shaped as published")
    add("--model", type=Path, help="a checkpoint folder instead")
    add("--device", default="cuda", help="cuda, cuda:1 ..., or cpu")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="in which type models compute")
    add("--small", action="store_true", help="a tiny model and little work, to try the benchmark out")
    add("--budget-s", type=float, default=420.0, help="seconds after which rounds and parts are left out")
    add("--parts", nargs="+", choices=list(PARTS), help="what to measure (default: all that is asked of the shape)")
    return parser
