"""The threads of the operators: all work is done, once, however many threads there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vlmserve_common.kernels import library
from vlmserve_common.kernels.packed_linear import PackedWeight, linear, pack


def _products(weight: PackedWeight, x: torch.Tensor, times: int) -> list[torch.Tensor]:
    return [linear(x, weight) for _ in range(times)]


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("watch_us", [0, 50])
def test_many_calls_in_a_row(operators: str, threads: int, watch_us: int) -> None:
    """More threads than cores, too: most of them come too late for a call, and in the midst of the next ones."""
    generator = torch.Generator().manual_seed(threads)
    weight = pack(torch.randn(2048, 64, generator=generator), None)
    x = torch.randn(16, 64, generator=generator)
    library.activate("auto", threads=1)
    (alone,) = _products(weight, x, 1)
    library.activate("auto", threads=threads, watch_us=watch_us)
    assert all(torch.equal(made, alone) for made in _products(weight, x, 300))


def test_two_callers_at_a_time(operators: str) -> None:
    weights = [pack(torch.randn(2048, 64, generator=torch.Generator().manual_seed(seed)), None) for seed in range(2)]
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    alone = [_products(weight, x, 1)[0] for weight in weights]
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda weight: _products(weight, x, 200), weights))
    for products, expected in zip(made, alone, strict=True):
        assert all(torch.equal(product, expected) for product in products)
