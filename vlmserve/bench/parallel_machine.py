"""What a machine gives two processes of one thread over one: weights read, and products computed, by our operators."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Literal

import torch

from vlmserve_common.compute.linear import Linear
from vlmserve_common.kernels.library import activate
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.stop_signals import stop_signals_held

Load = Literal["reads", "products"]
# Like the MLP of Qwen3-0.6B; together far larger than a cache.
_INNER, _OUTER, _WEIGHTS = 1024, 6144, 24
_ROWS: dict[Load, int] = {"reads": 1, "products": 256}
_TIMES: dict[Load, int] = {"reads": 8, "products": 1}


class Machine:
    """Two processes that compute when they are told to; to be closed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._children: list[ChildProcess] = []
        for number in range(2):
            with stop_signals_held():
                child = ChildProcess(f"load-{number}", _run, (), title=f"load {number}", log_level="warning")
                self._stack.callback(child.stop)
            self._children.append(child)
        for child in self._children:
            child.take_report()

    def seconds(self, load: Load, processes: int) -> float:
        """That so many of them take, each for the same work, at the same time."""
        pipes: list[Connection] = [child.pipe for child in self._children[:processes]]
        for pipe in pipes:
            pipe.send_bytes(load.encode())
        spans = []
        for pipe in pipes:
            began, ended = pipe.recv_bytes().decode().split()
            spans.append((float(began), float(ended)))
        return max(ended for _, ended in spans) - min(began for began, _ in spans)

    def close(self) -> None:
        """End the processes."""
        self._stack.close()


def _run(parent: Parent) -> None:
    torch.set_num_threads(1)
    activate("auto", threads=1)
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(_WEIGHTS):
        weight = Linear(_INNER, _OUTER, bias=False).bfloat16()
        for parameter in weight.parameters():
            parameter.normal_(generator=generator)
        weight.pack()
        weights.append(weight)
    loads: dict[str, torch.Tensor] = {load: torch.ones(rows, _INNER).bfloat16() for load, rows in _ROWS.items()}
    parent.ready({})
    while True:
        load = parent.receive().decode()
        with torch.inference_mode():
            began = time.monotonic()
            for _ in range(_TIMES["reads" if load == "reads" else "products"]):
                for weight in weights:
                    weight(loads[load])
        parent.send(f"{began} {time.monotonic()}".encode())
