"""Where the states of recurrent layers are kept, and who has which."""

from types import SimpleNamespace

import pytest

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.memory.recurrent_states import BLANK, RecurrentStates, StateCopy
from vlmserve.scheduler.request_states import RequestStates, snapshot_unit

UNIT = 8


def make_states(count: int = 20, *, snapshots: bool = True) -> RequestStates:
    pool = RecurrentStates(count, num_slots=1000, page_size=4)
    return RequestStates(pool, unit=UNIT, interval=30, snapshots=snapshots)


def places(req, start: int, end: int) -> list[int]:
    """Of a step's snapshots, if the slot of token number i is i."""
    states = make_states()
    states.begin(req, None)
    found = states.snapshots([(req, start, end)], lambda _, place: place)
    assert len({one.target for one in found}) == len(found)
    assert all(one.index == 0 for one in found)
    return [start + one.tokens for one in found]


@pytest.mark.parametrize(("page", "unit"), [(1, 64), (16, 64), (64, 64), (128, 128), (48, 192)])
def test_units_end_pages_and_chunks(page, unit):
    assert snapshot_unit(page) == unit


def test_intervals_and_the_ends_of_prompts():
    req = make_req(0, prompt=[1] * 77, new=200)
    assert places(req, 0, 77) == [32, 64, 72]
    assert places(req, 0, 40) == [32, 40], "a chunk as long as an interval"
    assert places(req, 40, 56) == [], "a shorter one"
    assert places(req, 65, 77) == [72]
    assert places(req, 72, 77) == []
    assert [place for place in range(78, 200) if places(req, place - 1, place)] == [96, 128, 160, 192]


def test_an_equal_prompt_finds_all_but_what_must_be_computed():
    assert places(make_req(0, prompt=[1] * 24), 0, 24) == [16]
    assert places(make_req(0, prompt=[1] * 25), 0, 25) == [24]
    assert places(make_req(0, prompt=[1] * 8), 0, 8) == []


def test_the_ends_of_pictures():
    req = make_req(0, prompt=[1] * 100)
    req.media = SimpleNamespace(ends=(9, 18, 50, 60))
    assert places(req, 0, 100) == [16, 32, 56, 64, 96]
    assert places(req, 17, 61) == [32, 56]
    assert places(req, 33, 55) == []


def test_states_go_from_request_to_request():
    states = make_states(2)
    first, second = make_req(0), make_req(1)
    states.begin(first, None)
    mine = first.state
    assert states.take_copies() == (StateCopy(source=BLANK, target=mine),)
    states.end(first)
    assert first.state is None
    states.begin(second, None)
    states.end(second)
    states.begin(first, None)  # what the second was to begin with is not needed any more
    assert states.take_copies() == (StateCopy(source=BLANK, target=first.state),)
    assert states.take_copies() == ()
    assert states.held == 1
    states.end(first)
    assert states.held == 0


def test_where_room_is_short_the_last_snapshot_stays():
    states, req = make_states(2), make_req(0, prompt=[1] * 80)
    states.begin(req, None)
    (kept,) = states.snapshots([(req, 0, 80)], lambda _, place: place)
    assert kept.tokens == 80
    assert states.snapshots([(req, 72, 80)], lambda _, place: place) == (), "it is there already"


def test_none_are_made_that_nobody_could_find():
    states, req = make_states(snapshots=False), make_req(0, prompt=[1] * 80)
    states.begin(req, None)
    assert states.snapshots([(req, 0, 80)], lambda _, place: place) == ()
