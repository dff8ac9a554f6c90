"""Prompts that another engine computes: answers do not depend on it, and nothing is left on either side."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve.scheduler.handed import Pair
from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, knobs, requests
from vlmserve.disaggregation.messages import LEASE_S
from vlmserve.ipc.messages import AbortReq, Pooling, ReturnOptions


@pytest.fixture
def pair(monkeypatch) -> Pair:
    found = Pair(Knobs(), Knobs(), monkeypatch)
    found.meet()
    return found


def test_all_but_the_last_token_is_computed_there(pair):
    first, again = (request(rid, list(range(30)), [(3, 6, b"aa")], new=5) for rid in ("a", "b"))
    pair.run(first)
    assert sum(len(batch.input_ids) for batch in pair.prefill.worker.batches) == 29
    assert sum(len(batch.input_ids) for batch in pair.decode.worker.batches) == 1 + 4
    assert pair.decode.pool.stats().encoded == 0
    pair.run(again)
    pair.decode.check_answers(first, again)
    assert pair.decode.cached["b"] == 28, "whole pages are here already"


def test_a_mean_needs_the_prompt_here(pair):
    last, mean = (
        replace(request(how, list(range(30)), new=0), returns=ReturnOptions(pooling=Pooling(how=how)))
        for how in ("last", "mean")
    )
    pair.run(last)
    assert sum(len(batch.input_ids) for batch in pair.decode.worker.batches) == 1
    pair.run(mean)
    assert sum(len(batch.input_ids) for batch in pair.decode.worker.batches) == 1 + 30
    assert [len(pair.decode.outputs[how][0].hidden_states) for how in ("last", "mean")] == [1, 1]


@settings(max_examples=60)
@given(
    ends=st.tuples(knobs(), knobs()).filter(lambda two: (two[0].snapshots is None) == (two[1].snapshots is None)),
    messages=requests(),
    gaps=st.lists(st.integers(0, 8), min_size=10, max_size=10),
    aborts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=3, unique_by=lambda abort: abort[0]),
    trouble=st.sampled_from([0.0, 0.1, 0.3]),
    dice=st.randoms(use_true_random=False),
)
def test_answers_and_pools_survive_whatever_the_network_does(ends, messages, gaps, aborts, trouble, dice):
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(*ends, patch)
        pair.meet()
        aborted, turn = set(), 0
        for at, (message, gap) in enumerate(zip(messages, gaps, strict=False)):
            pair.decode.handle(message)
            for _ in range(gap):
                pair.disturbed_turn(dice, trouble)
                turn += 1
                for which, when in aborts:
                    if when == turn and which <= at and f"r{which}" not in pair.decode.finish:
                        aborted.add(f"r{which}")
                        pair.decode.handle(AbortReq(rid=f"r{which}"))
        pair.run()
    pair.decode.check_answers(*(message for message in messages if message.rid not in aborted))
    assert {rid: reason.type for rid, reason in pair.decode.finish.items()} == {
        message.rid: "abort" if message.rid in aborted else "length" for message in messages
    }
    for _ in range(int(LEASE_S) + 1):  # a room whose release was lost is kept so long
        pair.turn()
    for rig in (pair.prefill, pair.decode):
        rig.check_nothing_is_left()
    assert not any((pair.sender._rooms, pair.sender._known, pair.receivers._rooms))


def test_no_step_in_flight_writes_over_what_has_come(monkeypatch):
    """A step that is late still writes for a request that has ended; its slot is somebody else's by then."""
    pair = Pair(Knobs(), Knobs(pool=64, page=1, depth=2, radix=False), monkeypatch)
    pair.meet()
    ends, comes = request("a", list(range(30)), new=30), request("b", [3] * 40, new=5)
    pair.decode.handle(ends, request("other", [1], new=12))  # two are computed while the next step is decided
    while len(pair.decode.tokens["a"]) < 4:
        pair.turn()
    assert pair.decode.loop._in_flight, "a step is under way"
    order = pair.receivers.order

    def order_and_have(*about) -> None:
        order(*about)
        for _ in range(30):  # the other side does all, while this one does nothing
            pair.others_finish()

    monkeypatch.setattr(pair.receivers, "order", order_and_have)
    pair.decode.handle(AbortReq(rid="a"), comes)
    pair.run()
    pair.decode.check_answers(comes)


def in_transfer(pair: Pair, message) -> None:
    """Hand a request over until its KV is being read."""
    pair.decode.handle(message)
    while not pair.agent.late:
        pair.disturbed_turn(NoDice(), 0.0)


class NoDice(random.Random):
    """All messages arrive at once, and agents copy nothing."""

    def randint(self, _least: int, most: int) -> int:
        return most

    def choice(self, _any) -> int:
        return 0


def test_slots_of_a_request_that_ends_are_not_written_to_once_others_have_them(pair):
    ends, comes = request("a", list(range(60)), new=3), request("b", [3] * 60, new=3)
    in_transfer(pair, ends)
    pair.decode.handle(AbortReq(rid="a"), comes)
    pair.run()
    pair.decode.check_answers(comes)
    for rig in (pair.prefill, pair.decode):
        rig.check_nothing_is_left()


def test_kv_of_a_room_that_was_given_up_is_not_used(pair):
    message = request("a", list(range(60)), new=3)
    in_transfer(pair, message)
    (room,) = pair.sender._rooms
    pair.sender._forget(room)  # as when this server did not hear of the other one for long
    pair.prefill.worker.kv = [("somebody else's", (0, 0, 0))] * len(pair.prefill.worker.kv)
    pair.run()
    pair.decode.check_answers(message)
    assert pair.decode.loop.stats().handover.failed_total == 1
