"""One rank's loading, in a process of its own, so that its memory is its own: prints JSON. FOLDER RANK TP MODE"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from vlmserve.commands.bench.processes import process_memory
from vlmserve.models.registry import load_model
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.shard import Shard
from vlmserve_common.kernels.library import activate


def main(folder: Path, rank: int, tp: int, mode: str) -> dict[str, float]:
    """Bytes and seconds. mode: of `--quantization`. start: what the process had at the most before it read anything;
    loaded, packed: peaks since; share: of its weights, as they are stored."""
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
    found = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    print(json.dumps(found))
