"""What a machine gives two processes of one thread over one: weights read, and products computed, by our operators."""

from __future__ import annotations

import itertools
import json
import statistics
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
# A sample takes about as long as a decode step; whoever is interrupted in one of them still has the others.
_OF_A_SAMPLE: dict[Load, int] = {"reads": _WEIGHTS, "products": 2}
_SAMPLES = 12


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
        """That so many of them take, each for the same work, at the same time: medians over samples, their mean over
        processes."""
        pipes: list[Connection] = [child.pipe for child in self._children[:processes]]
        for pipe in pipes:
            pipe.send_bytes(load.encode())
        return statistics.mean(statistics.median(json.loads(pipe.recv_bytes())) for pipe in pipes)

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
    loads = {load: (torch.ones(rows, _INNER).bfloat16(), _OF_A_SAMPLE[load]) for load, rows in _ROWS.items()}
    turns = itertools.cycle(weights)
    parent.ready({})
    while True:
        x, count = loads["reads" if parent.receive() == b"reads" else "products"]
        samples = []
        with torch.inference_mode():
            for _ in range(_SAMPLES):
                began = time.perf_counter()
                for weight in itertools.islice(turns, count):
                    weight(x)
                samples.append(time.perf_counter() - began)
        parent.send(json.dumps(samples).encode())
