"""`vlmserve bench loading`: the peak of host memory of each rank of a model until it can compute.

`python -m vlmserve.commands.bench.loading FOLDER RANK TP MODE` loads one rank, so that its memory is its own, and
prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from vlmserve.commands.bench.checkpoints import SHAPES, ModelShape, published_tensors, save_weights, write_folder
from vlmserve.commands.bench.figures import bench_parser
from vlmserve.commands.bench.processes import process_memory, run_python
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.random_weights import random_model
from vlmserve.models.registry import load_model
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.shard import Shard
from vlmserve_common.kernels.library import activate

_ABOUT = """\
Load a checkpoint rank by rank on the CPU, each in a fresh process, and tell the peak of its resident memory. The limit
is 1.15 times its weights and 1 GiB. Files are read, not mapped, so the page cache, which the ranks of a machine share,
does not count.
"""
_GIB = 1024**3
_TIMEOUT_S = 1800.0
_ALLOWED_PART, _ALLOWED_BESIDE = 1.15, _GIB


@dataclass(frozen=True, kw_only=True)
class RankLoading:
    """The loading of one rank.

    `share` is the bytes of its weights, as they are stored, and `seconds` the time of reading. `start`, `loaded` and
    `packed` are peaks of resident memory (VmHWM): before anything is read, when all is read, and when it is laid out
    for our operators.
    """

    rank: int
    share: int
    start: int
    loaded: int
    packed: int
    seconds: float

    @property
    def allowed(self) -> float:
        """The limit of the peak in bytes."""
        return self.share * _ALLOWED_PART + _ALLOWED_BESIDE


def main(argv: Sequence[str]) -> int:
    """Measure one rank after the other, and print a table, or JSON."""
    parser = bench_parser("loading", _ABOUT, has_json=False)
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a checkpoint folder")
    text = "without --model: the published shape of a checkpoint that is written for this"
    add("--model-shape", choices=list(SHAPES), default="8b", help=text)
    add("--gib", type=float, default=4.0, help="size of its weights, reached by leaving out layers")
    add("--tp", type=int, default=2, help="ranks that share the model")
    text = "as the setting of the server"
    add("--quantization", choices=("none", "int8", "int4", "w8a8"), default="none", help=text)
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with _checkpoint(args) as folder:
        found = measure_loading(folder, tp=args.tp, mode=args.quantization)
    if args.json:
        print(json.dumps([asdict(one) | {"allowed": int(one.allowed)} for one in found], indent=2))
    else:
        print(table(found))
    return 0


def measure_loading(folder: Path, *, tp: int, mode: str = "none") -> list[RankLoading]:
    """Load each rank in a fresh process. mode: of --quantization. Raises EngineError if one does not load."""
    found = []
    for rank in range(tp):
        words = ["-m", "vlmserve.commands.bench.loading", str(folder), str(rank), str(tp), mode]
        said = run_python(words, f"rank {rank} of {tp} does not load", _TIMEOUT_S)
        found.append(RankLoading(rank=rank, **json.loads(said.splitlines()[-1])))
    return found


def with_layers(shape: ModelShape, least: int) -> ModelShape:
    """Return the shape with the fewest layers whose weights take `least` bytes in bfloat16, or with all layers."""
    whole = int(shape.text["num_hidden_layers"])
    fewest = max(1, len(shape.vision.get("deepstack_visual_indexes", ())))
    few, more = (_bytes(_cut(shape, layers)) for layers in (fewest, fewest + 1))
    return _cut(shape, min(whole, fewest + max(0, -(-(least - few) // (more - few)))))


def write_filled(folder: Path, shape: ModelShape) -> Path:
    """Write a bfloat16 checkpoint in shards, as published. All its numbers are equal, as nothing is computed."""
    write_folder(folder, shape)
    model = random_model(folder, "meta", torch.bfloat16)
    for child in model.modules():
        if isinstance(child, Experts):
            child.lay_out("inputs_first")
    tensors = published_tensors(model)
    save_weights(
        folder, ((name, torch.full_like(one, 0.01, dtype=torch.bfloat16, device="cpu")) for name, one in tensors)
    )
    return folder


def table(found: Sequence[RankLoading]) -> str:
    """Return the ranks as a Markdown table."""
    rows = ["| rank | weights, GiB | at the start | read | packed | allowed | | reading |", "|" + "---|" * 8]
    for one in found:
        sizes = (one.share, one.start, one.loaded, one.packed, one.allowed)
        shown = " | ".join(f"{size / _GIB:.2f}" for size in sizes)
        verdict = "met" if one.packed <= one.allowed else "not met"
        rows.append(f"| {one.rank} | {shown} | {verdict} | {one.share / one.seconds / 1e9:.2f} GB/s |")
    return "\n".join(rows)


def _cut(shape: ModelShape, layers: int) -> ModelShape:
    return replace(shape, text=dict(shape.text) | {"num_hidden_layers": layers})


def _bytes(shape: ModelShape) -> int:
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


def load_rank(folder: Path, rank: int, tp: int, mode: str) -> dict[str, float]:
    """Load one rank in this process, and return the fields of `RankLoading` in bytes and seconds."""
    threads = max(1, available_cpus() // tp)
    torch.set_num_threads(threads)
    activate("auto", threads=threads)
    start = _peak()
    before = time.perf_counter()
    model = load_model(folder, "cpu", with_tower=rank == 0, comm=Communicator(Shard(rank, tp)))
    seconds = time.perf_counter() - before
    share = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    loaded = _peak()
    model.pack(None if mode == "none" else mode)  # type: ignore[arg-type]
    return {"share": share, "start": start, "loaded": loaded, "packed": _peak(), "seconds": seconds}


def _peak() -> int:
    return process_memory(os.getpid(), "VmHWM")


if __name__ == "__main__":
    print(json.dumps(load_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
