"""The device's table of KV slots."""

import numpy as np
import pytest
import torch

from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve_common.errors import EngineError


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
