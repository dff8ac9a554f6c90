"""Several schedulers over fake workers that compute their steps together: right answers and balanced pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vision.fake_backend import FakeBackend, make_pool
from tests.vlmserve.scheduler.fake_grammars import ENDS
from tests.vlmserve.scheduler.lazy_queue import LazyQueue
from tests.vlmserve.scheduler.prompts import expected, request
from tests.vlmserve.scheduler.test_scheduler import Knobs, Rig, Shared, requests
from vlmserve.executor.device_queue import InlineQueue
from vlmserve.ipc.messages import AbortReq, BatchTokenOutput
from vlmserve.ipc.replica_sums import replicas_of
from vlmserve.ipc.routing import ReplicaRouter
from vlmserve.scheduler.fair_order import FairOrder
from vlmserve.scheduler.lockstep import LockstepScheduler, noting_ends
from vlmserve.scheduler.rounds import Rounds


class FakeRounds:
    """A round worker of a fake worker for each group. forwards: which groups had a step, round by round."""

    def __init__(self) -> None:
        self.workers: list = []
        self.forwards: list[tuple[bool, ...]] = []

    def forward(self, steps):
        self.forwards.append(tuple(step is not None for step in steps))
        return [
            None if step is None else worker.forward(step) for worker, step in zip(self.workers, steps, strict=True)
        ]

    def sample(self, steps):
        return [
            None if step is None else worker.sample(*step) for worker, step in zip(self.workers, steps, strict=True)
        ]


class LockstepRig:
    def __init__(self, groups: int, knobs: Knobs) -> None:
        self.backend = FakeBackend(knobs.encoders or 1, inline=not knobs.encoders)
        self.pool = make_pool(self.backend, space_rows=knobs.space_rows, host_rows=knobs.host_rows)
        self.worker = FakeRounds()
        self.router = ReplicaRouter(groups, method="shortest_queue")
        device = LazyQueue(knobs.depth) if knobs.depth > 1 else InlineQueue()
        rounds = Rounds(device, self.worker, groups, last=self.pool.work)
        order = FairOrder()
        self.rigs = [
            Rig(knobs, shared=Shared(backend=self.backend, pool=self.pool, lane=lane, order=order))
            for lane in rounds.lanes
        ]
        self.worker.workers = [rig.worker for rig in self.rigs]
        for rig in self.rigs:
            rig.scheduler._send = noting_ends(rig.take, self.router)
        schedulers = [rig.scheduler for rig in self.rigs]
        self.scheduler = LockstepScheduler(schedulers, rounds, self.pool, self.router)

    def tokens(self, rid: str) -> list[int]:
        return [token for rig in self.rigs for token in rig.tokens[rid]]

    def encode(self) -> bool:
        return sum(rig.encode() for rig in self.rigs) > 0

    def run(self, limit: int = 5000) -> None:
        while self.scheduler.step() or self.encode():
            limit -= 1
            assert limit, "the schedulers do not come to an end"
        assert self.scheduler.is_idle()
        assert self.router.num_in_flight == 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=requests(grammars=("3", ENDS)),
    groups=st.integers(2, 3),
    page=st.sampled_from([1, 4]),
    pages=st.integers(6, 40),
    chunk=st.sampled_from([None, 5, 16]),
    mixed=st.booleans(),
    depth=st.sampled_from([1, 2, 2, 3]),
    rows=st.integers(1, 6),
    gaps=st.lists(st.integers(0, 4), min_size=10, max_size=10),
    aborts=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 20), st.booleans()), max_size=3, unique_by=lambda abort: abort[0]
    ),
    encoders=st.integers(0, 2),
    space=st.sampled_from([0, 3, 10, 1000]),
    finish_every=st.integers(1, 4),
)
def test_answers_do_not_depend_on_the_groups(
    messages, groups, page, pages, chunk, mixed, depth, rows, gaps, aborts, encoders, space, finish_every
):
    """Small pools make retraction common, some groups have nothing to do, grammars are sampled late."""
    pool = max(pages * page, 96 // page * page)
    knobs = Knobs(
        pool=pool, page=page, chunk=chunk, mixed=mixed, depth=depth, rows=rows, encoders=encoders, space_rows=space
    )
    rig = LockstepRig(groups, knobs)
    steps, aborted = 0, {}
    for i, message in enumerate(messages):
        rig.scheduler.handle(message)
        for _ in range(gaps[i]):
            rig.scheduler.step()
            steps += 1
            if steps % finish_every == 0:
                rig.encode()
            for which, when, finished in aborts:
                if when == steps and which <= i:
                    aborted[f"r{which}"] = finished
                    rig.scheduler.handle(AbortReq(rid=f"r{which}", finished=finished))
    rig.run()
    for message in messages:
        got, want = rig.tokens(message.rid), expected(message)
        assert got == (want[: len(got)] if message.rid in aborted else want)
    for stats in replicas_of(rig.scheduler.stats()):
        assert stats.kv_free_tokens + stats.kv_cached_tokens == pool
        assert stats.req_pool_free == rows
    rig.scheduler.flush_cache()
    assert all(one.kv.allocator.available_size() == pool for one in rig.rigs)
    assert rig.pool.cache.device.stats().held_bytes == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_of_each_group_is_one_round_and_an_idle_group_joins(depth: int):
    rig = LockstepRig(2, Knobs(depth=depth))
    first, second = request("a", [1] * 6, new=12), request("b", [2] * 6, new=4)
    rig.scheduler.handle(replace(first, data_parallel_rank=0))
    rig.scheduler.handle(replace(second, data_parallel_rank=1))
    rig.run()
    assert rig.worker.forwards == [(True, True)] * 4 + [(True, False)] * 8
    assert [rig.tokens(message.rid) for message in (first, second)] == [expected(first), expected(second)]


def test_a_round_that_somebody_waits_for_is_sent_as_it_is():
    rig = LockstepRig(2, Knobs(depth=2))
    rig.scheduler.handle(replace(request("a", [1] * 6, new=3), data_parallel_rank=0))
    one = rig.rigs[0].scheduler
    while not one.is_idle():
        one.step()
    assert rig.worker.forwards == [(True, False)] * 3
    assert rig.tokens("a") == expected(request("a", [1] * 6, new=3))


def test_answers_to_one_prompt_stay_together_and_others_are_spread():
    rig = LockstepRig(2, Knobs())
    for prompt in range(2):
        for choice in range(3):
            rig.scheduler.handle(replace(request(f"{prompt}-{choice}", [prompt] * 6), group=f"g{prompt}"))
    assert [len(one.messages) for one in rig.rigs] == [3, 3]
    rig.run()


def test_an_abort_finds_its_group():
    rig = LockstepRig(2, Knobs())
    ended = []
    rig.rigs[1].scheduler._send = noting_ends(ended.append, rig.router)
    rig.scheduler.handle(replace(request("a", [1] * 6, new=30), data_parallel_rank=1))
    rig.scheduler.step()
    rig.scheduler.handle(AbortReq(rid="a"))
    assert rig.scheduler.num_waiting == 0
    assert isinstance(ended[-1], BatchTokenOutput)
    assert ended[-1].outputs[0].finish_reason.type == "abort"
    rig.run()


def test_clients_take_turns_at_the_encoder_whatever_their_group():
    """A group that has encoded much is not behind one that has encoded little."""
    rig = LockstepRig(2, Knobs(encoders=1, space_rows=2))
    for number in range(6):
        picture = request(f"old{number}", [number] * 6, [(1, 2, b"old%d" % number)], new=1)
        rig.scheduler.handle(replace(picture, client="a", data_parallel_rank=0))
        rig.run()
    for name, client, group in (("p", "a", 0), ("q", "b", 1), ("r", "b", 1)):
        picture = request(name, [7] * 6, [(1, 2, name.encode())], new=1)
        rig.scheduler.handle(replace(picture, client=client, data_parallel_rank=group))
    orders = [req.media.order for one in rig.rigs for req in one.scheduler._reqs.values()]
    assert len(set(orders)) == 3
    assert orders[0] < orders[2], "who came first does not wait for all of the other's"
    rig.run()
