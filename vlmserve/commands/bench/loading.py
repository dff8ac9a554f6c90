"""`vlmserve bench loading`: how much host memory each rank of a model takes at the most until it can compute."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from vlmserve.commands.bench.gpu_shapes import SHAPES, Shape, write_folder
from vlmserve.commands.bench.random_checkpoint import published_tensors, save_weights
from vlmserve.config.flags import CommandParser
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.random_weights import random_model
from vlmserve_common.compute.experts import Experts
from vlmserve_common.errors import EngineError

_GIB = 1024**3
_TIMEOUT_S = 1800.0
_ALLOWED_PART, _ALLOWED_BESIDE = 1.15, _GIB


@dataclass(frozen=True, kw_only=True)
class RankLoading:
    """share: bytes of a rank's weights, as they are stored. start, loaded, packed: peaks of its resident memory
    (VmHWM) before anything is read, when all is, and when it is laid out for our operators. seconds: of reading."""

    rank: int
    share: int
    start: int
    loaded: int
    packed: int
    seconds: float

    @property
    def allowed(self) -> float:
        """Bytes that the peak is held to."""
        return self.share * _ALLOWED_PART + _ALLOWED_BESIDE


def main(argv: Sequence[str]) -> int:
    """Measure one rank after the other; prints a table, or JSON."""
    args = _parser().parse_args(argv)
    with _checkpoint(args) as folder:
        found = measure_loading(folder, tp=args.tp, mode=args.quantization)
    if args.json:
        print(json.dumps([asdict(one) | {"allowed": int(one.allowed)} for one in found], indent=2))
    else:
        print(table(found))
    return 0


def measure_loading(folder: Path, *, tp: int, mode: str = "none") -> list[RankLoading]:
    """Of each rank, in a fresh process. EngineError with the reason where one does not load."""
    found = []
    for rank in range(tp):
        words = ["-m", "vlmserve.commands.bench.loading_rank", str(folder), str(rank), str(tp), mode]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise EngineError(f"rank {rank} of {tp} does not load: {last}")
        found.append(RankLoading(rank=rank, **json.loads(done.stdout.splitlines()[-1])))
    return found


def with_layers(shape: Shape, least: int) -> Shape:
    """With so many layers that the weights take `least` bytes in bfloat16, or all that it has."""
    whole = int(shape.text["num_hidden_layers"])
    fewest = max(1, len(shape.vision.get("deepstack_visual_indexes", ())))
    few, more = (_bytes(_cut(shape, layers)) for layers in (fewest, fewest + 1))
    return _cut(shape, min(whole, fewest + max(0, -(-(least - few) // (more - few)))))


def write_filled(folder: Path, shape: Shape) -> Path:
    """A checkpoint in shards, as published, in bfloat16; all its numbers are alike, for nothing is computed."""
    write_folder(folder, shape)
    model = random_model(folder, "meta", torch.bfloat16)
    for child in model.modules():
        if isinstance(child, Experts):
            child.lay_out("inputs_first")
    save_weights(
        folder,
        (
            (name, torch.full(tuple(tensor.shape), 0.01, dtype=torch.bfloat16))
            for name, tensor in published_tensors(model)
        ),
    )
    return folder


def table(found: Sequence[RankLoading]) -> str:
    """In Markdown."""
    rows = ["| rank | weights, GiB | at the start | read | packed | allowed | | reading |", "|" + "---|" * 8]
    for one in found:
        sizes = (one.share, one.start, one.loaded, one.packed, one.allowed)
        shown = " | ".join(f"{size / _GIB:.2f}" for size in sizes)
        verdict = "met" if one.packed <= one.allowed else "not met"
        rows.append(f"| {one.rank} | {shown} | {verdict} | {one.share / one.seconds / 1e9:.2f} GB/s |")
    return "\n".join(rows)


def _cut(shape: Shape, layers: int) -> Shape:
    return replace(shape, text=dict(shape.text) | {"num_hidden_layers": layers})


def _bytes(shape: Shape) -> int:
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        return weight_bytes(random_model(write_folder(Path(made), shape), "meta", torch.bfloat16))


@contextmanager
def _checkpoint(args: argparse.Namespace) -> Iterator[Path]:
    if args.model is not None:
        yield args.model
        return
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        shape = with_layers(SHAPES[args.model_shape], int(args.gib * _GIB))
        print(f"{shape.what} with {shape.text['num_hidden_layers']} layers", file=sys.stderr)
        yield write_filled(Path(made), shape)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve bench loading",
        description="Load a checkpoint rank by rank on the CPU, each in a fresh process, and tell how much resident "
        "memory that took at the most: allowed are its weights x 1.15 and 1 GiB. Files are read, not mapped, so the "
        "page cache, which ranks of a machine share, is not in it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint folder")
    parser.add_argument(
        "--model-shape", choices=list(SHAPES), default="8b", help="without one: written for this, shaped as published"
    )
    parser.add_argument("--gib", type=float, default=4.0, help="of its weights, by leaving out layers")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share it")
    parser.add_argument(
        "--quantization", choices=("none", "int8", "int4"), default="none", help="as the server's setting"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
