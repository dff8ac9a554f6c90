"""KV on disk: what is read is what was written, or nothing."""

import itertools
import os

import numpy as np
import pytest
import torch

from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.media_keys import namespace_digest, page_digests
from vlmserve_common.errors import EngineError

MEDIA = {-1: b"cat", -2: b"dog"}
OTHER = {-7: b"cat", -1: b"dog"}


def digests(tokens, media=MEDIA, namespace=b"", page_size=2):
    key = np.array(tokens, dtype=np.int64)
    return list(page_digests(key, namespace_digest(namespace), page_size=page_size, identity=media.__getitem__))


def test_digests_name_a_whole_prefix():
    key = [1, 2, 3, 4, 5, 6, 7]
    first, second, third = digests(key)
    assert digests([1, 2, 3, 4]) == [first, second]
    assert digests([9, 2, 3, 4])[1] != second
    assert digests(key, namespace=b"x")[0] != first
    rest = page_digests(np.array(key[2:]), first, page_size=2, identity=MEDIA.__getitem__)
    assert list(rest) == [second, third]


def test_digests_name_media_by_what_they_are():
    assert digests([-1, 3, -1, -2]) == digests([-7, 3, -7, -1], OTHER)
    assert digests([-1, 3])[0] != digests([-2, 3])[0]
    assert digests([-1, -2])[0] != digests([-2, -1])[0]
    assert digests([-1, -2])[0] != digests([-1, -1])[0]
    assert digests([-1, 5])[0] != digests([5, -1])[0]
    with pytest.raises(KeyError):
        digests([-9, 1])


def rows(seed: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (tokens, 6), generator=generator, dtype=torch.uint8)


@pytest.fixture
def make(tmp_path):
    clock = itertools.count(1_000_000)
    made = []

    def storage(limit: int = 10**6, folder=tmp_path) -> KVStorage:
        made.append(
            KVStorage(folder, limit_bytes=limit, bytes_per_token=6, page_size=2, clock=lambda: float(next(clock)))
        )
        return made[-1]

    yield storage
    for one in made:
        one.close()


def test_runs_follow_each_other_and_survive_a_restart(make):
    pages = digests(range(10))
    storage = make()
    storage.save(pages[:2], rows(0, 4)).result()
    storage.save(pages[2:], rows(1, 6)).result()
    storage.save(pages[:2], rows(9, 4)).result()  # is there
    for one in (storage, make()):
        expected = torch.cat([rows(0, 4), rows(1, 6)])
        assert torch.equal(one.load(pages).result(), expected)
        assert torch.equal(one.load(pages[:4]).result(), expected[:8])
        assert torch.equal(one.load(pages[2:]).result(), expected[4:])
        other = digests([0, 1, 2, 3, 4, 5, 99, 99])  # leaves within the second run
        assert torch.equal(one.load(other).result(), expected[:6])
        assert one.load(digests([5, 5])).result().shape == (0, 6)
        assert pages[0] in one
        assert pages[1] not in one


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other", "gone"])
def test_damaged_files_are_removed(make, tmp_path, damage):
    pages = digests(range(8))
    make().save(pages[:2], rows(0, 4)).result()
    make().save(pages[2:], rows(1, 4)).result()
    storage = make()
    path = tmp_path / f"{pages[2].hex()}.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "other":
        data = bytearray((tmp_path / f"{pages[0].hex()}.safetensors").read_bytes())
    path.write_bytes({"cut": data[:-3], "empty": b""}.get(damage, data))
    if damage == "gone":
        path.unlink()
    assert torch.equal(storage.load(pages).result(), rows(0, 4))
    assert not path.exists()
    assert pages[2] not in storage
    storage.save(pages[2:], rows(1, 4)).result()
    assert len(storage.load(pages).result()) == 8


def test_the_least_recently_used_files_go(make, tmp_path):
    runs = [digests([first, first]) for first in range(4)]
    storage = make()
    storage.save(runs[0], rows(0, 2)).result()
    size = storage.size
    assert size == sum(os.path.getsize(item) for item in tmp_path.iterdir())
    storage = make(3 * size)
    for i in (1, 2):
        storage.save(runs[i], rows(i, 2)).result()
    storage.load(runs[0]).result()
    storage.save(runs[3], rows(3, 2)).result()
    assert [run[0] in storage for run in runs] == [True, False, True, True]
    storage.save(digests(range(100)), rows(4, 100)).result()  # larger than all
    assert storage.size == 3 * size
    restarted = make(2 * size)  # knows the order
    restarted.save(runs[1], rows(1, 2)).result()
    assert [run[0] in restarted for run in runs] == [False, True, False, True]


def test_a_folder_that_cannot_be_used(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"file/kv cannot be used: .* \(setting --hicache-storage-dir\)"):
        make(folder=tmp_path / "file" / "kv")


def test_a_disk_that_fails_costs_nothing_else(make, monkeypatch):
    storage = make()

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vlmserve.memory.kv_storage.write_file", fails)
    pages = digests([1, 2])
    storage.save(pages, rows(0, 2)).result()
    assert len(storage.load(pages).result()) == 0
