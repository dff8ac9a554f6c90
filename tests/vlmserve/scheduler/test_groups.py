"""One loop over a scheduler for each attention group: their steps are computed together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve.scheduler.fake_grammars import ENDS
from tests.vlmserve.scheduler.prompts import expected, request
from tests.vlmserve.scheduler.rig import ABORTS, GAPS, Knobs, Rig, knobs, requests
from vlmserve.ipc.messages import AbortReq


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=requests(grammars=("3", ENDS)),
    groups=st.integers(2, 3),
    knobs=knobs(),
    gaps=GAPS,
    aborts=ABORTS,
    finish_every=st.integers(1, 4),
)
def test_answers_do_not_depend_on_the_groups(messages, groups, knobs, gaps, aborts, finish_every):
    """Some groups have nothing to do, grammars are sampled late."""
    rig = Rig(knobs, groups=groups)
    aborted = rig.play(messages, gaps, aborts, finish_every)
    for message in messages:
        got, want = rig.tokens[message.rid], expected(message)
        assert got == (want[: len(got)] if message.rid in aborted else want)
    rig.check_nothing_is_left()


def in_group(group: int, *args, **options):
    return replace(request(*args, **options), data_parallel_rank=group)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_without_a_step_joins_those_of_the_others(depth: int):
    rig = Rig(Knobs(depth=depth), groups=2)
    messages = in_group(0, "a", [1] * 6, new=12), in_group(1, "b", [2] * 6, new=4)
    rig.run(*messages)
    assert rig.groups.forwards == [(True, True)] * 4 + [(True, False)] * 8
    rig.check_answers(*messages)


def test_a_failing_step_ends_the_requests_that_it_computes_and_no_others():
    """Those of all groups, for their steps are computed together."""
    rig = Rig(Knobs(chunk=None, rows=1), groups=2)
    messages = [in_group(at % 2, f"r{at}", [at] * 9) for at in range(4)]
    rig.worker.fail_at = 3
    rig.run(*messages)
    assert [rid for rid, reason in rig.finish.items() if reason.type == "error"] == ["r0", "r1"]
    rig.check_answers(*messages[2:])
    rig.check_nothing_is_left()


def test_answers_to_one_prompt_stay_together_and_others_are_spread():
    rig = Rig(groups=2)
    for prompt in range(2):
        rig.handle(*(replace(request(f"{prompt}-{at}", [prompt] * 6), group=f"g{prompt}") for at in range(3)))
    assert [len(one.waiting_queue) for one in rig.loop.schedulers] == [3, 3]
    rig.run()


def test_a_session_stays_with_its_group():
    rig = Rig(groups=2)
    rig.run(replace(request("a", [1] * 20), session_id="s"))
    turn = [1] * 20 + rig.tokens["a"] + [2] * 5
    others = [request(f"other{at}", [3 + at] * 6) for at in range(3)]
    rig.run(*others, replace(request("b", turn), session_id="s"))
    assert rig.cached["b"] > 20, "the last turn's KV"


def test_an_abort_finds_its_group():
    rig = Rig(groups=2)
    rig.handle(in_group(1, "a", [1] * 6, new=30))
    rig.step()
    rig.handle(AbortReq(rid="a"))
    assert rig.loop.num_waiting == 0
    assert rig.finish["a"].type == "abort"
    rig.run()


def test_clients_take_turns_at_the_encoder_whatever_their_group():
    """A group that has encoded much is not behind one that has encoded little."""
    rig = Rig(Knobs(encoders=1, space_rows=2), groups=2)
    for number in range(6):
        picture = in_group(0, f"old{number}", [number] * 6, [(1, 2, b"old%d" % number)], new=1)
        rig.run(replace(picture, client="a"))
    first = len(rig.backend.encoded())
    pictures = [
        replace(in_group(group, name, [7] * 6, [(1, 2, name.encode())], new=1), client=client)
        for name, client, group in (("p", "a", 0), ("q", "b", 1), ("r", "b", 1))
    ]
    rig.run(*pictures)
    digests = [picture.mm_inputs.items[0].patch_digests[0] for picture in pictures]
    order = [digests.index(digest) for digest in rig.backend.encoded()[first:]]
    assert order.index(0) < order.index(2), "who came first does not wait for all of the other's"


def test_figures_are_of_all_groups_and_of_each():
    rig = Rig(groups=2)
    rig.run(in_group(0, "a", [1] * 20, [(3, 12, b"pic")]), in_group(1, "b", [2] * 30))
    whole = rig.loop.stats()
    first, second = whole.replicas
    assert (first.prompt_tokens_total, second.prompt_tokens_total, whole.prompt_tokens_total) == (20, 30, 50)
    assert (first.encoder.encoded, second.encoder.encoded, whole.encoder.encoded) == (1, 0, 1)
