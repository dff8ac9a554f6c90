"""All three tiers with real tensors: a prefix goes down to the disk and comes back, bit by bit, after a restart."""

import threading

import numpy as np
import pytest
import torch

from vlmserve.memory import kv_transfer
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.kv_transfer import KVTransfer
from vlmserve.memory.media_keys import MediaKeyTable

PAGE = 2
BYTES_PER_TOKEN = KVCache.bytes_per_token(2, 1, 4, torch.int8)
CAT = (b"cat", "image", (1, 2, 2), 0.0)


class Engine:
    """A process: its pools begin empty, and its ids of media are its own."""

    def __init__(self, folder, *, media_before: int = 0, disk_bytes: int = 10**6, **settings) -> None:
        self.kv = KVCache(
            num_slots=34, num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.int8, device=torch.device("cpu")
        )
        self.storage = KVStorage(folder, limit_bytes=disk_bytes, bytes_per_token=BYTES_PER_TOKEN, page_size=PAGE)
        self.transfer = KVTransfer(self.kv, 10, self.storage)
        self.table = MediaKeyTable()
        for i in range(media_before):
            self.table.intern((bytes([i]), "image", (1, 2, 2), 0.0))
        self.allocator = TokenToKVPoolAllocator(32, PAGE)
        self.cache = HiRadixCache(
            self.allocator,
            TokenToKVPoolAllocator(8, PAGE),
            storage=self.storage,
            identity=self.table.identity,
            transfer=self.transfer,
            **settings,
        )

    def key(self, *tokens) -> np.ndarray:
        return np.array([self.table.intern(CAT) if token == "cat" else token for token in tokens])

    def compute(self, key: np.ndarray, seed: int) -> list[torch.Tensor]:
        slots = self.allocator.alloc_extend(0, len(key), -1)
        self.step()  # what was evicted is copied before its slots are written
        torch.manual_seed(seed)
        x = torch.randn(2, len(key), 1, 4)
        for layer in range(2):
            self.kv.write(layer, torch.from_numpy(slots), x[layer], -x[layer])
        assert self.cache.insert(key, slots, b"tenant") == 0
        return self.read(slots)

    def read(self, slots: np.ndarray) -> list[torch.Tensor]:
        parts = [part for layer in self.kv.layers for part in vars(layer).values()]
        return [part[slots].clone() for part in parts]

    def loaded(self, key: np.ndarray) -> list[torch.Tensor]:
        """What is cached of a prefix, brought to the device."""
        match = self.cache.load_back(self.cache.match_prefix(key, b"tenant"))
        self.step()
        return self.read(match.indices)

    def step(self) -> None:
        self.transfer.run(self.cache.take_copy_jobs())

    def fetch(self, key: np.ndarray, namespace: bytes = b"tenant") -> int:
        """Tokens that come from the disk."""
        future = self.cache.prefetch(key, namespace)
        if future is None:
            return 0
        future.result(timeout=60)
        return self.cache.take_fetched()


def test_a_prefix_goes_to_disk_and_comes_back_after_a_restart(tmp_path):
    engine = Engine(tmp_path)
    first = engine.compute(engine.key(1, "cat", "cat", 2, 3, 4), seed=0)
    engine.cache.evict(6)
    engine.compute(engine.key(7, 7, 7, 7, 7, 7), seed=1)
    engine.cache.evict(6)  # the host has no room for both
    engine.step()
    engine.storage.close()

    later = Engine(tmp_path, media_before=3)
    key = later.key(1, "cat", "cat", 2, 3, 4)
    assert later.cache.prefetch(key) is None  # of another tenant
    assert later.fetch(later.key(1, 2, 3, 4)) == 0
    assert later.fetch(key) == 6
    assert later.fetch(key) == 0
    for was, now in zip(first, later.loaded(key), strict=True):
        assert torch.equal(was, now)
    later.storage.close()


