"""Arrays that messages name, and that are read when somebody asks for them."""

from dataclasses import dataclass

import numpy as np
import pytest

from vlmserve_common.transport.held import HeldArray
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import WireCodec


@dataclass(frozen=True)
class Message:
    parts: tuple[HeldArray, ...]


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """Let tests not depend on how full the disk is."""
    monkeypatch.setattr(SharedArrays, "_has_room", lambda *_: True)


def codecs(folder):
    return [WireCodec([Message], SharedArrays(folder, mapped=mapped)) for mapped in (False, True)]


@pytest.mark.parametrize("rows", [3, 3 * 2**18], ids=["read", "mapped"])
def test_many_messages_name_one_block(tmp_path, rows):
    sender, receiver = codecs(tmp_path)
    array = np.resize(np.arange(251, dtype=np.uint8), (rows, 4))
    held = HeldArray(array.copy())
    for _ in range(3):
        frames = sender.encode(Message((held, held)))
        assert sum(map(len, frames)) < 300
        assert len(list(tmp_path.iterdir())) == 1
        first, second = receiver.decode(frames).parts
        assert first.nbytes == array.nbytes
        assert np.array_equal(first.array, array)
        assert np.array_equal(second.array[rows // 3 : 2 * rows // 3], array[rows // 3 : 2 * rows // 3])
        assert not held.array.flags.writeable
        del first, second
    read, late = receiver.decode(frames).parts
    assert np.array_equal(read.array, array)
    del held
    assert np.array_equal(read.array, array), "what was read stays"
    assert late.array.shape == (0, 4), "what was not is gone with its holder"
    del read, late
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_it_goes_along():
    codec = WireCodec([Message])
    [part] = codec.decode(codec.encode(Message((HeldArray(np.ones(5)),)))).parts
    assert part.array.tolist() == [1] * 5


def test_without_room_it_goes_along(tmp_path, monkeypatch):
    sender, receiver = codecs(tmp_path)
    monkeypatch.setattr(SharedArrays, "_has_room", lambda *_: False)
    [part] = receiver.decode(sender.encode(Message((HeldArray(np.ones(5)),)))).parts
    assert part.array.tolist() == [1] * 5
    assert not list(tmp_path.iterdir())


def test_a_block_that_is_written_again_is_not_named(tmp_path):
    shared = SharedArrays(tmp_path, spare_bytes=2**24)
    array = shared.empty((2**21,), np.uint8)
    array[:] = 7
    held, name = shared.hold(array)
    assert held is not array
    del array
    again = shared.empty((2**21,), np.uint8)
    again[:] = 9
    assert (shared.look_at(name, np.dtype(np.uint8), (2**21,)) == 7).all()
