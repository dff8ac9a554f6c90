"""The real scheduler with media encoded ahead of time beside its requests: nobody waits for long, or for ever."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve.scheduler.prompts import item, request
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.ipc.messages import AbortReq


def clip(length: int, start: int = 0) -> bytes:
    return b"-".join(str(number).encode() for number in range(start, start + length))


def test_what_is_encoded_ahead_of_time_is_there_for_a_request():
    rig = Rig()
    rig.warm_up("w", item(b"seen", 12), item(clip(5)))
    rig.run()
    assert [(i.encoded, i.found, i.saved) for i in rig.warmed["w"].items] == [(1, 0, None), (5, 0, None)]
    batches = len(rig.backend.batches)
    message = request("r", [1] * 20, [(3, 12, b"seen")])
    rig.run(message)
    rig.check_answers(message)
    assert len(rig.backend.batches) == batches
    rig.loop.check_pools()


@pytest.mark.parametrize("encoders", [0, 1, 2])
@pytest.mark.parametrize("space", [0, 3, 1000])
def test_alone_they_get_on_and_come_to_an_end(encoders, space):
    """Clips longer than there is room for, and a picture larger than what may be under way."""
    rig = Rig(Knobs(encoders=encoders, space_rows=space))
    for number in range(3):
        rig.warm_up(f"w{number}", item(clip(20, number * 5)), item(b"big", 30))
    assert not rig.loop.is_idle()
    assert rig.loop.stats().num_warmups == 3
    rig.run()
    assert sorted(rig.warmed) == ["w0", "w1", "w2"]
    assert rig.loop.stats().num_warmups == 0
    assert rig.loop.wait_handles() == []


def test_while_an_encoder_works_there_is_something_to_wait_for():
    rig = Rig(Knobs(encoders=1))
    rig.warm_up("w", item(clip(3)))
    rig.steps()
    assert rig.loop.wait_handles()
    rig.run()
    assert rig.loop.is_idle()


@pytest.mark.parametrize("encoders", [0, 1])
def test_a_request_that_comes_later_waits_for_the_few_that_are_under_way(encoders):
    rig = Rig(Knobs(encoders=encoders))
    rig.warm_up("w", item(clip(100)))
    for _ in range(6):
        if not rig.step():
            rig.encode()
    done = len(rig.backend.encoded())
    message = request("r", [1] * 20, [(3, 12, b"pic")], new=3)
    rig.handle(message)
    while "r" not in rig.finish:
        if not rig.step():
            rig.encode()
    rig.check_answers(message)
    place = rig.backend.encoded().index(message.mm_inputs.items[0].patch_digests[0])
    assert place - done <= 4, "two are under way, and two more were asked for"
    rig.run()
    assert rig.warmed["w"].items[0].encoded == 100


def test_requests_that_are_there_go_first():
    rig = Rig(Knobs(encoders=1, context=128))
    rig.warm_up("w", item(clip(10)))
    pictures = [(15 * place, 12, bytes([65 + place])) for place in range(4)]  # a batch each, two of them ahead
    message = request("r", [1] * 64, pictures)
    rig.run(message)
    wanted = [digest for item in message.mm_inputs.items for digest in item.patch_digests]
    assert rig.backend.encoded()[:4] == wanted


def test_beside_an_answer_an_inline_encoder_takes_little_time():
    rig = Rig(Knobs(rows=2, context=128))
    rig.handle(request("r", [1, 2, 3], new=100))
    rig.step()
    rig.warm_up("w", item(clip(40)))
    while "r" not in rig.finish:
        rig.step()
    assert 0 < len(rig.backend.batches) <= 100 // 16 + 1
    rig.run()
    assert rig.warmed["w"].items[0].encoded == 40


def test_one_that_is_called_off_is_not_answered():
    rig = Rig(Knobs(encoders=1))
    rig.warm_up("w", item(clip(50)))
    rig.step()
    rig.step()
    rig.handle(AbortReq(rid="w"))
    assert rig.loop.is_idle()
    rig.run()
    while rig.encode():
        rig.step()
    assert rig.warmed == {}
    assert len(rig.backend.encoded()) <= 2
    rig.loop.check_pools()


def test_what_cannot_be_encoded_fails_those_who_need_it():
    rig = Rig()
    bad = item(b"bad", 12)
    rig.backend.fail[bad.patch_digests[0]] = 2
    rig.warm_up("w", bad)
    rig.warm_up("other", item(b"good"))
    rig.run(request("r", [1] * 20, [(3, 12, b"bad")]))
    assert rig.warmed["w"].error.message == rig.finish["r"].message
    assert "poisoned" in rig.finish["r"].message
    assert rig.warmed["other"].error is None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=st.lists(
        st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=10
    ),
    aborts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=3),
    encoders=st.integers(0, 2),
    space=st.sampled_from([0, 3, 10, 1000]),
    window=st.sampled_from([1, 16, 64]),
    pages=st.integers(12, 40),
    finish_every=st.integers(1, 4),
)
def test_answers_do_not_depend_on_what_is_encoded_beside_them(
    arrivals, aborts, encoders, space, window, pages, finish_every
):
    """arrivals: whether a warmup comes or a request, the length and first of its clip, and steps until the next."""
    rig = Rig(Knobs(encoders=encoders, space_rows=space, pool=pages * 4, rows=3, warmup_patches=window))
    messages, warmups, steps = {}, [], 0
    for number, (ahead, length, start, gap) in enumerate(arrivals):
        rid = f"r{number}"
        if ahead:
            rig.warm_up(rid, item(clip(length, start), 1), item(b"pic"))
            warmups.append(rid)
        else:
            messages[rid] = request(rid, [number] * (length + 6), [(2, length, clip(length, start))], new=5)
            rig.handle(messages[rid])
        for _ in range(gap):
            rig.step()
            steps += 1
            if steps % finish_every == 0:
                rig.encode()
            for which, when in aborts:
                if when == steps:
                    rig.handle(AbortReq(rid=f"r{which}"))
    rig.run()
    called_off = {f"r{which}" for which, _ in aborts}
    for rid, message in messages.items():
        if rid not in called_off or rig.finish[rid].type == "length":
            rig.check_answers(message)
    for rid in warmups:
        assert rid in rig.warmed or rid in called_off
        assert rid not in rig.warmed or rig.warmed[rid].error is None
    rig.loop.check_pools()
    while rig.encode():  # what nobody waits for any more
        rig.step()
    assert rig.pool.stats().queued == rig.pool.stats().under_way == 0
    assert rig.pool.cache.device.stats().held_bytes == 0
