"""Request rows on the device and on the host."""

import numpy as np
import pytest
import torch

from vlmserve.memory.req_to_token import ReqRowAllocator, ReqToTokenPool
from vlmserve_common.errors import EngineError


def test_rows_are_handed_out_once():
    rows = ReqRowAllocator(3, 8)
    taken = {rows.alloc(), rows.alloc(), rows.alloc()}
    assert taken == {0, 1, 2}
    assert rows.alloc() is None
    assert rows.available_size() == 0
    rows.free(1)
    assert rows.available_size() == 1
    with pytest.raises(EngineError, match="row 1"):
        rows.free(1)
    assert rows.alloc() == 1
    for bad in (-1, 3):
        with pytest.raises(EngineError, match="not held"):
            rows.free(bad)


def test_slots_of_a_row_are_copies():
    rows = ReqRowAllocator(2, 8)
    row, other = rows.alloc(), rows.alloc()
    rows.write(row, 0, np.arange(16, 21))
    rows.write(other, 2, np.array([7, 8]))
    rows.write(row, 3, np.array([99]))
    slots = rows.slots(row, 1, 5)
    assert slots.dtype == np.int64
    assert slots.tolist() == [17, 18, 99, 20]
    slots[:] = 0
    assert rows.slots(row, 1, 5).tolist() == [17, 18, 99, 20]
    assert rows.slots(other, 2, 4).tolist() == [7, 8]
    assert rows.slots(row, 4, 4).tolist() == []


def test_nothing_is_written_outside_of_a_held_row():
    rows = ReqRowAllocator(1, 8)
    with pytest.raises(EngineError, match="not held"):
        rows.write(0, 0, np.array([1]))
    with pytest.raises(EngineError, match="not held"):
        rows.slots(0, 0, 1)
    rows.alloc()
    for start, count in ((7, 2), (-1, 1), (8, 1)):
        with pytest.raises(EngineError, match="max-model-len"):
            rows.write(0, start, np.arange(count))
        with pytest.raises(EngineError, match="max-model-len"):
            rows.slots(0, start, start + count)


def test_device_table():
    pool = ReqToTokenPool(2, 6, "cpu")
    assert (pool.size, pool.max_context_len) == (2, 6)
    pool.write(1, 2, torch.tensor([30, 31, 32]))
    pool.write(1, 5, np.array([33]))
    assert pool.req_to_token.dtype == torch.int32
    assert pool.req_to_token.tolist() == [[0] * 6, [0, 0, 30, 31, 32, 33]]
    for row, start in ((2, 0), (-1, 0), (0, 6), (0, -1)):
        with pytest.raises(EngineError):
            pool.write(row, start, torch.tensor([1]))
