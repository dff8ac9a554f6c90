"""The choice of a replica for a request, with replicas that come and go."""

from __future__ import annotations

import itertools

from vlmserve.ray.service.choosing import REQUESTS, STARTED, Order, ReplicaChooser
from vlmserve.routing.replicas import Demand

_numbers = itertools.count()


def order(*prefix: str, number: int | None = None, avoid: tuple[str, ...] = ()) -> Order:
    """A request with a block of its prompt for each word."""
    keys = tuple(word.encode() for word in prefix)
    demand = Demand(rids=(str(next(_numbers)),), tokens=32 * len(keys), prefix=keys)
    return Order(demand=demand, number=number, avoid=avoid, scope={}, body=b"")


def chooser(*names: str) -> ReplicaChooser:
    made = ReplicaChooser()
    made.update({name: {STARTED: float(number)} for number, name in enumerate(names)})
    return made


def test_a_known_beginning_goes_where_it_was() -> None:
    replicas = chooser("a", "b")
    first = replicas.ranked(order("x", "y"), {"a", "b"})[0]
    other = replicas.ranked(order("p", "q"), {"a", "b"})[0]
    assert {first, other} == {"a", "b"}
    for _ in range(3):
        assert replicas.ranked(order("x", "y", "z"), {"a", "b"})[0] == first
        assert replicas.ranked(order("p", "q"), {"a", "b"})[0] == other


def test_all_replicas_are_ranked_and_only_those_asked_for() -> None:
    replicas = chooser("a", "b", "c")
    assert sorted(replicas.ranked(order("x"), {"a", "b", "c"})) == ["a", "b", "c"]
    assert sorted(replicas.ranked(order("x"), {"b", "c"})) == ["b", "c"]
    assert sorted(replicas.ranked(order("x", avoid=("b",)), {"a", "b"})) == ["a"]
    assert replicas.ranked(order("x", avoid=("b",)), {"b"}) == ["b"], "better than none"


def test_the_same_request_gets_the_same_answer_again() -> None:
    replicas = chooser("a", "b")
    one = order()
    assert replicas.ranked(one, {"a", "b"}) == replicas.ranked(one, {"a", "b"})
    assert replicas.num_in_flight == 1
    best = replicas.ranked(one, {"a", "b"})[0]
    other = {"a": "b", "b": "a"}[best]
    assert replicas.ranked(one, {other}) == [other], "the best one is gone"


def test_where_a_request_went_counts_and_not_where_it_was_to_go() -> None:
    replicas = chooser("a", "b")
    one = order("x", "y")
    best, other = replicas.ranked(one, {"a", "b"})
    replicas.went(one, other)
    assert replicas.num_in_flight == 1
    assert replicas.ranked(order("n"), {"a", "b"})[0] == best, "the other one has something to do"


def test_the_home_of_things_is_the_oldest_replica() -> None:
    replicas = ReplicaChooser()
    replicas.update({"a": {STARTED: 3.0}, "b": {STARTED: 1.0}, "c": {STARTED: 2.0}})
    for _ in range(5):
        assert replicas.ranked(order(number=0), {"a", "b", "c"}) == ["b"]
    by_number = [replicas.ranked(order(number=number), {"a", "b", "c"}) for number in range(4)]
    assert by_number == [["b"], ["c"], ["a"], ["b"]]
    replicas.update({"a": {STARTED: 3.0}, "c": {STARTED: 2.0}})
    assert replicas.ranked(order(number=0), {"a", "c"}) == ["c"]


def test_nothing_is_left_of_requests_that_ended_or_whose_replica_is_gone() -> None:
    replicas = chooser("a", "b")
    first, second = order("x"), order("y")
    at = {replicas.ranked(one, {"a", "b"})[0]: one for one in (first, second)}
    replicas.ended(at["a"].demand.rids[0])
    assert replicas.num_in_flight == 1
    replicas.update({"a": {}})
    assert replicas.num_in_flight == 0
    assert replicas.ranked(order("y"), {"a"}) == ["a"]


def test_the_work_of_other_fronts_counts() -> None:
    replicas = chooser("a", "b")
    replicas.update({"a": {STARTED: 0.0, REQUESTS: 8}, "b": {STARTED: 1.0}})
    for _ in range(4):
        one = order("x")
        assert replicas.ranked(one, {"a", "b"})[0] == "b"
        replicas.ended(one.demand.rids[0])


def test_a_replica_that_is_not_known_yet_is_taken_if_there_is_no_other() -> None:
    assert chooser().ranked(order("x"), ["new"]) == ["new"]
