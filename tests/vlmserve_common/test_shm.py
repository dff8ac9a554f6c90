"""Arrays that are handed over without a copy: what is in them, whose they are, and when their memory is used again."""

from __future__ import annotations

import gc
import os
import weakref
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmserve_common.transport import shm
from vlmserve_common.transport.shm import MAPPED_FROM_BYTES, Block, SharedArrays, block_of

LARGE = (2, MAPPED_FROM_BYTES)
_Room = namedtuple("_Room", "f_bavail f_frsize f_blocks")


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """How many bytes of 2**40 are free."""
    found = [2**40]
    monkeypatch.setattr(shm.os, "statvfs", lambda path: _Room(found[0], 1, 2**40))
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def filled(shared: SharedArrays, mark: int, shape: tuple[int, ...] = LARGE) -> np.ndarray:
    array = shared.empty(shape, np.uint8)
    array[...] = mark
    return array


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_an_array_in_a_block_is_seen_by_whoever_takes_it_and_goes_with_the_last_of_them(tmp_path):
    maker, taker = SharedArrays(tmp_path), SharedArrays(tmp_path, mapped=True)
    array = filled(maker, 7)
    assert array.flags.writeable
    assert maker.outstanding() == 0
    first, second = maker.put(array), maker.put(array.reshape(-1))
    assert maker.outstanding() == 2
    assert os.stat(tmp_path / first).st_ino == os.stat(tmp_path / second).st_ino, "another name, not another block"
    got = taker.take(first, array.dtype, array.shape)
    array[0, 0] = 9  # which nobody should do
    assert got[0, 0] == 9
    assert not got.flags.writeable
    view = got[1]
    del array, got
    assert len(names(tmp_path)) == 2, "the view's and the second message's"
    assert view.max() == 7
    del view
    maker.discard(second)
    assert not names(tmp_path)


def test_what_was_taken_is_handed_on_without_a_copy(tmp_path):
    maker, middle, last = (SharedArrays(tmp_path, mapped=mapped) for mapped in (False, True, True))
    name = maker.put(filled(maker, 3))
    inode = os.stat(tmp_path / name).st_ino
    got = middle.take(name, np.dtype("u1"), LARGE)
    for _ in range(2):
        on = middle.put(got)
        assert os.stat(tmp_path / on).st_ino == inode
        assert last.take(on, np.dtype("u1"), LARGE).min() == 3


@pytest.mark.parametrize("part", [np.s_[1:], np.s_[:, ::2], np.s_[:, :5]], ids=["rest", "every-second", "columns"])
def test_of_a_part_of_a_block_the_part_is_handed_over(tmp_path, part):
    maker = SharedArrays(tmp_path, mapped=True)
    array = maker.empty((4, MAPPED_FROM_BYTES), np.uint8)
    array[...] = np.arange(4)[:, None]
    want = array[part].copy()
    np.testing.assert_array_equal(maker.take(maker.put(array[part]), want.dtype, want.shape), want)


@pytest.mark.parametrize("spare", [0, 4 * MAPPED_FROM_BYTES])
def test_small_arrays_and_those_from_elsewhere_are_copied(tmp_path, spare):
    maker = SharedArrays(tmp_path, spare_bytes=spare)
    small = maker.empty((MAPPED_FROM_BYTES - 1,), np.uint8)
    assert block_of(small) is None
    for array in (small, np.full(LARGE, 6, np.uint8), np.full((3, MAPPED_FROM_BYTES), 6, np.uint8).T):
        got = SharedArrays(tmp_path, mapped=True).take(maker.put(array), array.dtype, array.shape)
        np.testing.assert_array_equal(got, array)


def test_a_kept_block_is_used_again_when_nobody_looks_at_it(tmp_path):
    maker, taker = SharedArrays(tmp_path, spare_bytes=2**40), SharedArrays(tmp_path, mapped=True)
    array = filled(maker, 1)
    place = address(array)
    assert address(filled(maker, 2)) != place, "its array is there"
    name = maker.put(array)
    del array
    assert address(filled(maker, 2)) != place, "it is on its way"
    got = taker.take(name, np.dtype("u1"), LARGE)
    assert address(filled(maker, 2)) != place, "it is looked at"
    assert (got == 1).all()
    del got
    places = [filled(maker, 2) for _ in range(3)]
    assert place in {address(one) for one in places}


def test_who_copies_slowly_gets_what_was_sent(tmp_path, monkeypatch):
    """The maker must not use the block again before it is read."""
    maker, taker = SharedArrays(tmp_path, spare_bytes=2**40), SharedArrays(tmp_path)
    name = maker.put(filled(maker, 1))
    real, seen = np.empty, []

    def late(shape, dtype):
        seen.append(filled(maker, 2))
        return real(shape, dtype)

    monkeypatch.setattr(shm.np, "empty", late)
    assert (taker.take(name, np.dtype("u1"), LARGE) == 1).all()
    assert len(seen) == 1


