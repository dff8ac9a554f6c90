"""Clients take turns at the encoder, by how much there is to encode."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlmserve.scheduler.req_media import FairOrder


def test_one_picture_goes_before_most_of_a_flood():
    order = FairOrder()
    flood = [order.tag("flood", 1000, arrival) for arrival in range(100)]
    order.encoded(flood[3])
    one = order.tag("one", 1000, 100)
    assert flood[3] < one < flood[4]


def test_who_was_idle_has_saved_nothing_up():
    order = FairOrder()
    for arrival in range(10):
        order.encoded(order.tag("busy", 500, arrival))
    late = [order.tag("late", 500, 10 + number) for number in range(3)]
    busy = [order.tag("busy", 500, 20 + number) for number in range(3)]
    assert sorted([*late, *busy]) == [late[0], late[1], busy[0], late[2], busy[1], busy[2]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans()), max_size=60))
def test_tags_are_those_of_one_order_and_a_client_s_rise(requests):
    order, tags = FairOrder(), {}
    waiting = []
    for arrival, (client, patches, served) in enumerate(requests):
        tag = order.tag(client, patches, arrival)
        assert tag not in tags
        assert all(tag > other for other, owner in tags.items() if owner == client)
        tags[tag] = client
        waiting.append(tag)
        if served:
            order.encoded(waiting.pop(waiting.index(min(waiting))))
    assert order.behind_all() > max(tags, default=0)
    assert order.behind_all() not in tags
