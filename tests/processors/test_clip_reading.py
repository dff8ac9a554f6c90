"""How clips are read: helper threads, stretches decoded side by side, and packets that need no decoding."""

from __future__ import annotations

import io
import threading
from itertools import pairwise

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.video.clips import ahead, side_by_side
from processors.video.decoding import is_disposable, length_size, stretches
from tests.processors.clips import make_clip

WAIT_S = 20.0  # a bound for waits on other threads, never waited for when all is well


def nothing():
    pass


def fail(place):
    raise ValueError(f"call {place}")


def test_as_many_at_a_time_as_told_and_no_more():
    together = threading.Barrier(3, timeout=WAIT_S)
    lock, inside, seen = threading.Lock(), 0, []

    def call():
        nonlocal inside
        with lock:
            inside += 1
            seen.append(inside)
        together.wait()  # all three of a round are here
        with lock:
            inside -= 1
        together.wait()

    assert side_by_side([call] * 9, 3, nothing, range(9)) == [None] * 9
    assert max(seen) == 3


def test_a_call_before_the_one_that_failed_is_made_though_it_was_to_begin_later():
    begun = []
    calls = [lambda: begun.append(0), lambda: begun.append(1) or fail(1), lambda: begun.append(2)]
    with pytest.raises(ValueError, match="call 1"):
        side_by_side(calls, 1, nothing, [1, 2, 0])
    assert begun == [1, 0]


def test_a_failure_calls_off_the_rest():
    called_off, begun = threading.Event(), []
    calls = [lambda: fail(0), lambda: called_off.wait(WAIT_S), *[lambda: begun.append(1)] * 5]
    with pytest.raises(ValueError, match="call 0"):
        side_by_side(calls, 1, called_off.set, range(len(calls)))
    assert begun == []


def test_a_failure_waits_for_what_is_under_way():
    under_way, called_off, ended = threading.Event(), threading.Event(), []

    def broken():
        assert under_way.wait(WAIT_S)
        fail(0)

    def slow():
        under_way.set()
        assert called_off.wait(WAIT_S)
        ended.append(1)

    with pytest.raises(ValueError, match="call 0"):
        side_by_side([broken, slow], 2, called_off.set, range(2))
    assert ended == [1]


# ---------------------------------------------------------------- things made ahead in a thread


class Source:
    """Counts what was made; `made[n]` is set when thing number n was."""

    def __init__(self, length: int, fail_at: int | None = None) -> None:
        self.made = [threading.Event() for _ in range(length + 1)]
        self.closed = False
        self.thread: threading.Thread | None = None
        self.length, self.fail_at = length, fail_at

    def __iter__(self):
        self.thread = threading.current_thread()
        try:
            for number in range(self.length):
                if number == self.fail_at:
                    raise ValueError(f"number {number}")
                self.made[number].set()
                yield number
        finally:
            self.closed = True

    def over(self) -> bool:
        return self.closed and not self.thread.is_alive()


def test_as_many_are_made_ahead_as_there_is_room_for():
    source = Source(9)
    items = ahead(iter(source), 2)
    assert next(items) == 0
    assert source.made[1].wait(10)
    assert not source.made[2].wait(0.05), "one is in use, one is ready"
    assert next(items) == 1
    assert source.made[2].wait(10)
    items.close()
    assert source.over()


def test_an_error_comes_where_it_belongs():
    source = Source(9, fail_at=3)
    items = ahead(iter(source))
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="number 3"):
        next(items)
    assert source.over()


# ---------------------------------------------------------------- where a clip is cut to be decoded side by side


def test_as_many_as_there_are_threads_and_about_as_long():
    indices = range(0, 1800, 15)
    keys = range(0, 1800, 180)
    assert stretches(indices, keys, multiple=2, most=2) == [range(60), range(60, 120)]
    # keyframes every 12 frames that are used; quarters of 120 would begin at 30, 60 and 90
    found = stretches(indices, keys, multiple=2, most=4)
    assert found[0].start == 0
    assert found[-1].stop == 120
    assert all(part.start % 12 <= 2 for part in found), "at a keyframe or soon behind one"
    assert all(24 <= len(part) <= 36 for part in found)


def test_a_stretch_begins_near_a_keyframe_though_it_is_not_the_middle():
    assert stretches(range(100), [0, 44], multiple=2, most=2) == [range(44), range(44, 100)]
    # the first pair behind the keyframe
    assert stretches(range(100), [0, 43], multiple=2, most=2) == [range(44), range(44, 100)]


