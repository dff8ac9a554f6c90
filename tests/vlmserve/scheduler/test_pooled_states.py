"""The sum that a vector is made of, chunk by chunk."""

import numpy as np
import pytest

from vlmserve.ipc.messages import Pooling
from vlmserve.scheduler.req_life import PooledStates

STATES = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)


def feed(pooled: PooledStates, *chunks: tuple[int, int]) -> list[int]:
    """Compute these tokens; returns how many of each chunk were summed up."""
    counts = []
    for start, end in chunks:
        counts.append(count := pooled.wanted(start, end))
        if count:
            pooled.take(count, STATES[end - count : end].sum(0, keepdims=True))
    return counts


def unit(row: np.ndarray) -> np.ndarray:
    return row / np.linalg.norm(row)


def test_the_last_token_needs_no_other() -> None:
    pooled = PooledStates(Pooling(), 10)
    assert pooled.matchable_len == 9
    assert feed(pooled, (0, 4), (4, 10)) == [0, 1]
    np.testing.assert_allclose(pooled.vector(), [unit(STATES[9])], rtol=1e-6)


@pytest.mark.parametrize("chunks", [[(0, 10)], [(0, 3), (3, 4), (4, 10)], [(0, 6), (2, 5), (4, 10)]])
def test_the_mean_has_each_token_once(chunks: list[tuple[int, int]]) -> None:
    """Also those that are computed again, after a retraction."""
    pooled = PooledStates(Pooling(how="mean", dimensions=4, normalize=False), 10)
    assert pooled.matchable_len == 0
    assert sum(feed(pooled, *chunks)) == 10
    np.testing.assert_allclose(pooled.vector(), STATES.mean(0, keepdims=True)[:, :4], rtol=1e-5)


def test_what_is_summed_up_may_come_from_the_cache_next_time() -> None:
    pooled = PooledStates(Pooling(how="mean"), 10)
    feed(pooled, (0, 6))
    assert pooled.matchable_len == 6
    with pytest.raises(AssertionError):
        pooled.vector()


def test_a_vector_of_zeros_stays_one() -> None:
    pooled = PooledStates(Pooling(), 1)
    pooled.take(1, np.zeros((1, 3), dtype=np.float32))
    assert pooled.vector().tolist() == [[0, 0, 0]]
