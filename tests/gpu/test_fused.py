"""The GPU's fused operators against torch's, in the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.vlmserve_common.kernels.paged_step import make_step, off
from vlmserve.executor.sampler import choose
from vlmserve.models.attention.base import Projected, RadixAttention, position_and_store
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.layers import GatedMLP, RMSNorm
from vlmserve_common.compute.rotary import rotation
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.attention import HeadNorms

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def torch_again() -> Iterator[None]:
    yield
    fused.activate("torch", torch.device("cpu"))


def by_both(device: torch.device, run) -> tuple[torch.Tensor, torch.Tensor]:
    """What run() makes with the fused operators, and with torch's."""
    made = []
    for choice in ("triton", "torch"):
        fused.activate(choice, device)
        with torch.inference_mode():
            made.append(run())
    return made[0], made[1]


def rows_and_sizes(device: torch.device) -> list[tuple[int, int]]:
    return [(1, 2048), (64, 4096), (8192, 4096), (7, 3584)] if device.type == "cuda" else [(3, 96)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(device, dtype):
    for rows, size in rows_and_sizes(device):
        norm = RMSNorm(size, 1e-6).to(device, dtype)
        norm.weight.normal_(1.0, 0.1)
        x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
        assert off(*by_both(device, lambda norm=norm, x=x: norm(x))) <= ROUNDING[dtype]
        sums: list[torch.Tensor] = []

        def add(norm=norm, x=x, residual=residual, sums=sums) -> torch.Tensor:
            sums.append(residual.clone())
            return norm.add(x.clone(), sums[-1])

        assert off(*by_both(device, add)) <= ROUNDING[dtype]
        assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(device, dtype):
    for rows, size in rows_and_sizes(device):
        inner = 3 * size
        mlp = GatedMLP(size, inner, activation("silu"), bias=False).to(device, dtype)
        for parameter in mlp.parameters():
            parameter.normal_(0, parameter.shape[1] ** -0.5)
        x = torch.randn(rows, size, device=device).to(dtype)
        assert off(*by_both(device, lambda mlp=mlp, x=x: mlp(x))) <= 2 * ROUNDING[dtype]


@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions(device, dtype, cache_dtype, normed):
    """Queries, and the cache afterwards: what was written, and what was not."""
    heads, kv_heads, dim = (32, 8, 128) if device.type == "cuda" else (4, 2, 16)
    tokens = 700 if device.type == "cuda" else 9
    norms = None
    if normed:
        q_weight, k_weight = (torch.randn(dim, device=device).to(dtype) for _ in range(2))
        norms = HeadNorms(q_weight=q_weight, k_weight=k_weight, eps=1e-6)
    caches = []

    def run() -> torch.Tensor:
        step = make_step(
            [(5, tokens), (0, 1)], heads=(heads, kv_heads), dim=dim, dtype=dtype, stored=cache_dtype, device=device
        )
        batch = step.batch(TorchAttentionBackend())
        layer = RadixAttention(heads, dim, 1.0, kv_heads, layer_id=0)
        angles = torch.randn((tokens + 1, dim // 2), generator=torch.Generator().manual_seed(0))
        caches.append(step.cache.layers[0])
        return position_and_store(Projected(step.qkv.clone(), rotation(angles.to(device), dtype), norms), layer, batch)

    assert off(*by_both(device, run)) <= ROUNDING[dtype]
    for found, wanted in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
        found, wanted = found.float(), wanted.float()
        assert torch.equal(found.isnan(), wanted.isnan()), "what belongs to others is left as it was"
        least = 0.02 if cache_dtype else ROUNDING[dtype]  # a value between two may go to either
        assert off(found.nan_to_num(), wanted.nan_to_num()) <= least


def test_random_choices(device):
    rows, vocabulary = (64, 151936) if device.type == "cuda" else (5, 300)
    scores = torch.randn(rows, vocabulary, device=device).log_softmax(-1)
    scores[:, ::7] = -torch.inf
    seeds = torch.arange(rows, device=device) * 7919
    places = torch.arange(rows, device=device) % 11
    found, wanted = by_both(device, lambda: choose(scores, None, seeds, places))
    assert torch.equal(found, wanted)
    kept, ids = scores.topk(50)
    found, wanted = by_both(device, lambda: choose(kept.contiguous(), ids, seeds, places))
    assert torch.equal(found, wanted)
