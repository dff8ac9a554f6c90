"""The order of a flow's waiting requests, and by how many later ones each is overtaken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.scheduler.policy import AGEING, HEAD, make_policy
from vlmserve.scheduler.req import TURNS_PER_CHOICE, Req
from vlmserve.scheduler.waiting_queue import WaitingQueue

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority")
MOST_TOKENS = 200


def never(req: Req) -> int:
    raise AssertionError(req.rid)


def order(name: str, reqs: list[Req], *, match=never, path=never, seed: int = 0) -> list[int]:
    keys = make_policy(name, match=match, path=path, seed=seed).keys(reqs)
    return [reqs[at].arrival for at in sorted(range(len(reqs)), key=keys.__getitem__)]


def test_fcfs_goes_by_arrival_and_asks_the_cache_nothing():
    assert order("fcfs", [make_req(i) for i in (2, 0, 1)]) == [0, 1, 2]


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


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match=r"'first'.*--schedule-policy"):
        make_policy("first", match=never, path=never)


def bound(name: str) -> float:
    """By how many later requests one may be overtaken, where cached prefixes and lengths are at most `MOST_TOKENS`.

    Keys made of tokens: by those that came while it aged less than the tokens are worth. `HEAD` at the most where only
    the head of a queue is looked at, or by which noise may move a request.
    """
    return {
        "fcfs": 0,
        "lpm": MOST_TOKENS / AGEING,
        "dfs-weight": HEAD,
        "lof": MOST_TOKENS / AGEING,
        "srtf": 2 * MOST_TOKENS / AGEING,
        "random": HEAD,
    }[name]


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([name for name in POLICIES if name != "priority"]),
    seed=st.integers(0, 1000),
    tokens=st.lists(st.tuples(st.integers(0, 3), st.integers(1, MOST_TOKENS)), min_size=150, max_size=300),
    backlog=st.integers(1, 150),
)
def test_overtaking_is_bounded(name, seed, tokens, backlog):
    """As many wait all the time, one goes and one comes, and the newest look best."""
    reqs = [make_req(i, prompt=range(length), new=length) for i, (_, length) in enumerate(tokens)]

    def match(req: Req) -> int:
        return tokens[req.arrival][1]

    def path(req: Req) -> tuple[int, ...]:
        return tuple(range(tokens[req.arrival][0] + 1)) if req.arrival else ()

    queue = WaitingQueue(make_policy(name, match=match, path=path, seed=seed))
    for req in reqs[:backlog]:
        queue.arrive(req)
    gone: list[Req] = []

    def take(req: Req) -> bool:
        queue.leave(req)
        gone.append(req)
        return False

    while len(queue):
        queue.visit(take)
        if len(gone) + backlog <= len(reqs):
            queue.arrive(reqs[len(gone) + backlog - 1])
    assert sorted(req.arrival for req in gone) == list(range(len(reqs)))
    for at, req in enumerate(gone):
        overtook = sum(other.arrival > req.arrival for other in gone[:at])
        assert overtook <= bound(name), (req.rid, overtook)
