"""How long prompts and pictures keep answers waiting: the rule alone, and closed loops on a simulated clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vlmserve.scheduler.closed_loops import COSTS, ClosedLoops
from vlmserve.scheduler.decode_gap import CEILING_S, CEILING_STEPS, FlowLoad, GapCosts, GapRule
from vlmserve.scheduler.estimates import StepCosts

STEP_S = COSTS.step_s + COSTS.decode_row_s
COST = st.builds(
    GapCosts, decode_s=st.floats(0.001, 1.0), join_s=st.floats(0.0, 60.0), answer_tokens=st.floats(1.0, 2000.0)
)
LOAD = st.builds(FlowLoad, joining=st.integers(0, 64), unattended=st.booleans())


@given(st.lists(LOAD, min_size=1, max_size=5), COST, st.floats(1.1, 4.0), st.sampled_from([None, CEILING_S]))
def test_no_answer_waits_longer_than_its_flow_gains_by(loads, costs, slowdown, ceiling):
    """An answer whose flow has nothing on its way keeps its pace within the slowdown, whatever other flows have. No
    answer waits beyond the ceiling, unless the slowdown allows more. Time is left to others in any case."""
    rule = GapRule(slowdown=slowdown, ceiling_s=ceiling)
    gap_s, patient = rule.gap(loads, costs)
    protected_s = (slowdown - 1) * costs.decode_s
    assert gap_s >= min(protected_s, 0.002) > 0
    pace_s = CEILING_S if ceiling else max(CEILING_S, CEILING_STEPS * costs.decode_s)
    assert gap_s + costs.decode_s <= max(pace_s, costs.decode_s + max(protected_s, 0.002)) + 1e-9
    if any(not load.joining and not load.unattended for load in loads):
        assert not patient
        assert gap_s == pytest.approx(max(protected_s, 0.002))
    # more requests of flows that are there already change nothing for others
    more = [load._replace(joining=load.joining * 2) for load in loads]
    assert rule.gap(more, costs) == (gap_s, patient)


def test_a_long_clip_keeps_no_answer_waiting_that_ends_before_it():
    rule = GapRule(slowdown=2.0)
    costs = GapCosts(decode_s=0.04, join_s=2.6, answer_tokens=64)
    assert rule.gap([FlowLoad(1)], costs) == (pytest.approx(CEILING_S - 0.04), True)
    assert rule.gap([FlowLoad(1)], costs._replace(join_s=30.0)) == (pytest.approx(0.04), False)
    assert GapRule(slowdown=0.0).gap([FlowLoad(0)], costs) == (math.inf, True)


def test_a_slow_machine_does_more_than_decode():
    """Its steps alone come near to the ceiling, unless a ceiling is asked for."""
    slow = GapCosts(decode_s=0.2, join_s=5.0, answer_tokens=64)
    assert GapRule(slowdown=2.0).gap([FlowLoad(1)], slow) == (pytest.approx(0.8), True)
    assert GapRule(slowdown=2.0, ceiling_s=CEILING_S).gap([FlowLoad(1)], slow) == (pytest.approx(0.2), False)


def test_short_prompts_that_are_quick_do_not_make_chunks_shorter():
    """A step that was held up once halves the chunk. Prompts of any length make it longer again."""
    costs = StepCosts(GapRule(slowdown=2.0), max_step_s=0.2, page_size=16)

    def compute(tokens: int, seconds: float) -> int:
        allowed_s = costs.allowed_s(beside=False)
        costs.observe(prompt_tokens=tokens, decoding=0, allowed_s=allowed_s, joined=1, seconds=seconds)
        return costs.chunk_tokens(beside=False) or 0

    held_up = compute(42, 1.0)
    assert held_up <= 21
    sizes = [compute(min(42, size), 0.001 * min(42, size)) for size in [held_up] * 3]
    assert sizes == sorted(sizes)
    settled = [compute(42, 0.042) for _ in range(10)]
    assert settled == sorted(settled)
    assert settled[-1] > 42


@pytest.mark.parametrize(("clients", "in_flight"), [(1, 16), (4, 4)])
def test_the_batch_fills_while_pictures_wait(clients, in_flight):
    """Most of the throughput without any limit, and tokens at the ceiling's pace; clients are served alike."""
    free = ClosedLoops(clients=clients, in_flight=in_flight, count=40, slowdown=0.0).measure()
    own = ClosedLoops(clients=clients, in_flight=in_flight, count=40).measure()
    strict = ClosedLoops(clients=clients, in_flight=in_flight, count=40, ceiling=0.001).measure()
    assert own.batch > 4 > 2 > strict.batch
    assert own.tokens_per_s > 0.88 * free.tokens_per_s
    assert own.tokens_per_s > 1.1 * strict.tokens_per_s
    assert own.gap_s < CEILING_S + 2 * STEP_S
    assert own.most < 1.15


@pytest.mark.parametrize("in_flight", [1, 16])
def test_a_stream_keeps_its_pace_beside_another_clients_pictures(in_flight):
    """95 of 100 tokens come within twice their time alone, and pictures go on."""
    figures = ClosedLoops(clients=1, in_flight=in_flight, count=in_flight + 8, stream=True).measure()
    assert figures.stream_gap_s < 2.1 * STEP_S
    assert figures.tokens_per_s > 0.5 * 11


def test_answers_of_a_batch_leave_the_time_to_its_pictures():
    """Nobody reads them before they are whole, so they do not count as answers to be protected."""
    rule = GapRule(slowdown=2.0)
    costs = GapCosts(decode_s=0.04, join_s=2.6, answer_tokens=64)
    assert rule.gap([FlowLoad(0, unattended=True), FlowLoad(2)], costs)[1]
    assert not rule.gap([FlowLoad(0, unattended=True), FlowLoad(0)], costs)[1]
