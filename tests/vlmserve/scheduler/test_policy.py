"""The order of the waiting queue."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmserve.scheduler.policy import LPM_MAX_QUEUE, InBatchPrefixes, SchedulePolicy


@dataclass(eq=False)
class Request:
    rid: str
    arrival: int
    key: np.ndarray = field(default_factory=lambda: np.arange(100))
    cached: int = 0


def requests(*cached: int) -> list[Request]:
    return [Request(rid=str(i), arrival=i, cached=tokens) for i, tokens in enumerate(cached)]


def order(queue: list[Request]) -> str:
    return "".join(req.rid for req in queue)


def cached(req: Request) -> int:
    return req.cached


def in_batch(page_size: int = 1, **options) -> InBatchPrefixes[Request]:
    return InBatchPrefixes(lambda req: req.key, page_size, **options)


def test_fcfs_goes_by_arrival_and_asks_the_cache_nothing():
    def never(req):
        raise AssertionError(req)

    queue = requests(0, 5, 9)[::-1]
    assert SchedulePolicy("fcfs", never).calc_priority(queue) == 3
    assert order(queue) == "012"


def test_lpm_goes_by_cached_tokens_then_by_arrival():
    queue = requests(0, 7, 3, 7, 0)[::-1]
    assert SchedulePolicy("lpm", cached).calc_priority(queue) == 5
    assert order(queue) == "13204"


def test_lpm_asks_once_for_each_request():
    asked = []
    queue = requests(0, 7, 3)
    SchedulePolicy("lpm", lambda req: asked.append(req.rid) or req.cached, in_batch()).calc_priority(queue)
    assert sorted(asked) == ["0", "1", "2"]


@pytest.mark.parametrize(("length", "first"), [(LPM_MAX_QUEUE, LPM_MAX_QUEUE - 1), (LPM_MAX_QUEUE + 1, 0)])
def test_lpm_leaves_long_queues_as_they_came(length, first):
    queue = requests(*range(length))
    SchedulePolicy("lpm", cached).calc_priority(queue)
    assert queue[0].arrival == first


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="'random'"):
        SchedulePolicy("random", cached)


def test_one_of_several_requests_with_a_new_common_prefix_goes_first():
    queue = requests(0, 0, 0, 0)
    queue[1].key = np.arange(1, 101)
    assert SchedulePolicy("fcfs", cached, in_batch()).calc_priority(queue) == 2
    assert order(queue) == "0123"
    queue[1].key, queue[2].key = queue[2].key, queue[1].key
    assert SchedulePolicy("fcfs", cached, in_batch()).calc_priority(queue) == 2
    assert order(queue) == "0213"
    for req in queue:
        req.cached = 96  # the first has been computed
    assert SchedulePolicy("fcfs", cached, in_batch()).calc_priority(queue) == 4
    assert order(queue) == "0123"


@pytest.mark.parametrize(("shared", "page_size", "ahead"), [(31, 1, 2), (32, 1, 1), (63, 64, 2), (64, 64, 1)])
def test_a_short_common_prefix_is_computed_twice(shared, page_size, ahead):
    queue = requests(0, 0)
    queue[1].key = np.concatenate([np.arange(shared), np.full(100, -1)])
    assert SchedulePolicy("fcfs", cached, in_batch(page_size)).calc_priority(queue) == ahead
    queue[0].key = queue[1].key = np.arange(shared)
    assert SchedulePolicy("fcfs", cached, in_batch(page_size)).calc_priority(queue) == ahead


def test_only_what_is_not_cached_counts_and_all_before_it_must_be_equal():
    # 0 and 1 differ in the cached part only; 2 is like 0, with more cached than 0 (so not by the same tree node)
    queue = requests(40, 40, 50)
    queue[1].key = np.concatenate([[7], np.arange(1, 100)])
    assert SchedulePolicy("fcfs", cached, in_batch()).calc_priority(queue) == 3
    queue[2].cached = 40
    assert SchedulePolicy("fcfs", cached, in_batch()).calc_priority(queue) == 2
    assert order(queue) == "012"
    queue[1].key = queue[0].key
    assert SchedulePolicy("fcfs", cached, in_batch()).calc_priority(queue) == 1
    # inside a picture all tokens are alike: the same next tokens, but from different offsets on
    queue = requests(40, 50)
    queue[0].key = queue[1].key = np.full(100, -1)
    assert SchedulePolicy("fcfs", cached, in_batch()).calc_priority(queue) == 2


def test_requests_beyond_the_lookahead_are_left_alone():
    queue = requests(0, 0, 0, 0)
    assert SchedulePolicy("fcfs", cached, in_batch(lookahead=2)).calc_priority(queue) == 3
    assert order(queue) == "0231"


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(["fcfs", "lpm"]), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 80)), max_size=8), st.data()
)
def test_nobody_is_lost_and_somebody_goes(policy, shapes, data):
    queue = [
        Request(rid=str(i), arrival=i, key=np.arange(first, first + 80), cached=tokens)
        for i, (first, tokens) in enumerate(shapes)
    ]
    queue = data.draw(st.permutations(queue))
    everyone = sorted(order(queue))
    ahead = SchedulePolicy(policy, cached, in_batch()).calc_priority(queue)
    assert sorted(order(queue)) == everyone
    assert ahead >= bool(queue)
    for waiting in queue[ahead:]:  # each for one that goes, whose first uncached tokens are its own
        assert any(
            leader.cached == waiting.cached and np.array_equal(leader.key, waiting.key) for leader in queue[:ahead]
        )
