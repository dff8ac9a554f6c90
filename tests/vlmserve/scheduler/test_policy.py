"""The order of a flow's waiting requests, and whose place a waiting request takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.scheduler.policy import AGEING, HEAD, less_urgent, make_policy, over_share
from vlmserve.scheduler.req import TURNS_PER_CHOICE, Req

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority")


def never(req: Req) -> int:
    raise AssertionError(req.rid)


def order(name: str, reqs: list[Req], *, match=never, path=never, seed: int = 0) -> list[int]:
    keys = make_policy(name, match=match, path=path, seed=seed).keys(reqs)
    return [reqs[at].arrival for at in sorted(range(len(reqs)), key=keys.__getitem__)]


def test_later_answers_to_one_prompt_let_others_pass():
    reqs = [make_req(0), *(make_req(1 + i, choice=1 + i) for i in range(3)), make_req(4), make_req(20)]
    assert order("fcfs", reqs) == [0, 4, 1, 2, 20, 3]
    assert reqs[3].turn == 3 + 3 * TURNS_PER_CHOICE


def test_lpm_goes_by_cached_tokens_and_then_by_arrival():
    cached = [0, 700, 300, 700, 0]
    reqs = [make_req(i) for i in reversed(range(5))]
    assert order("lpm", reqs, match=lambda req: cached[req.arrival]) == [1, 3, 2, 0, 4]


@pytest.mark.parametrize(("head_start", "first"), [(-1, 1), (0, 0), (1, 0)])
def test_lpm_ages_what_waits_by_tokens(head_start, first):
    """An arrival counts as much as `AGEING` cached tokens."""
    reqs = [make_req(0), make_req(5)]
    cached = {0: 0, 5: 5 * AGEING - head_start}
    assert order("lpm", reqs, match=lambda req: cached[req.arrival])[0] == reqs[first].arrival


def test_dfs_weight_walks_the_tree_heaviest_branches_first():
    #            0: --; 1: a b; 2: c; 3: a; 4: a b; 5: c d; 6: a e
    paths = {0: (), 1: (1, 2), 2: (3,), 3: (1,), 4: (1, 2), 5: (3, 4), 6: (1, 5)}
    found = order("dfs-weight", [make_req(i) for i in range(7)], path=lambda req: paths[req.arrival])
    assert found == [1, 4, 6, 3, 5, 2, 0]


def test_dfs_weight_leaves_nobody_behind_for_more_than_a_head():
    paths = {0: ()} | dict.fromkeys(range(1, HEAD + 2), (1,))

    def first(newest: int) -> int:
        return order("dfs-weight", [make_req(i) for i in range(newest + 1)], path=lambda req: paths[req.arrival])[0]

    assert first(HEAD) == 1
    assert first(HEAD + 1) == 0


def test_lof_and_srtf_go_by_length():
    long, short = make_req(0, new=90), make_req(1, new=5)
    longer = make_req(2, new=200)
    assert order("lof", [long, short, longer]) == [2, 0, 1]
    assert order("srtf", [long, short, longer]) == [1, 0, 2]
    wordy = make_req(3, prompt=range(150), new=5)
    assert order("srtf", [long, short, wordy]) == [1, 0, 3]


def test_random_is_one_order_for_a_seed_and_another_for_the_next():
    reqs = [make_req(i) for i in range(20)]
    assert order("random", reqs) == order("random", reqs[::-1]) != list(range(20))
    assert order("random", reqs, seed=1) != order("random", reqs, seed=2)


def test_priority_goes_before_all_and_preempts():
    reqs = [make_req(0), make_req(1, priority=-5), make_req(2, priority=3), make_req(1000, priority=-5)]
    assert order("priority", reqs) == [1, 1000, 0, 2]
    assert [name for name in POLICIES if make_policy(name, match=never, path=never).preempts] == ["priority"]


def arrival(victim) -> int | None:
    return None if victim is None else victim.arrival


@pytest.mark.parametrize(
    ("waiting", "running", "victim"),
    [
        (0, [], None),
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
        ("aaab", 4, 2),
        ("aabb", 4, 1),  # of equals, the one whose requests came first
        ("aacc", 4, None),  # c has its share
        ("ab", 2, None),  # nobody can have less than one place
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
