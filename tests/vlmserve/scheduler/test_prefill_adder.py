"""Admission: budgets of a step, slots kept for what was admitted before, and what certainly cannot last."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.ipc.messages import FinishReason
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.prefill_adder import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_life import ReqStatus

CONTINUE, NO_TOKEN, NO_ROW, OTHER = (
    AddReqResult.CONTINUE,
    AddReqResult.NO_TOKEN,
    AddReqResult.NO_ROW,
    AddReqResult.OTHER,
)


@dataclass
class Rig:
    """Pools, and the requests that decode; `adder` begins a step."""

    pool: int = 256
    page: int = 1
    rows: int = 8
    radix: bool = False

    def __post_init__(self) -> None:
        allocator = TokenToKVPoolAllocator(self.pool, self.page)
        cache = RadixCache(allocator, shares=self.radix)
        self.kv = KVCacheManager(allocator, cache, ReqPoolAllocator(self.rows, self.pool + self.page))
        self.running: list[Req] = []

    def adder(
        self, *, in_progress=(), ratio=1.0, prefill=1000, chunk=-1, rows=None, mixed=0, adapters=1, stretch=0
    ) -> PrefillAdder:
        return PrefillAdder(
            self.kv,
            running=self.running,
            in_progress=list(in_progress),
            new_token_ratio=ratio,
            max_prefill_tokens=prefill,
            chunk_size=chunk,
            stretch=stretch,
            max_running=rows or self.rows,
            mixed_decode_tokens=mixed,
            max_adapters=adapters,
        )

    def compute(self, req: Req) -> None:
        """The step that it is in."""
        req.kv_len = req.kv_allocated_len
        self.kv.commit(req, req.kv_len)
        req.check()
        if req.status is ReqStatus.WAITING:
            req.move_to(ReqStatus.PREFILLING)
        if req.kv_len == req.fill_len:
            req.output_ids.append(0)
            if req.status is ReqStatus.PREFILLING:
                req.move_to(ReqStatus.DECODING)
                self.running.append(req)
        if not req.remaining_new_tokens:
            self.running.remove(req)
            self.kv.release(req)
            req.finish(FinishReason(type="length"))

    def decode(self) -> None:
        for req in list(self.running):
            assert self.kv.extend(req, 1), f"no slot is left for {req.rid}"
        for req in list(self.running):
            self.compute(req)


def text(arrival: int, prompt: int, new: int, *, ignore_eos: bool = False) -> Req:
    return make_req(arrival, prompt=[arrival + 1] * prompt, new=new, ignore_eos=ignore_eos)


def test_prompt_tokens_of_a_step_are_bounded_and_prompts_stay_whole():
    adder = Rig().adder(prefill=20)
    assert [adder.add_one_req(text(i, 12, 2)) for i in range(2)] == [CONTINUE, OTHER]
    assert adder.add_one_req(text(2, 8, 2)) is CONTINUE, "what fits still goes"
    assert adder.add_one_req(text(3, 1, 2)) is OTHER
    assert [req.arrival for req in adder.can_run] == [0, 2]
    adder = Rig().adder(prefill=20)
    assert adder.add_one_req(text(0, 50, 2)) is CONTINUE, "a larger one goes alone"
    assert adder.add_one_req(text(1, 1, 2)) is OTHER


@pytest.mark.parametrize(("page", "first", "second"), [(1, 10, 6), (4, 10, 4)])
def test_chunks_are_cut_to_the_budget_on_page_boundaries(page, first, second):
    rig = Rig(page=page)
    adder = rig.adder(chunk=16)
    reqs = [text(0, first, 2), text(1, 30, 2), text(2, 1, 2)]
    assert adder.add_one_req(reqs[0]) is CONTINUE
    assert not adder.full
    assert adder.add_one_req(reqs[1]) is CONTINUE
    assert adder.full
    assert [req.kv_allocated_len for req in reqs[:2]] == [first, second]


def test_a_chunk_that_ends_its_prompt_may_be_longer():
    sizes = []
    for prompt, prefill in ((20, 1000), (21, 1000), (20, 18)):
        rig, req = Rig(page=4), text(0, prompt, 2)
        adder = rig.adder(chunk=16, stretch=4, prefill=prefill)
        assert adder.add_one_req(req) is CONTINUE
        assert adder.full, "nothing more fits"
        sizes.append(req.kv_allocated_len)
    assert sizes == [20, 16, 16]


def test_a_chunk_smaller_than_a_page_is_all_where_settings_allow_no_more():
    rig = Rig(page=16)
    req = text(0, 40, 2)
    assert rig.adder(chunk=16, prefill=5).add_one_req(req) is CONTINUE
    assert req.kv_allocated_len == 16, "a step holds a page at the least"


def test_the_next_chunk_goes_on_and_decoding_leaves_it_a_page():
    rig = Rig(page=4)
    req = text(0, 40, 2)
    rig.adder(chunk=16).add_one_req(req)
    rig.compute(req)
    assert rig.adder(in_progress=[req], chunk=16, mixed=100).add_chunked_req(req) is CONTINUE
    assert req.kv_allocated_len == 20


def test_places_are_bounded_by_the_pool_and_by_the_setting():
    rig = Rig(rows=3)
    adder = rig.adder(rows=2)
    assert [adder.add_one_req(text(i, 2, 2)) for i in range(3)] == [CONTINUE, CONTINUE, NO_ROW]
    assert rig.kv.req_pool.available_size() == 1
    adder = rig.adder(rows=9)
    assert [adder.add_one_req(text(i, 2, 2)) for i in range(3, 5)] == [CONTINUE, NO_ROW]


def test_a_refused_request_leaves_no_trace():
    rig = Rig(pool=64, rows=2, radix=True)
    adder = rig.adder(ratio=1.0)
    assert adder.add_one_req(text(0, 20, 30)) is CONTINUE
    before = rig.kv.reachable()
    refused = text(1, 20, 20)
    assert adder.add_one_req(refused) is NO_TOKEN
    assert (refused.req_pool_idx, refused.kv_len, refused.last_node) == (None, 0, None)
    assert rig.kv.reachable() == before
    assert rig.kv.prefix_cache.protected_size() == 0
    assert rig.kv.req_pool.available_size() == 1


@pytest.mark.parametrize(("ratio", "admitted"), [(1.0, False), (0.5, True), (0.0, True)])
def test_slots_are_kept_for_what_running_requests_are_expected_to_use(ratio, admitted):
    rig = Rig(pool=100)
    running = text(0, 30, 41)
    rig.adder().add_one_req(running)
    rig.compute(running)
    # 70 are left, 1 + 40 * ratio + 1 (a page) of them kept; the newcomer is expected to take 20 + 20 + 1
    assert (rig.adder(ratio=ratio).add_one_req(text(1, 20, 20)) is CONTINUE) == admitted


def test_what_is_kept_for_a_newcomer_counts_for_those_after_it():
    adder = Rig(pool=2 * CLIP_MAX_NEW_TOKENS + 100).adder()
    added = [adder.add_one_req(text(at, 10, 100 * CLIP_MAX_NEW_TOKENS)) for at in range(3)]
    assert added == [CONTINUE, CONTINUE, NO_TOKEN], "long outputs are clipped"
    adder = Rig(pool=100).adder()
    assert adder.add_one_req(text(0, 10, 40)) is CONTINUE
    assert adder.add_one_req(text(1, 10, 40)) is NO_TOKEN
    assert adder.add_one_req(text(2, 10, 30)) is CONTINUE


def test_those_that_use_all_of_their_output_are_let_in_where_others_end_in_time():
    """By reserves alone the second would have to wait: the first is known to end before the second needs its slots."""
    rig = Rig(pool=64)
    first = text(0, 20, 10, ignore_eos=True)
    rig.adder().add_one_req(first)
    rig.compute(first)
    assert rig.adder().add_one_req(text(1, 20, 30)) is NO_TOKEN
    second = text(1, 20, 30, ignore_eos=True)
    assert rig.adder().add_one_req(second) is CONTINUE
    rig.compute(second)
    while rig.running:
        rig.decode()


shapes = st.tuples(st.integers(1, 60), st.integers(1, 120))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(shapes, min_size=2, max_size=12),
    page=st.sampled_from([1, 4, 16]),
    pages=st.integers(1, 40),
    chunk=st.sampled_from([-1, 16, 48]),
    radix=st.booleans(),
)
def test_what_is_admitted_lasts_where_all_use_their_output(requests, page, pages, chunk, radix):
    """No slot runs out in any decode step, however tight the pool: nothing would ever be taken back."""
    pool = max(pages * page, 192 // page * page)
    rig = Rig(pool=pool, page=page, rows=12, radix=radix)
    waiting = [text(i, prompt, new, ignore_eos=True) for i, (prompt, new) in enumerate(requests)]
    in_progress: list[Req] = []
    admitted = 0
    for _ in range(3000):
        adder = rig.adder(in_progress=in_progress, chunk=chunk, ratio=0.1)
        for req in in_progress:
            adder.add_chunked_req(req)
        while waiting and not adder.full and adder.add_one_req(waiting[0]) is CONTINUE:
            in_progress.append(waiting.pop(0))
            admitted += 1
        if adder.can_run:
            for req in adder.can_run:
                rig.compute(req)
            in_progress = [req for req in in_progress if req.status is ReqStatus.PREFILLING]
        else:
            assert not in_progress, "a prompt that was begun goes on"
        rig.decode()
        if not (waiting or in_progress or rig.running):
            break
    assert admitted == len(requests)
    assert rig.kv.reachable() == pool


def test_so_many_adapters_share_a_batch_and_nobody_waits_for_ever():
    rig = Rig(rows=100)
    adder = rig.adder(adapters=2)
    names = ["a", "b", "", "a", "c"]
    reqs = [make_req(number, new=50, adapter=name) for number, name in enumerate(names)]
    assert [adder.add_one_req(req) for req in reqs] == [CONTINUE] * 4 + [AddReqResult.NOT_READY]
    results = [rig.adder(in_progress=reqs[:4], adapters=2).add_one_req(reqs[4]) for _ in range(100)]
    assert results[0] is AddReqResult.NOT_READY, "others may pass it"
    assert results[-1] is OTHER, "but not for ever"
    assert rig.adder(in_progress=reqs[:1], adapters=2).add_one_req(reqs[4]) is CONTINUE
