"""Places in the request pool on the device and on the host."""

import numpy as np
import pytest
import torch

from vlmserve.memory.req_to_token import ReqPoolAllocator, ReqToTokenPool
from vlmserve_common.errors import EngineError


def test_places_are_handed_out_once():
    req_pool = ReqPoolAllocator(3, 8)
    taken = {req_pool.alloc(), req_pool.alloc(), req_pool.alloc()}
    assert taken == {0, 1, 2}
    assert req_pool.alloc() is None
    assert req_pool.available_size() == 0
    req_pool.free(1)
    assert req_pool.available_size() == 1
    with pytest.raises(EngineError, match="req_pool_idx 1 "):
        req_pool.free(1)
    assert req_pool.alloc() == 1
    for bad in (-1, 3):
        with pytest.raises(EngineError, match="not held"):
            req_pool.free(bad)


def test_slots_are_copies():
    req_pool = ReqPoolAllocator(2, 8)
    req_pool_idx, other = req_pool.alloc(), req_pool.alloc()
    req_pool.write(req_pool_idx, 0, np.arange(16, 21))
    req_pool.write(other, 2, np.array([7, 8]))
    req_pool.write(req_pool_idx, 3, np.array([99]))
    slots = req_pool.slots(req_pool_idx, 1, 5)
    assert slots.dtype == np.int64
    assert slots.tolist() == [17, 18, 99, 20]
    slots[:] = 0
    assert req_pool.slots(req_pool_idx, 1, 5).tolist() == [17, 18, 99, 20]
    assert req_pool.slots(other, 2, 4).tolist() == [7, 8]
    assert req_pool.slots(req_pool_idx, 4, 4).tolist() == []


def test_nothing_is_written_outside_of_a_held_place():
    req_pool = ReqPoolAllocator(1, 8)
    with pytest.raises(EngineError, match="not held"):
        req_pool.write(0, 0, np.array([1]))
    with pytest.raises(EngineError, match="not held"):
        req_pool.slots(0, 0, 1)
    req_pool.alloc()
    for start, count in ((7, 2), (-1, 1), (8, 1)):
        with pytest.raises(EngineError, match="max-model-len"):
            req_pool.write(0, start, np.arange(count))
        with pytest.raises(EngineError, match="max-model-len"):
            req_pool.slots(0, start, start + count)


def test_device_table():
    pool = ReqToTokenPool(2, 6, "cpu")
    assert (pool.size, pool.max_context_len) == (2, 6)
    pool.write(1, 2, torch.tensor([30, 31, 32]))
    pool.write(1, 5, np.array([33]))
    assert pool.req_to_token.dtype == torch.int32
    assert pool.req_to_token.tolist() == [[0] * 6, [0, 0, 30, 31, 32, 33], [0] * 6]
    for req_pool_idx, start in ((2, 0), (-1, 0), (0, 6), (0, -1)):
        with pytest.raises(EngineError):
            pool.write(req_pool_idx, start, torch.tensor([1]))
