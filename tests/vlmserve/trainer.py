"""A trainer: number 0 of a group of torch.distributed, which broadcasts the tensors of checkpoints.

    python -m tests.vlmserve.trainer PORT WORLD_SIZE GROUP

Each line of its standard input names a checkpoint folder, and with a number behind it after how many tensors to die. It
answers with a line when it has joined, and after each checkpoint.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d


def tensors_of(folder: Path | str) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(Path(folder).glob("*.safetensors")) for name, one in load_file(file).items()}


def main() -> None:
    port, size, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=wait))
    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=wait
    )
    c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    print("joined", flush=True)
    for line in sys.stdin:
        folder, *most = line.split()
        for number, tensor in enumerate(tensors_of(folder).values()):
            if most and number == int(most[0]):
                os._exit(1)
            dist.broadcast(tensor, 0, group=group)
        print("sent", flush=True)


if __name__ == "__main__":
    main()
