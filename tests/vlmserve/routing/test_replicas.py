"""Which replica gets a request: balance, caches, sessions, choices, membership, and bounds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmserve.routing.replicas import BLOCK_TOKENS, Demand, Method, ReplicaRouter


def keys(text: str) -> tuple[bytes, ...]:
    """Those of a prompt whose blocks are letters."""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


def asking(rid: str, prompt: str = "", **fields) -> Demand:
    return Demand(**{"rids": (rid,), "tokens": len(prompt) * BLOCK_TOKENS, "prefix": keys(prompt), **fields})


def test_different_prompts_are_spread_and_the_same_one_goes_where_it_was():
    router = ReplicaRouter(3)
    assert [router.place(asking(name, name * 8)) for name in "abc"] == [0, 1, 2]
    assert [router.place(asking(name + "2", name * 8)) for name in "cab"] == [2, 0, 1]
    assert router.loads == (8 * BLOCK_TOKENS,) * 3, "what was there already is no work"
    for rid in ("a", "b", "c", "a2", "b2", "c2", "a", "never"):
        router.end(rid)
    assert (router.loads, router.num_in_flight) == ((0, 0, 0), 0)
    assert [router.place(asking(name + "3", name * 8)) for name in "ddee"] == [0, 0, 1, 1], "in turn when idle"


def test_the_longest_match_wins_and_a_short_one_counts_for_nothing():
    router = ReplicaRouter(2)
    router.place(asking("1", "aaaabb"))
    router.place(asking("2", "aaaacc", replica=1))
    assert router.place(asking("3", "aaaaccdd")) == 1
    assert router.place(asking("4", "aaaabbdddd")) == 0
    router = ReplicaRouter(2)
    router.place(asking("1", "aaaa"))
    assert router.place(asking("2", "aaaa" + "z" * 5)) == 1, "4 of 9 blocks are less than half"


def test_pictures_count_in_whatever_prompt():
    router = ReplicaRouter(2)
    router.place(asking("1", "ab", media=((b"picture", 64),)))
    router.place(asking("2", "xy", media=((b"other", 64),)))
    assert router.place(asking("3", "q", media=((b"other", 64),))) == 1
    assert router.place(asking("4", "r", media=((b"picture", 64),))) == 0
    assert router.place(Demand(rids=("warmup",), media=((b"other", 64),))) == 1


def test_a_match_is_left_where_its_replica_has_too_much_to_do():
    router = ReplicaRouter(2, apart_tokens=100)
    assert router.place(asking("1", "aaaa", answer=50)) == 0
    assert router.place(asking("2", "aaaa")) == 1, "178 tokens are more than 100"
    router.end("1")
    assert router.place(asking("3", "aaaa", answer=10)) == 0
    busy = ReplicaRouter(2, apart_tokens=100)
    busy.place(asking("x", "a" * 4, answer=10000))
    busy.place(asking("y", "b" * 4, answer=14000))
    assert busy.place(asking("z", "b" * 4)) == 1, "it has more, but not half as much again"


def test_a_session_stays_and_a_choice_moves_it():
    router = ReplicaRouter(2, apart_tokens=0, most_sessions=2)
    assert router.place(asking("1", "aa", session="s", answer=10**6)) == 0
    assert router.place(asking("2", "bb", session="s")) == 0, "whatever there is to do"
    assert router.place(asking("3", "cc", session="s", replica=1)) == 1
    assert router.place(asking("4", "dd", session="s")) == 1
    router.place(asking("5", session="t"))
    router.place(asking("6", session="u"))
    assert len(router._sessions) == 2, "the one used longest ago is forgotten"
    assert router.place(asking("7", "aa", session="s")) == 1


def test_copies_of_a_prompt_stay_together_and_end_one_by_one():
    router = ReplicaRouter(2)
    replica = router.place(asking("a", "aaa", rids=("a-0", "a-1"), answer=7))
    assert [router.replica_of(rid) for rid in ("a-0", "a-1", "a-2")] == [replica, replica, None]
    assert router.loads[replica] == 3 * BLOCK_TOKENS + 7
    for rid in ("a-1", "a-0"):
        router.end(rid)
    assert router.loads == (0, 0)


def test_other_methods():
    turns = ReplicaRouter(3, method="round_robin")
    assert [turns.place(asking(str(n), "same")) for n in range(6)] == [0, 1, 2, 0, 1, 2]
    shortest = ReplicaRouter(2, method="shortest_queue")
    assert [shortest.place(asking(str(n), "same", answer=n)) for n in (5, 1, 1, 1)] == [0, 1, 1, 1]


@pytest.mark.parametrize("method", ["affinity", "round_robin", "shortest_queue"])
def test_a_full_replica_gets_nothing_while_another_has_room(method: Method):
    router = ReplicaRouter(3, method=method, most_answers=2)
    router.place(asking("x", "aaaa", rids=("x-0", "x-1"), replica=0))
    assert sorted(router.place(asking(f"{n}", "aaaa", answer=10000)) for n in range(4)) == [1, 1, 2, 2]
    assert router.place(asking("named", "aaaa", replica=0)) == 0
    assert router.place(asking("late", "aaaa")) == 0, "all are full: the match, the next in turn, the least to do"
    for rid in ("x-0", "x-1", "named", "never"):
        router.end(rid)
    router.place(asking("y", "bbbb", answer=10))
    assert router.replica_of("y") == 0, "there is room again"


def test_caches_that_were_emptied_are_not_gone_after():
    router = ReplicaRouter(2)
    router.place(asking("1", "aaaa", replica=1))
    router.end("1")
    router.forget()
    assert router.place(asking("2", "aaaa")) == 0


def simulate(seed: int, size: int) -> list[int]:
    """Conversations that grow, of which some are much more popular than others, ending in any order."""
    router = ReplicaRouter(size, apart_tokens=2000, most_keys=500)
    dice = random.Random(seed)
    conversations = [chr(ord("A") + n) * 10 for n in range(20)]
    under_way: list[str] = []
    choices: list[int] = []
    matched = wanted = 0
    for number in range(3000):
        place = min(int(dice.expovariate(0.3)), 19)
        conversations[place] += dice.choice("abcdefgh")
        if len(conversations[place]) > 40:
            conversations[place] = conversations[place][:10]
        demand = asking(str(number), conversations[place], answer=dice.randrange(1, 256))
        before = router.loads
        replica = router.place(demand)
        added = router.loads[replica] - before[replica]
        assert before[replica] <= max(min(before) + 2000, 1.5 * min(before))
        matched, wanted = matched + demand.work + demand.answer - added, wanted + demand.work
        choices.append(replica)
        under_way.append(str(number))
        while len(under_way) > dice.randrange(60):
            router.end(under_way.pop(dice.randrange(len(under_way))))
        assert len(router._known) <= 500
    assert matched > 0.8 * wanted, "most of a conversation is found"
    assert min(router.placed) > 0.4 * len(choices) / size, "and none is idle for that"
    for rid in under_way:
        router.end(rid)
    assert (router.loads, router.num_in_flight) == ((0,) * size, 0)
    return choices


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", [2, 5])
def test_simulated_traffic(seed: int, size: int):
    assert simulate(seed, size) == simulate(seed, size)


# ---- replicas that come and go


def test_only_those_offered_are_chosen_whatever_speaks_for_others():
    router = ReplicaRouter(3)
    router.place(asking("1", "aaaa", session="s", replica=1))
    assert router.place(asking("2", "aaaa", session="s"), [0, 2]) == 0
    assert router.place(asking("3", session="s"), [0, 1, 2]) == 0, "the conversation has moved"
    turns = ReplicaRouter(3, method="round_robin")
    assert [turns.place(asking(str(number)), [0, 2]) for number in range(4)] == [0, 2, 0, 2]


def test_a_replica_that_was_removed_is_forgotten_and_its_number_used_again():
    router = ReplicaRouter(0)
    assert [router.add() for _ in range(2)] == [0, 1]
    router.place(asking("1", "aaaa", media=((b"picture", 64),), session="s", replica=1))
    with pytest.raises(AssertionError, match="in flight at replica 1"):
        router.remove(1)
    router.end("1")
    router.remove(1)
    assert router.add() == 1
    router.place(asking("2", "b" * 8, answer=1), [1])  # 0 is idle now
    assert router.place(asking("3", "aaaa", media=((b"picture", 64),), session="s")) == 0


def test_a_replica_that_comes_later_takes_turns_and_does_not_get_all():
    router = ReplicaRouter(1)
    for number in range(100):
        router.place(asking(str(number)))
    router.add()
    assert [router.place(asking(str(number))) for number in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_what_others_do_at_a_replica_counts():
    router = ReplicaRouter(2, apart_tokens=100)
    router.place(asking("1", "aaaa", replica=0))
    router.end("1")
    router.told(0, 1000)
    assert [router.place(asking(str(number), "aaaa")) for number in range(2, 4)] == [1, 1]
    router.told(0, 0)
    assert router.loads == (0, 4 * BLOCK_TOKENS)


@given(st.data())
def test_placing_is_sticky_balanced_and_keeps_to_the_members(data: st.DataObject):
    """Replicas come, go and are left out at random, while conversations go on."""
    router, members, under_way = ReplicaRouter(0), set(), {}
    at: dict[str, tuple[frozenset[int], int]] = {}
    for step in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["add", "remove", "ask", "ask", "ask", "end"]))
        if action == "add" and len(members) < 5:
            members.add(router.add())
        elif action == "remove" and members:
            gone = data.draw(st.sampled_from(sorted(members)))
            if gone not in under_way.values():
                router.remove(gone)
                members.remove(gone)
                at = {name: kept for name, kept in at.items() if kept[1] != gone}
        elif action == "ask" and members:
            among = data.draw(st.sets(st.sampled_from(sorted(members)), min_size=1))
            name = data.draw(st.sampled_from("stuv"))
            replica = router.place(asking(str(step), name * 4, session=name), sorted(among))
            assert replica in among
            if name in at and at[name][1] in among:
                assert replica == at[name][1], "as long as it is there, a conversation stays"
            at[name] = frozenset(among), replica
            under_way[str(step)] = replica
        elif action == "end" and under_way:
            rid = data.draw(st.sampled_from(sorted(under_way)))
            router.end(rid)
            del under_way[rid]
    for rid in under_way:
        router.end(rid)
    assert not any(router.loads)
    if members:
        places = [
            router.place(asking(f"new {number}", answer=7), sorted(members)) for number in range(4 * len(members))
        ]
        assert {places.count(member) for member in members} == {4}, "new ones are spread evenly"
