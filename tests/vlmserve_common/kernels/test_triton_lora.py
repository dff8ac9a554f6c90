"""What adapters add, in Triton: a row's is of its own adapter, and does not depend on other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES, seeded

kernels = pytest.importorskip("vlmserve_common.kernels.gpu.lora")


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 6),
    inputs=st.sampled_from([1, 40, 256, 300]),
    sizes=st.lists(st.sampled_from([1, 17, 140]), min_size=1, max_size=3),
    ranks=st.lists(st.sampled_from([0, 1, 5, 16]), min_size=1, max_size=3).filter(any),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_each_row_gets_what_its_own_adapter_adds(rows, inputs, sizes, ranks, dtype, seed):
    outputs, x = sum(sizes), seeded(seed, rows, inputs, dtype=dtype)
    parts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(DEVICE, torch.int32)
    factors = [
        kernels.DeviceFactors(
            a=seeded(seed + rank, len(sizes) * rank, inputs, dtype=dtype) / inputs**0.5,
            b=seeded(seed + rank + 1, rank, outputs, dtype=dtype),
            parts=parts,
        )
        if rank
        else None
        for rank in ranks
    ]
    of_row = np.random.default_rng(seed).integers(-1, len(ranks), rows)
    numbers = torch.tensor(of_row, dtype=torch.int32, device=DEVICE)
    table = kernels.FactorsTable.of(factors, DEVICE)
    found = kernels.added(x, table, numbers)
    for row, own in enumerate(of_row.tolist()):
        wanted = torch.zeros(outputs, dtype=torch.float64)
        if own >= 0 and factors[own] is not None:
            a, b = (factor.double().cpu() for factor in (factors[own].a, factors[own].b))
            inner = (x[row].double().cpu() @ a.t()).split(ranks[own])
            of_parts = zip(inner, b.split(sizes, dim=1), strict=True)
            wanted = torch.cat([numbers_of_part @ columns for numbers_of_part, columns in of_parts])
        # rounded once; sums of up to 300 products, and of 16, are float32
        sums = 64 * torch.finfo(torch.float32).eps * (1 + float(wanted.abs().max()))
        assert torch.allclose(found[row].double().cpu(), wanted, rtol=torch.finfo(dtype).eps, atol=sums)
    alone = [kernels.added(x[row : row + 1], table, numbers[row : row + 1]) for row in range(rows)]
    assert torch.equal(found, torch.cat(alone))
