"""Messages between processes: what comes out is what went in, and nothing else is accepted."""

import dataclasses
import os

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import SHARED_FROM_BYTES, WireCodec, WireError, join, split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    name: str
    array: np.ndarray
    more: tuple[np.ndarray, ...] = ()
    data: bytes = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    count: int


@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    dtype=st.sampled_from(["float32", "int64", "uint8", "bool", "float16"]),
    name=st.text(),
    data=st.binary(),
)
def test_round_trip(shape, dtype, name, data):
    codec = WireCodec([Note, Other])
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    note = Note(name=name, array=array, more=(array.T, array[::2] if array.ndim else array), data=data)
    back = codec.decode([bytes(frame) for frame in codec.encode(note)])
    assert (back.name, back.data) == (name, data)
    for ours, theirs in zip((note.array, *note.more), (back.array, *back.more), strict=True):
        assert theirs.dtype == ours.dtype
        assert np.array_equal(theirs, ours)


def test_numbers_of_numpy_arrive_as_plain_ones():
    codec = WireCodec([Other])
    back = codec.decode(codec.encode(Other(count=np.int64(3))))
    assert (back.count, type(back.count)) == (3, int)


def test_large_arrays_go_through_shared_memory_and_leave_nothing(tmp_path):
    shared = SharedArrays(tmp_path)
    codec = WireCodec([Note], shared)
    array = np.arange(SHARED_FROM_BYTES, dtype=np.uint8).reshape(2, -1)
    frames = codec.encode(Note(name="a", array=array))
    assert sum(len(frame) for frame in frames) < 1000
    assert shared.outstanding() == 1
    back = codec.decode(frames)
    assert shared.outstanding() == 0
    assert np.array_equal(back.array, array)
    back.array[0, 0] = 9  # its own memory, writable


def test_a_message_that_cannot_be_encoded_leaves_no_block_behind(tmp_path):
    shared = SharedArrays(tmp_path)
    codec = WireCodec([Note], shared)
    big = np.zeros(SHARED_FROM_BYTES, np.uint8)
    with pytest.raises((TypeError, NotImplementedError)):
        codec.encode(Note(name="a", array=big, more=(np.array([object()]),)))
    assert shared.outstanding() == 0


def test_arrays_that_find_no_room_in_shared_memory_go_with_their_message(tmp_path, caplog):
    codec = WireCodec([Note], SharedArrays(tmp_path / "absent"))
    array = np.arange(SHARED_FROM_BYTES, dtype=np.uint8)
    assert np.array_equal(codec.decode(codec.encode(Note(name="a", array=array))).array, array)
    assert "no room for a large array" in caplog.text


def test_blocks_of_a_process_that_is_gone_are_freed_and_no_others(tmp_path):
    mine, too = SharedArrays(tmp_path), SharedArrays(tmp_path)
    names = [shared.put(np.zeros(3)) for shared in (mine, too, mine)]
    assert len(set(names)) == 3, "also those that one process put by two ways"
    other = tmp_path / names[0].replace(str(os.getpid()), f"{os.getpid()}1", 1)
    other.write_bytes(b"of a process whose id begins alike")
    mine.discard_of(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == [other.name]
    assert mine.is_block_name(other.name)


def test_an_array_that_stands_in_a_message_twice_travels_once(tmp_path):
    shared = SharedArrays(tmp_path)
    codec = WireCodec([Note], shared)
    big, small = np.ones(SHARED_FROM_BYTES, np.uint8), np.arange(3)
    frames = codec.encode(Note(name="a", array=big, more=(big, small, big, small)))
    assert (shared.outstanding(), len(frames)) == (1, 3)
    back = codec.decode(frames)
    assert shared.outstanding() == 0
    for got, want in zip((back.array, *back.more), (big, big, small, big, small), strict=True):
        assert np.array_equal(got, want)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    parts: tuple[torch.Tensor, ...]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_tensors_travel_as_they_are(dtype, tmp_path):
    codec = WireCodec([Rows], SharedArrays(tmp_path))
    table = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    sent = (table, table[3:5], table.T, table[:0])
    got = codec.decode([bytes(frame) for frame in codec.encode(Rows(parts=sent))]).parts
    for a, b in zip(got, sent, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)
        assert a.untyped_storage().nbytes() == b.nbytes, "of a slice, only the slice"
    got[1].zero_()  # writable
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_a_type_that_nobody_sends_is_refused():
    frames = WireCodec([Rows]).encode(Rows(parts=(torch.zeros(2),)))
    frames[1] = frames[1].replace(b"float32", b"complex")
    with pytest.raises(WireError):
        WireCodec([Rows]).decode(frames)


def test_a_message_that_cannot_be_decoded_leaves_no_block_behind(tmp_path):
    shared = SharedArrays(tmp_path)
    codec = WireCodec([Note], shared)
    arrays = [np.full(SHARED_FROM_BYTES, i, np.uint8) for i in range(3)]
    frames = codec.encode(Note(name="a", array=arrays[0], more=(arrays[1], arrays[2])))
    victim = sorted(tmp_path.iterdir())[1]
    victim.write_bytes(b"short")
    with pytest.raises(WireError, match=victim.name):
        codec.decode(frames)
    assert shared.outstanding() == 0


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"Note"],
        [b"Nothing", b"\x80"],
        [b"Note", b"\xc1"],
        [b"Note", msgspec.msgpack.encode({"name": 5, "array": ["<f4", [1], 2]}), b"1234"],
        [b"Note", msgspec.msgpack.encode({"name": "a", "array": ["|O", [1], 2]}), b"12345678"],
        [b"Note", msgspec.msgpack.encode({"name": "a", "array": ["<f4", [9], 2]}), b"1234"],
        [b"Note", msgspec.msgpack.encode({"name": "a", "array": ["<f4", [1], "block"]})],
    ],
)
def test_what_does_not_fit_is_refused(frames):
    with pytest.raises(WireError):
        WireCodec([Note]).decode(frames)


@pytest.mark.parametrize("name", ["../secret", "a/b", "", ".."])
def test_block_names_stay_inside_their_directory(tmp_path, name):
    with pytest.raises(ValueError, match="bad shared block"):
        SharedArrays(tmp_path).take(name, np.dtype("u1"), (1,))


def test_joined_frames_come_apart_and_what_was_not_joined_is_refused():
    frames = [b"name", bytearray(b"body"), memoryview(np.arange(3)).cast("B"), b""]
    assert [bytes(frame) for frame in split(join(frames))] == [bytes(frame) for frame in frames]
    for broken in (b"", b"\x00", join(frames)[:-1]):
        with pytest.raises(WireError, match="no frames"):
            split(broken)
