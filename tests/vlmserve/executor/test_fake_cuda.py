"""The GPU that is not there sees what a real one would: what waits for it, and what is read too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.fake_cuda.tensors import CUDA, FakeCuda
from vlmserve_common.compute.transfers import PackedTransfers


@pytest.fixture
def cuda():
    with FakeCuda() as made:
        yield made


def test_a_download_is_garbage_until_it_is_waited_for(cuda):
    transfers = PackedTransfers(CUDA, cuda.mark)
    ids, values = torch.arange(5, device=CUDA), torch.full((2, 3), 0.5, device=CUDA)
    download = transfers.download([ids, values, ids[:0]])
    early = download._take()
    assert early[0].tolist() != [0, 1, 2, 3, 4]
    ids += 7  # launched behind the copy
    got = download.arrays()
    assert got[0].tolist() == [0, 1, 2, 3, 4]
    assert got[1].tolist() == [[0.5] * 3] * 2
    assert got[2].shape == (0,)
    assert (cuda.counts.downloads, cuda.counts.download_bytes) == (1, 5 * 8 + 6 * 4)
    assert not cuda.counts.syncs


def test_uploads_of_all_dtypes_arrive_in_one_copy_and_aligned(cuda):
    transfers = PackedTransfers(CUDA, cuda.mark)
    arrays = [
        np.arange(3),
        np.arange(5, dtype=np.int32),
        np.zeros((0, 4), np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array([True, False, True]),
        np.arange(7, dtype=np.uint8),
    ]
    tensors = transfers.upload(arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.device == CUDA
        assert tensor.inner.numpy().dtype == array.dtype
        assert np.array_equal(tensor.inner.numpy(), array)
        assert tensor.inner.storage_offset() * tensor.inner.element_size() % 16 == 0
    assert cuda.counts.uploads == 1
    assert not cuda.counts.syncs
    assert not cuda.counts.launches


def test_nothing_to_download_still_has_a_mark(cuda):
    torch.ones(3, device=CUDA)
    download = PackedTransfers(CUDA, cuda.mark).download([])
    assert cuda.done < cuda.launched
    assert download.arrays() == []
    assert cuda.done == cuda.launched
