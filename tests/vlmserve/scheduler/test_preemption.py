"""Whose place a waiting request takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.scheduler.policy import less_urgent, over_share


def arrival(victim) -> int | None:
    return None if victim is None else victim.arrival


@pytest.mark.parametrize(
    ("waiting", "running", "victim"),
    [
        (0, [], None),
        (0, [0, 0], None),
        (1, [0, 1], None),
        (0, [0, 1], 1),
        (0, [2, 1, 2], 2),  # the newest of the least urgent
        (-3, [-2, -4], 0),
    ],
)
def test_by_priority(waiting, running, victim):
    reqs = [make_req(i, priority=priority) for i, priority in enumerate(running)]
    assert arrival(less_urgent(make_req(99, priority=waiting), reqs)) == victim


@pytest.mark.parametrize(
    ("running", "places", "victim"),
    [
        ("", 4, None),
        ("aaaa", 4, 3),
        ("aaab", 4, 2),
        ("aabb", 4, 1),  # of equals, the one whose requests came first
        ("abcd", 4, None),
        ("aaaac", 5, 3),
        ("aacc", 4, None),  # c has its share
        ("ab", 2, None),  # nobody can have less than one place
        ("aab", 3, 1),
        ("aabcc", 5, None),
        ("aaacc", 5, None),  # to take one would only change sides
    ],
)
def test_by_clients(running, places, victim):
    reqs = [make_req(i, client=client) for i, client in enumerate(running)]
    assert arrival(over_share(make_req(99, client="c"), reqs, places)) == victim


def test_by_prompts_of_one_client():
    reqs = [make_req(i, group="n") for i in range(8)]
    assert arrival(over_share(make_req(99, group="single"), reqs, 8)) == 7
    assert over_share(make_req(99, group="n"), reqs, 8) is None
    assert over_share(make_req(99), [make_req(i) for i in range(8)], 8) is None


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.sampled_from("abcd"), st.integers(1, 12))
def test_taking_turns_at_places_comes_to_an_end(running, client, places):
    """A request that lost its place does not take it back from the one that got it."""
    reqs = [make_req(i, client=name) for i, name in enumerate(running)]
    newcomer = make_req(99, client=client)
    victim = over_share(newcomer, reqs, places)
    if victim is not None:
        assert victim.client != client
        changed = [*(req for req in reqs if req is not victim), newcomer]
        again = over_share(victim, changed, places)
        assert again is None or again.client not in (client, victim.client)
