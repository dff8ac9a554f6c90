"""Decode attention in Triton: the true one for all shapes; a request's answer is its own, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.vlmserve_common.kernels.paged_step import DEVICE, QUICK_AND_SLOW_DTYPES, PagedStep, make_step, tolerance
from vlmserve_common.kernels.gpu import decode
from vlmserve_common.kernels.gpu.decode import SplitWorkspace, decode_attention, most_splits

HISTORIES = st.lists(st.integers(1, 70), min_size=1, max_size=3)


def attend(step: PagedStep, scale: float = 0.3, **only) -> torch.Tensor:
    """Into an output and with a workspace that hold NaN."""
    _, heads, dim = step.q.shape
    shape = {"batch": len(step.lengths), "heads": heads, "kv_heads": step.layer.keys.shape[1], "dim": dim}
    workspace = SplitWorkspace.make(**shape, context=step.table.shape[1], device=DEVICE)
    out = torch.full(step.q.shape, torch.nan, dtype=step.q.dtype, device=DEVICE)
    for tensor in (workspace.partial, workspace.logs):
        tensor.fill_(torch.nan)
    decode_attention(
        step.q, step.layer, step.table, step.req_pool_indices, step.seq_lens,
        scale=scale, out=out, workspace=workspace, **only,
    )  # fmt: skip
    return out


def check(step: PagedStep, scale: float = 0.3) -> None:
    atol = tolerance(step.q.dtype)
    torch.testing.assert_close(attend(step, scale).double(), step.truth(scale), atol=atol, rtol=atol)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    HISTORIES,
    st.sampled_from([(1, 1), (2, 2), (6, 2), (7, 1), (16, 2), (20, 1)]),
    st.sampled_from([16, 64, 72, 80, 96, 128, 256]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 9),
)
def test_it_is_the_true_one(histories, heads, dim, page, seed):
    check(make_step([(length - 1, 1) for length in histories], heads=heads, dim=dim, page=page, seed=seed))


@pytest.mark.parametrize(("dtype", "stored"), QUICK_AND_SLOW_DTYPES)
def test_dtypes(dtype, stored):
    check(make_step([(69, 1), (3, 1)], heads=(4, 2), dim=32, dtype=dtype, stored=stored))


@pytest.fixture
def short_splits(monkeypatch):
    """Of a block each, so that short histories have several."""
    monkeypatch.setattr(decode, "SHORTEST_SPLIT", 32)
    monkeypatch.setattr(decode, "_PROGRAMS_ALONE", 8)


# of one block of keys, of one and a bit, of all splits that there may be, of more blocks than splits
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 97, 128, 300])
@pytest.mark.usefixtures("short_splits")
def test_splits_are_merged(length):
    step = make_step([(length - 1, 1)], context=400)
    assert most_splits(400, 2) == 4
    check(step)


@pytest.mark.usefixtures("short_splits")
def test_large_scores():
    step = make_step([(199, 1)], context=400)
    torch.testing.assert_close(attend(step, 30.0).double(), step.truth(30.0), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("short_splits")
def test_neither_batch_mates_nor_the_number_of_programs_change_a_bit(monkeypatch):
    step = make_step([(149, 1), (2, 1), (63, 1), (33, 1)], context=400)
    together = attend(step)
    for request in range(4):
        assert torch.equal(attend(step.alone(request))[0], together[request])
    monkeypatch.setattr(decode, "_PROGRAMS", 1)
    assert torch.equal(attend(step), together)


def test_some_requests_among_others():
    step = make_step([(4, 3), (20, 1), (0, 2), (33, 1)])
    chosen = torch.tensor([1, 3], dtype=torch.int32, device=DEVICE)
    out = attend(step, requests=chosen, starts=step.starts)
    rows = [3, 6]
    torch.testing.assert_close(out[rows].double(), step.truth(0.3)[rows], atol=1e-5, rtol=1e-5)
    assert out[[0, 1, 2, 4, 5]].isnan().all()


def test_rows_that_are_not_in_use_get_zeros():
    step = make_step([(20, 1), (3, 1)])
    step.seq_lens[1] = 0
    out = attend(step)
    torch.testing.assert_close(out[0].double(), step.truth(0.3)[0], atol=1e-5, rtol=1e-5)
    assert not out[1].any()


def test_splits_of_a_context():
    assert [most_splits(context, 8) for context in (1, 256, 257, 4096, 8192, 262144)] == [1, 1, 2, 16, 32, 32]
    assert most_splits(262144, 4) == 64
    assert most_splits(262144, 1024) == 1