def test_one_where_more_would_not_help():
    whole = [range(100)]
    assert stretches(range(100), [0], multiple=2, most=4) == whole, "both would decode the first half"
    assert stretches(range(100), [0, 90], multiple=2, most=4) == whole, "the second would be done at once"
    assert stretches(range(100), [0, 50], multiple=2, most=1) == whole
    assert stretches(range(20), [0, 10], multiple=2, most=4) == [range(20)], "to open the file again would cost more"
    assert stretches([7], [0, 5], multiple=2, most=4) == [range(1)]
    sparse = range(0, 10_000, 1000)  # each by its own keyframe: ten frames in all
    assert stretches(sparse, range(0, 10_000, 10), multiple=2, most=4) == [range(10)]


@given(
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=120),
    gaps=st.lists(st.integers(1, 90), max_size=30),
    multiple=st.integers(1, 3),
    most=st.integers(1, 5),
)
def test_stretches_hold_every_place_once_and_whole_temporal_patches(steps, gaps, multiple, most):
    indices = [sum(steps[: place + 1]) for place in range(len(steps))]
    keys = [sum(gaps[:place]) for place in range(len(gaps) + 1)]
    found = stretches(indices, keys, multiple=multiple, most=most)
    assert 1 <= len(found) <= most
    assert [place for part in found for place in part] == list(range(len(indices)))
    assert all(found)
    assert all(len(part) % multiple == 0 for part, _ in pairwise(found))


# ---------------------------------------------------------------- h264 packets


SLICE, DISPOSABLE_SLICE, HEADER, INFORMATION = 0x41, 0x01, 0x67, 0x06


def units(*headers: int, prefix: int = 4, size: int = 5) -> bytes:
    return b"".join(size.to_bytes(prefix, "big") + bytes([header]) + bytes(size - 1) for header in headers)


@pytest.mark.parametrize("prefix", [1, 2, 3, 4])
def test_slices_without_references(prefix):
    def disposable(*headers):
        return is_disposable(units(*headers, prefix=prefix), prefix)

    assert disposable(INFORMATION, DISPOSABLE_SLICE, DISPOSABLE_SLICE)
    # a header sets what later pictures depend on, too
    others = [(SLICE,), (DISPOSABLE_SLICE, SLICE), (HEADER, DISPOSABLE_SLICE), (INFORMATION,), ()]
    assert not any(disposable(*headers) for headers in others)


def test_what_is_not_understood_is_kept():
    whole = units(DISPOSABLE_SLICE, DISPOSABLE_SLICE)
    assert is_disposable(whole, 4)
    assert not is_disposable(whole[:-1], 4)
    assert not is_disposable(whole + b"\0", 4)
    assert not is_disposable(units(DISPOSABLE_SLICE, size=1)[:3], 4)
    assert not is_disposable(b"\0\0\0\1" + whole, 4)  # with start codes instead of lengths


@pytest.mark.parametrize(
    ("extradata", "size"),
    [
        (None, 0),
        (b"", 0),
        (b"\1\x64\0\x1e", 0),
        (b"\1\x64\0\x1e\xff", 4),
        (b"\1\x64\0\x1e\xfd", 2),
        (b"\0\0\0\1\x67", 0),
    ],
)
def test_length_size(extradata, size):
    assert length_size(extradata) == size


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska"])
def test_a_clip_without_its_disposable_packets(container):
    """The decoder skips the same ones by itself."""
    data = make_clip(40, codec="libx264", container=container, gop=40)

    def frames(skip_frame, keep):
        with av.open(io.BytesIO(data)) as box:
            stream = box.streams.video[0]
            stream.codec_context.skip_frame = skip_frame
            prefix = length_size(stream.codec_context.extradata)
            assert prefix == 4
            packets = (packet for packet in box.demux(stream) if keep(bytes(packet), prefix))
            return {frame.pts: bytes(frame.planes[0]) for packet in packets for frame in packet.decode()}

    left = frames("DEFAULT", lambda packet, prefix: not is_disposable(packet, prefix))
    assert 5 < len(left) < 35
    assert left == frames("NONREF", lambda packet, prefix: True)
    whole = frames("DEFAULT", lambda packet, prefix: True)
    assert len(whole) == 40
    assert left.items() <= whole.items()
