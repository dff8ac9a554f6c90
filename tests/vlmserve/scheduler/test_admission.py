"""Who waits for whose prefix."""

from __future__ import annotations

import numpy as np
import pytest

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.scheduler.admission import PrefixLeaders
from vlmserve.scheduler.req import Req


class Cached:
    """How much of each request is cached, by arrival; 0 if not said."""

    def __init__(self, **tokens: int) -> None:
        self.tokens = tokens

    def leaders(self, page_size: int = 1) -> PrefixLeaders:
        return PrefixLeaders(
            lambda req: self.tokens.get(req.rid, 0),
            lambda req: req.radix_key(req.fill_len - 1),
            page_size=page_size,
        )


def waiting(leaders: PrefixLeaders, reqs: list[Req]) -> list[int]:
    return [req.arrival for req in reqs if leaders.follow(req)]


def test_one_of_several_with_a_new_common_prefix_leads():
    reqs = [make_req(i, prompt=range(100)) for i in range(4)]
    reqs[1] = make_req(1, prompt=range(1, 101))
    assert waiting(Cached().leaders(), reqs) == [2, 3]
    assert waiting(Cached(r0=96, r1=96, r2=96, r3=96).leaders(), reqs) == [], "what is left is short"


@pytest.mark.parametrize(("shared", "page_size", "waits"), [(31, 1, []), (32, 1, [1]), (63, 64, []), (64, 64, [1])])
def test_a_short_common_prefix_is_computed_twice(shared, page_size, waits):
    reqs = [make_req(0, prompt=range(200)), make_req(1, prompt=[*range(shared), *[999] * 100])]
    assert waiting(Cached().leaders(page_size), reqs) == waits
    same = [make_req(i, prompt=range(shared + 1)) for i in range(2)]
    assert waiting(Cached().leaders(page_size), same) == waits


def test_only_what_is_not_cached_counts_and_all_before_it_must_be_equal():
    prompts = [range(100), [700, *range(1, 100)], range(100)]
    reqs = [make_req(i, prompt=prompt) for i, prompt in enumerate(prompts)]
    # 0 and 1 differ in the cached part only; 2 is like 0, with more cached
    assert waiting(Cached(r0=40, r1=40, r2=50).leaders(), reqs) == []
    assert waiting(Cached(r0=40, r1=40, r2=40).leaders(), reqs) == [2]
    # inside a picture all tokens are alike: the same next tokens, but from different offsets on
    alike = [make_req(i, prompt=[7] * 100) for i in range(2)]
    assert waiting(Cached(r0=40, r1=50).leaders(), alike) == []
    assert waiting(Cached(r0=40, r1=40).leaders(), alike) == [1]


def test_a_prompt_in_progress_leads_from_what_others_find_of_it():
    def began(committed: int, scheduled: int) -> Req:
        req = make_req(0, prompt=range(200))
        req.req_pool_idx, req.kv_len, req.kv_allocated_len, req.kv_committed_len = 0, scheduled, scheduled, committed
        return req

    same = make_req(1, prompt=range(200))
    for committed, page_size, found in ((0, 1, 0), (64, 1, 64), (70, 16, 64), (64, 16, 64)):
        leaders = Cached(r1=found).leaders(page_size)
        leaders.lead(began(committed, 100))
        assert leaders.follow(same), (committed, page_size)
    leaders = Cached(r1=10).leaders()
    leaders.lead(began(64, 100))
    assert not leaders.follow(same), "it finds less than the leader had: an eviction, or another page"


def test_the_key_of_a_leader_in_its_answer_ends_with_its_prompt():
    req = make_req(0, prompt=range(100))
    req.output_ids = [5, 6]
    leaders = Cached().leaders()
    leaders.lead(req)
    assert not np.array_equal(req.radix_key(102), req.radix_key(100))
    assert leaders.follow(make_req(1, prompt=range(100)))
