"""What adapters add to packed products: a row's is of its own adapter, and does not depend on other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.products import random, true_product
from vlmserve_common.kernels.lora import added, pack_factors
from vlmserve_common.kernels.packed_linear import linear, pack

pytestmark = pytest.mark.usefixtures("operators")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-5}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    half=st.integers(1, 90),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    gated=st.booleans(),
    ranks=st.lists(st.sampled_from([0, 1, 4, 5, 16]), min_size=1, max_size=3).filter(any),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_each_row_gets_what_its_own_adapter_adds(rows, half, sizes, gated, ranks, dtype, seed):
    sizes = [sizes[0], sizes[0]] if gated else sizes
    inner, outer, parts = 2 * half, sum(sizes), len(sizes)
    x, weight = random(rows, inner, dtype=dtype, seed=seed), random(outer, inner, dtype=dtype, seed=seed + 1)
    adapters = [  # a rank of 0: it has nothing here
        (
            random(parts * rank, inner, dtype=dtype, seed=seed + 2 + rank) / inner**0.5,
            random(outer, rank, dtype=dtype, seed=seed + 3 + rank),
        )
        for rank in ranks
    ]
    factors = [pack_factors(a, b, sizes, gated=gated) if len(a) else None for a, b in adapters]
    of_row = np.random.default_rng(seed).integers(-1, len(ranks), rows).astype(np.int32)
    got = linear(x, pack(weight, None, gated=gated), act="silu" if gated else "", added=added(x, factors, of_row))
    for row, own in enumerate(of_row.tolist()):
        whole = weight.double()
        if own >= 0 and ranks[own]:
            a, b = adapters[own]
            changes = zip(a.split(ranks[own]), b.split(sizes), strict=True)
            whole = whole + torch.cat([part.double() @ of.double() for of, part in changes])
        truth = true_product(x[row : row + 1], whole, None, None, act="silu" if gated else "", gated=gated)
        largest = float(truth.abs().max()) + 1
        assert float((got[row].double() - truth[0]).abs().max()) < TOLERANCE[dtype] * largest * outer**0.5
    alone = [added(x[row : row + 1], factors, of_row[row : row + 1]) for row in range(rows)]
    assert torch.equal(added(x, factors, of_row), torch.cat(alone))
