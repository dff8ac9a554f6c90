"""Extend attention in Triton: the true one for all shapes; a token's answer is its own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.vlmserve_common.kernels.paged_step import DEVICE, QUICK_AND_SLOW_DTYPES, PagedStep, make_step, tolerance
from vlmserve_common.kernels.gpu.extend import extend_attention, extend_tiles, tile_tokens

REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=3)


def attend(step: PagedStep, scale: float = 0.3, requests: list[int] | None = None) -> torch.Tensor:
    """Into an output that holds NaN."""
    out = torch.full(step.q.shape, torch.nan, dtype=step.q.dtype, device=DEVICE)
    tokens = tile_tokens(step.q.dtype, step.layer, step.q.shape[1])
    chosen = np.arange(len(step.lengths)) if requests is None else np.array(requests)
    tiles = extend_tiles(*np.array(step.lengths).T, tokens, chosen)
    extend_attention(
        step.q, step.layer, step.table, step.req_pool_indices, step.seq_lens, step.starts,
        torch.from_numpy(tiles).to(DEVICE), scale=scale, out=out,
    )  # fmt: skip
    return out


def check(step: PagedStep, scale: float = 0.3) -> None:
    atol = tolerance(step.q.dtype)
    torch.testing.assert_close(attend(step, scale).double(), step.truth(scale), atol=atol, rtol=atol)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    REQUESTS,
    st.sampled_from([(1, 1), (2, 2), (6, 2), (7, 1), (8, 1), (10, 2)]),
    st.sampled_from([16, 64, 72, 80, 96, 128, 256]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 9),
)
def test_it_is_the_true_one(lengths, heads, dim, page, seed):
    check(make_step(lengths, heads=heads, dim=dim, page=page, seed=seed))


@pytest.mark.parametrize(("dtype", "stored"), QUICK_AND_SLOW_DTYPES)
def test_dtypes(dtype, stored):
    check(make_step([(70, 20), (0, 65)], heads=(4, 2), dim=32, dtype=dtype, stored=stored))


# of blocks of 16 keys: tiles that begin and end at their edges, and beside them
@pytest.mark.parametrize(("past", "new"), [(0, 1), (0, 16), (15, 1), (15, 2), (16, 16), (31, 33), (100, 8)])
def test_edges_of_blocks(past, new):
    check(make_step([(past, new)]))


def test_large_scores():
    step = make_step([(30, 40)])
    torch.testing.assert_close(attend(step, 30.0).double(), step.truth(30.0), atol=1e-4, rtol=1e-4)


def test_neither_batch_mates_nor_chunks_change_a_bit():
    step = make_step([(20, 50), (0, 3), (33, 1)])
    together = attend(step)
    for request, (first, last) in enumerate(step.starts.unfold(0, 2, 1).tolist()):
        assert torch.equal(attend(step.alone(request)), together[first:last])
    first = step.alone(0)
    chunks = [(0, 7), (7, 40), (40, 50)]
    for begin, end in chunks:
        chunk = PagedStep(
            lengths=[(20 + begin, end - begin)],
            qkv=first.qkv[begin:end],
            cache=step.cache,
            table=step.table,
            req_pool_indices=first.req_pool_indices,
            seq_lens=torch.tensor([20 + end], dtype=torch.int32, device=DEVICE),
            starts=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
        )
        assert torch.equal(attend(chunk), together[begin:end])


def test_some_requests_among_others():
    step = make_step([(4, 3), (20, 1), (0, 2)])
    out = attend(step, requests=[0, 2])
    rows = [0, 1, 2, 4, 5]
    torch.testing.assert_close(out[rows].double(), step.truth(0.3)[rows], atol=1e-5, rtol=1e-5)
    assert out[3].isnan().all()


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 99)), min_size=1, max_size=6), st.integers(1, 128))
def test_tiles_have_every_token_once_and_most_keys_first(lengths, tokens):
    prefixes, new = zip(*lengths, strict=True)
    tiles = extend_tiles(np.array(prefixes), np.array(new), tokens, np.arange(len(new))).tolist()
    wanted = {(request, first) for request, count in enumerate(new) for first in range(0, count, tokens)}
    assert {tuple(tile) for tile in tiles} == wanted
    assert len(tiles) == len(wanted)
    keys = [prefixes[request] + min(first + tokens, new[request]) for request, first in tiles]
    assert keys == sorted(keys, reverse=True)
