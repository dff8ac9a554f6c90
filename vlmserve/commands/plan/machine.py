"""This machine's CPU as a device to plan for. Its rates are measured in about a second."""

from __future__ import annotations

import time

import torch

from vlmserve.commands.plan.gpus import Gpu
from vlmserve.engine.encoder import product_rate
from vlmserve_common.compute.cpus import available_cpus, cpu_name
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.memory import available_host_memory
from vlmserve_common.kernels.library import activate, torch_threads

_INNER, _OUTER, _WEIGHTS = 2048, 8192, 12
_ROUNDS = 8


def this_cpu() -> Gpu:
    """Measure this machine's CPU, as the engine computes on it."""
    threads = available_cpus()
    operators = activate("auto", threads=threads)
    torch.set_num_threads(torch_threads(threads, torch.bfloat16))
    return Gpu(
        name=f"{cpu_name()}, {threads} threads, {operators}",
        memory=available_host_memory(),
        bandwidth=threads * _read_rate(),
        flops=threads * product_rate(torch.bfloat16, _INNER, _OUTER),
        is_cpu=True,
    )


def _read_rate() -> float:
    """Return the bytes a second that one core of those that compute reads of weights which are larger than a cache. CPU
    time counts, so other work on this machine does not."""
    weights = [Linear(_INNER, _OUTER, bias=False).bfloat16() for _ in range(_WEIGHTS)]
    x, least = torch.ones(1, _INNER).bfloat16(), float("inf")
    with torch.inference_mode():
        for weight in weights:
            for parameter in weight.parameters():
                parameter.fill_(0.01)
            weight.pack()
        for _ in range(_ROUNDS):
            began = time.process_time()
            for weight in weights:
                weight(x)
            least = min(least, time.process_time() - began)
    return len(weights) * 2.0 * _INNER * _OUTER / least