def test_blocks_kept_are_bounded_and_make_room_for_those_of_another_size(tmp_path):
    maker = SharedArrays(tmp_path, spare_bytes=3 * LARGE[0] * LARGE[1])
    held = [filled(maker, n) for n in range(5)]
    del held
    assert len(names(tmp_path)) == 3
    filled(maker, 9, (5, MAPPED_FROM_BYTES))
    sizes = [path.stat().st_size // MAPPED_FROM_BYTES for path in tmp_path.iterdir()]
    assert 5 in sizes
    assert sum(sizes) <= 6
    block = weakref.ref(block_of(filled(maker, 1, (5, MAPPED_FROM_BYTES))))
    del maker
    gc.collect()
    assert block() is None
    assert not names(tmp_path)


def test_where_half_of_the_file_system_is_taken_arrays_do_not_stay_in_it(tmp_path, room):
    maker, taker = SharedArrays(tmp_path, spare_bytes=2**40), SharedArrays(tmp_path, mapped=True)
    name = maker.put(filled(maker, 1))
    room[0] = 2**39 - 1
    assert block_of(taker.take(name, np.dtype("u1"), LARGE)) is None
    assert block_of(filled(maker, 1, (9, MAPPED_FROM_BYTES))) is None
    assert block_of(filled(maker, 1)) is not None, "what is kept, is used"


def test_mapped_arrays_hold_no_file_descriptors(tmp_path):
    maker, taker = SharedArrays(tmp_path), SharedArrays(tmp_path, mapped=True)
    before = len(os.listdir("/proc/self/fd"))
    made = [filled(maker, n) for n in range(9)]
    taken = [taker.take(maker.put(array), array.dtype, array.shape) for array in made]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(block_of(array) is not None for array in taken)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_block_that_is_too_small_is_an_error_and_freed(tmp_path, mapped):
    maker = SharedArrays(tmp_path)
    name = maker.put(np.zeros(2 * MAPPED_FROM_BYTES, np.uint8))
    with pytest.raises(ValueError, match=name):
        SharedArrays(tmp_path, mapped=mapped).take(name, np.dtype("u1"), (2 * MAPPED_FROM_BYTES + 1,))
    assert not names(tmp_path)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("mpptd"), st.integers(0, 7), st.booleans()), max_size=40))
def test_whatever_is_done_in_whatever_order_contents_stay(tmp_path_factory, steps):
    """m: make, p: put, t: take, d: drop. An array keeps its mark for as long as anybody has it."""
    folder = tmp_path_factory.mktemp("blocks")
    maker = SharedArrays(folder, mapped=True, spare_bytes=6 * MAPPED_FROM_BYTES)
    takers = {mapped: SharedArrays(folder, mapped=mapped) for mapped in (False, True)}
    arrays: list[tuple[int, np.ndarray]] = []
    sent: list[tuple[int, str, tuple[int, ...]]] = []
    for mark, (what, at, mapped) in enumerate(steps):
        if what == "m":
            arrays.append((mark, filled(maker, mark, (1 + at % 3, MAPPED_FROM_BYTES))))
        elif what == "p" and arrays:
            old, array = arrays[at % len(arrays)]
            sent.append((old, maker.put(array), array.shape))
        elif what == "t" and sent:
            old, name, shape = sent.pop(at % len(sent))
            arrays.append((old, takers[mapped].take(name, np.dtype("u1"), shape)))
        elif what == "d" and arrays:
            arrays.pop(at % len(arrays))
        assert all((array == old).all() for old, array in arrays)
    for _, name, _ in sent:
        maker.discard(name)
    array = None
    arrays.clear()
    del maker
    assert not names(folder)


def test_a_block_is_in_use_before_others_see_it(tmp_path, monkeypatch):
    shared, others = SharedArrays(tmp_path, spare_bytes=2**23), []

    class Interrupted(Block):
        def array(self, shape, dtype):
            if not others:  # another thread asks for an array just now
                others.append(None)
                others.append(filled(shared, 2))
            return super().array(shape, dtype)

    monkeypatch.setattr(shm, "Block", Interrupted)
    array = filled(shared, 1)
    assert not np.shares_memory(array, others[1])
    assert (others[1] == 2).all()


def test_an_array_that_cannot_be_kept_drives_nothing_out(tmp_path):
    shared = SharedArrays(tmp_path, spare_bytes=4 * MAPPED_FROM_BYTES)
    kept = block_of(filled(shared, 1)).path
    filled(shared, 2, (5, MAPPED_FROM_BYTES))
    assert block_of(filled(shared, 3)).path == kept


@pytest.mark.parametrize("missing", ["names", "mappings"])
def test_what_cannot_be_mapped_is_copied(tmp_path, monkeypatch, missing):
    def fail(*words, **options):
        raise OSError("none left")

    maker, taker = SharedArrays(tmp_path), SharedArrays(tmp_path, mapped=True)
    array = filled(maker, 5)
    name = maker.put(array)
    monkeypatch.setattr(*{"names": (shm.os, "link"), "mappings": (shm, "Block")}[missing], fail)
    got = taker.take(name, array.dtype, array.shape)
    assert (got == 5).all()
    assert block_of(got) is None
    assert maker.outstanding() == 0