def test_what_is_cached_is_gone_on_from(tmp_path):
    engine = Engine(tmp_path)
    first = engine.compute(engine.key(1, 2, 3, 4, 5, 6), seed=0)
    engine.cache.match_prefix(engine.key(1, 2), b"tenant")  # splits it
    engine.cache.evict(6)
    engine.compute(engine.key(7, 7, 7, 7), seed=1)
    engine.cache.evict(4)  # the end of the first goes to disk, its beginning stays on the host
    engine.step()
    key = engine.key(1, 2, 3, 4, 9, 9)
    assert engine.cache.match_len(key, b"tenant") == 2
    engine.storage.save([b"x" * 32], torch.zeros(2, 1, dtype=torch.uint8)).result()  # behind the others
    assert engine.fetch(key) == 2
    for was, now in zip(first, engine.loaded(key), strict=True):
        assert torch.equal(was[:4], now)
    engine.storage.close()


@pytest.mark.parametrize("forgotten", [False, True])
def test_media_that_are_forgotten_stay_off_the_disk(tmp_path, forgotten):
    engine = Engine(tmp_path)
    engine.compute(engine.key(1, "cat"), seed=0)
    engine.cache.evict(2)
    if forgotten:
        engine.table.retain(set())
    engine.compute(engine.key(7, 7, 7, 7, 7, 7, 7, 7), seed=1)
    engine.cache.evict(8)
    engine.step()
    engine.storage.close()
    assert bool(list(tmp_path.iterdir())) is not forgotten


@pytest.mark.parametrize("piece", [2, 1000], ids="pieces of {} tokens at most".format)
def test_at_the_end_all_that_is_cached_goes_to_disk(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(kv_transfer, "STAGED_BYTES", piece * BYTES_PER_TOKEN)
    engine = Engine(tmp_path)
    keys = [engine.key(*[i] * 3, "cat", "cat", i) for i in range(1, 5)]
    parts = [engine.compute(key, seed=i) for i, key in enumerate(keys)]
    engine.cache.match_prefix(keys[3][:2], b"tenant")  # splits it
    engine.cache.evict(18)  # one goes to the disk, whose job waits, one stays on the host, two on the device
    assert engine.cache.close() == 0

    later = Engine(tmp_path)
    for key, before in zip(keys, parts, strict=True):
        key = later.key(*["cat" if token < 0 else token for token in key])
        assert later.fetch(key) == 6
        for was, now in zip(before, later.loaded(key), strict=True):
            assert torch.equal(was, now)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert later.cache.close() == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files


def test_what_was_used_last_is_written_as_far_as_the_disk_has_room(tmp_path):
    keys = [[token] * 8 for token in (1, 2, 3)]
    engine = Engine(tmp_path, disk_bytes=2000)  # two files
    for seed, key in enumerate(keys):
        engine.compute(engine.key(*key), seed=seed)
    engine.cache.match_prefix(engine.key(*keys[0]), b"tenant")
    assert engine.cache.close() == 0
    later = Engine(tmp_path)
    assert [later.fetch(later.key(*key)) for key in keys] == [8, 0, 8]
    later.cache.close()


def test_what_there_is_no_time_for_is_counted(tmp_path):
    engine = Engine(tmp_path)
    engine.compute(engine.key(1, 2, 3, 4), seed=0)
    engine.compute(engine.key(5, 6), seed=1)
    go = threading.Event()
    engine.storage._writer.submit(go.wait)
    assert engine.cache.close(timeout_s=0.0) == 6
    go.set()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_worth_the_host_is_not_worth_the_disk_either(tmp_path):
    engine = Engine(tmp_path, write_policy="write_through_selective")
    hit, other = engine.key(1, 2), engine.key(5, 6)
    for seed, key in enumerate((hit, other)):
        engine.compute(key, seed=seed)
    for _ in range(2):
        engine.cache.match_prefix(hit, b"tenant")
    assert engine.cache.close() == 0
    assert [Engine(tmp_path).fetch(key) for key in (hit, other)] == [2, 0]
