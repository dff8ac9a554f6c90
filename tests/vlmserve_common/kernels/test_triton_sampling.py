"""Random choices by the kernel are those of torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.triton_device import DEVICE
from vlmserve.executor.sampler import choose

sampling = pytest.importorskip("vlmserve_common.kernels.gpu.sampling")


def tokens(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    seeds, indices = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=generator)
    return seeds.to(DEVICE), (indices % 5000).to(DEVICE)


@settings(max_examples=10)
@given(st.integers(0, 6), st.sampled_from([1, 2, 50, 2047, 2048, 2049, 6200]), st.integers(0, 999))
def test_of_the_whole_vocabulary(rows, vocab, seed):
    scores = torch.log_softmax(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3, -1)
    scores = scores.to(DEVICE)
    given_tokens = tokens(rows, seed)
    assert torch.equal(sampling.choose(scores, None, *given_tokens), choose(scores, None, *given_tokens))


@settings(max_examples=10)
@given(st.integers(1, 6), st.sampled_from([1, 20, 3000]), st.integers(0, 999))
def test_of_some_tokens_in_any_order(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(200_000, generator=generator)[:width] for _ in range(rows)])
    scores = torch.randn(rows, width, generator=generator).masked_fill_(ids % 3 == 0, -torch.inf)
    scores[:, -1] = 1.0
    ids, scores = ids.to(DEVICE), scores.to(DEVICE)
    given_tokens = tokens(rows, seed)
    assert torch.equal(sampling.choose(scores, ids, *given_tokens), choose(scores, ids, *given_tokens))


def test_hundreds_of_draws_from_one_row():
    scores = torch.zeros(100, 64, device=DEVICE)
    seeds, indices = torch.full((100,), 2**63 - 1, device=DEVICE), torch.arange(100, device=DEVICE)
    found = sampling.choose(scores, None, seeds, indices)
    assert torch.equal(found, choose(scores, None, seeds, indices))
    assert len(found.unique()) >= 40


def test_a_row_of_which_nothing_is_left_gets_its_first_token():
    scores = torch.full((1, 5000), -torch.inf, device=DEVICE)
    assert sampling.choose(scores, None, *tokens(1, 0)).tolist() == [0]
