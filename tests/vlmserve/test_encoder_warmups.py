"""Media encoded ahead of time: a few temporal patches at a time, saved before they are confirmed, and nothing left."""

from __future__ import annotations

import select
import threading

import numpy as np
import pytest
import torch

from processors.inputs import Modality, MultimodalDataItem
from tests.vision.fake_backend import EMBED_SHAPE, ROW_BYTES, FakeBackend, make_pool
from vision.cache.disk_tier import DiskTier
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.cache.stats import TierStats
from vision.encoder_pool import EncoderPool, PoolLimits
from vision.towers.temporal_patch import temporal_patches
from vlmserve.engine.encoder_warmups import EncoderWarmups
from vlmserve.ipc.messages import EncodeReqInput


class FakeStore:
    """A disk in memory. gate, pin_gate: writes wait for them. full: nothing is written any more."""

    trouble = "it is full"

    def __init__(self) -> None:
        self.entries: dict[bytes, torch.Tensor] = {}
        self.pinned: set[bytes] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.pin_gate = threading.Event()
        self.pin_gate.set()
        self.full = False
        self.writes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.entries

    def get(self, key: bytes) -> torch.Tensor | None:
        return self.entries.get(key)

    def put(self, key: bytes, rows: torch.Tensor, *, pin: bool = False) -> bool:
        (self.pin_gate if pin else self.gate).wait()
        self.writes += 1
        if self.full:
            return False
        self.entries[key] = rows
        if pin:
            self.pinned.add(key)
        return True

    def stats(self) -> TierStats:
        return TierStats()


class Rig:
    def __init__(
        self, *, store: FakeStore | None = None, max_patches=16, space_rows=1000, workers=0, backlog_bytes=2**20
    ) -> None:
        self.backend = FakeBackend(workers or 1, inline=not workers)
        limits = PoolLimits(max_patches=64, space_bytes=space_rows * ROW_BYTES, batches_ahead=2 if workers else 1)
        self.pool = EncoderPool(
            self.backend,
            EmbeddingCache(MemoryTier(space_rows * ROW_BYTES, torch.device("cpu"))),
            fingerprint=b"tower",
            embed_shape=EMBED_SHAPE,
            limits=limits,
            disk=None if store is None else DiskTier(store, backlog_bytes=backlog_bytes),
        )
        self.answers = {}
        self.warmups = EncoderWarmups(self.pool, send=self.take, max_patches=max_patches)
        self.most_held = 0

    def take(self, output) -> None:
        assert output.rid not in self.answers
        self.answers[output.rid] = output

    def step(self) -> bool:
        changed = self.pool.advance()
        changed |= self.warmups.advance(order=0)
        self.most_held = max(self.most_held, self.pool.cache.device.held_bytes)
        return changed

    def run(self) -> None:
        while True:
            changed = self.step()
            if not changed and self.pool.busy:
                assert select.select(self.pool.wait_handles(), [], [], 20)[0]
            elif not changed:
                break
        assert not len(self.warmups)

    def settle(self) -> None:
        """Get on as far as that goes without the writer (see `FakeStore.gate`)."""
        while True:
            changed = self.step()
            if not changed and self.pool.stats().under_way:
                assert select.select(self.pool.wait_handles(), [], [], 20)[0]
            elif not changed:
                break

    def close(self) -> None:
        if self.pool.store is not None:
            self.pool.store.gate.set()
            self.pool.store.pin_gate.set()
        self.run()
        self.pool.close()
        assert self.pool.cache.device.held_bytes == 0
        stats = self.pool.stats()
        assert stats.queued == stats.under_way == 0


@pytest.fixture
def rig():
    rigs = []

    def make(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()


def item(content: str, *, rows: int = 2) -> MultimodalDataItem:
    """A picture, or with dashes a clip of as many temporal patches, of `rows` rows (four vision patches) each."""
    parts = content.split("-")
    return MultimodalDataItem(
        modality=Modality.IMAGE if len(parts) == 1 else Modality.VIDEO,
        digest=content.encode().ljust(32, b"."),
        patch_digests=tuple(part.encode().ljust(32, b",") for part in parts),
        grid_thw=(len(parts), 2, 2 * rows),
        offsets=(),
        feature=np.zeros((len(parts) * 4 * rows, 1), np.float32),
    )


def message(rid: str, *contents: str, pin: bool = False, rows: int = 2) -> EncodeReqInput:
    return EncodeReqInput(rid=rid, items=tuple(item(content, rows=rows) for content in contents), pin=pin)


def figures(rig: Rig, rid: str) -> list[tuple]:
    return [(i.modality.value, i.temporal_patches, i.encoded, i.found, i.saved) for i in rig.answers[rid].items]


def test_what_is_encoded_is_saved_before_it_is_confirmed_and_found_the_next_time(rig):
    store = FakeStore()
    one = rig(store=store)
    store.gate.clear()
    one.warmups.add(message("a", "pic", "c-d-e"))
    one.settle()
    assert len(one.backend.encoded()) == 4
    assert one.answers == {}, "nothing is on disk yet"
    store.gate.set()
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True), ("video", 3, 3, 0, True)]
    assert [i.patches_encoded for i in one.answers["a"].items] == [8, 24]
    assert len(store.entries) == 4
    assert store.writes == 4, "once each"
    assert not store.pinned

    two = rig(store=store)
    two.warmups.add(message("b", "pic", "c-x-e"))
    two.run()
    assert figures(two, "b") == [("image", 1, 0, 1, True), ("video", 3, 1, 2, True)]
    assert len(two.backend.encoded()) == 1


def test_pinning_holds_for_what_is_encoded_loaded_and_in_memory(rig):
    store = FakeStore()
    one = rig(store=store)
    one.warmups.add(message("a", "pic"))
    one.run()
    assert not store.pinned
    one.warmups.add(message("again", "pic", "new", pin=True))
    one.run()
    assert figures(one, "again") == [("image", 1, 0, 1, True), ("image", 1, 1, 0, True)]
    assert store.pinned == set(store.entries)
    two = rig(store=store)
    store.pinned.clear()
    two.warmups.add(message("b", "pic", "new", pin=True))
    two.run()
    assert store.pinned == set(store.entries)
    assert two.backend.encoded() == []


def test_a_pin_is_not_confirmed_by_a_write_before_it(rig):
    """What is encoded is written on the pool's own accord, too, and unpinned."""
    store = FakeStore()
    one = rig(store=store)
    store.pin_gate.clear()
    one.warmups.add(message("a", "pic", pin=True))
    one.settle()
    while one.pool.stats().saved == 0:
        assert select.select(one.pool.wait_handles(), [], [], 20)[0]
        one.step()
    one.settle()
    assert one.answers == {}
    store.pin_gate.set()
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True)]
    assert store.pinned == set(store.entries)


def test_what_the_pool_does_not_write_for_lack_of_time_is_asked_for(rig):
    store = FakeStore()
    one = rig(store=store, backlog_bytes=0)
    one.warmups.add(message("a", "pic", "c-d-e"))
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True), ("video", 3, 3, 0, True)]
    assert len(store.entries) == 4


def test_a_full_disk_is_told(rig):
    store = FakeStore()
    store.full = True
    one = rig(store=store)
    one.warmups.add(message("a", "pic", "b-c"))
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, False), ("video", 2, 2, 0, False)]


def test_without_a_disk_rows_stay_in_memory_as_long_as_there_is_room(rig):
    one = rig()
    one.warmups.add(message("a", "pic"))
    one.warmups.add(message("b", "pic"))
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, None)]
    one.warmups.add(message("c", "pic"))
    one.run()
    assert figures(one, "c") == [("image", 1, 0, 1, None)]
    assert len(one.backend.encoded()) == 1


def test_a_message_without_media_is_answered(rig):
    one = rig()
    one.warmups.add(message("a"))
    one.run()
    assert one.answers["a"].items == ()


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_clip_larger_than_the_space_passes_a_few_temporal_patches_at_a_time(rig, disk, workers):
    one = rig(store=FakeStore() if disk else None, space_rows=6, workers=workers)
    clip = "-".join(f"p{number}" for number in range(40))
    one.warmups.add(message("a", clip))
    while len(one.warmups):
        if not one.step() and one.pool.busy:
            for worker in range(workers):
                if one.backend.queues[worker]:
                    one.backend.finish(worker)
            if disk and not one.backend.results:
                select.select([one.pool.wait_handles()[-1]], [], [], 20)
    assert figures(one, "a") == [("video", 40, 40, 0, True if disk else None)]
    assert one.most_held <= 6 * ROW_BYTES


def test_few_are_under_way_and_messages_go_in_turn(rig):
    one = rig(max_patches=16, workers=1)
    for rid in "abc":
        one.warmups.add(message(rid, f"{rid}1-{rid}2-{rid}3"))
    one.step()
    one.step()
    stats = one.pool.stats()
    assert stats.queued + stats.under_way == 2, "of eight patches each"
    order = []
    while len(one.warmups):
        before = set(one.answers)
        if not one.step():
            one.backend.finish()
        order += sorted(set(one.answers) - before)
    assert order == ["a", "b", "c"]
    assert [digest.rstrip(b",").decode() for digest in one.backend.encoded()] == [
        f"{a}{n}" for a in "abc" for n in "123"
    ]


def test_one_larger_than_the_window_goes_alone(rig):
    one = rig(max_patches=4)
    one.warmups.add(message("a", "big", "big2"))
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, None)] * 2


def test_what_cannot_be_encoded_fails_its_own_message_only(rig):
    one = rig()
    one.backend.fail[item("bad").patch_digests[0]] = 2
    one.warmups.add(message("a", "good", "bad", "other"))
    one.warmups.add(message("b", "good", "third"))
    one.run()
    assert one.answers["a"].error.message == "a picture or video could not be encoded: RuntimeError: poisoned"
    assert one.answers["b"].error is None


def test_an_aborted_message_is_not_answered_and_leaves_nothing(rig):
    store = FakeStore()
    one = rig(store=store, workers=1)
    one.warmups.add(message("a", "a1-a2-a3-a4"))
    one.step()
    one.step()
    assert one.warmups.abort("a")
    assert not one.warmups.abort("a")
    while any(one.backend.queues.values()):
        one.backend.finish()
        one.step()
    one.run()
    assert one.answers == {}
    assert len(one.backend.encoded()) < 4


def test_nothing_is_asked_for_where_there_is_no_turn():
    pool = make_pool(FakeBackend())
    warmups = EncoderWarmups(pool, send=lambda output: None, max_patches=16)
    warmups.add(message("a", "pic"))
    assert not warmups.advance(order=None)
    assert pool.stats().queued == 0
    assert warmups.advance(order=0)
    assert pool.stats().queued == 1


def room_taken_while_writing(one: Rig, store: FakeStore) -> bytes:
    """An urgent request, whose key is returned, takes the room of rows that wait for the disk."""
    store.gate.clear()
    one.warmups.add(message("a", "pic"))
    one.settle()
    (wanted,) = one.pool.submit(temporal_patches(item("urgent")), order=-1)
    while not one.pool.is_ready(wanted):
        if not one.pool.advance(urgent=wanted):
            assert select.select(one.pool.wait_handles(), [], [], 20)[0]
    return wanted


def test_rows_given_up_for_another_before_they_are_saved_are_still_confirmed(rig):
    store = FakeStore()
    one = rig(store=store, space_rows=2)
    wanted = room_taken_while_writing(one, store)
    one.pool.release([wanted], order=-1)
    store.gate.set()
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True)]


def test_rows_given_up_for_another_and_not_saved_are_made_again(rig):
    store = FakeStore()
    one = rig(store=store, space_rows=2)
    wanted = room_taken_while_writing(one, store)
    store.full = True
    store.gate.set()
    while one.pool.busy:
        assert select.select(one.pool.wait_handles(), [], [], 20)[0]
        one.step()
    assert one.answers == {}
    store.full = False
    one.pool.release([wanted], order=-1)
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True)]
    assert len(one.backend.encoded()) == 3


def test_few_wait_for_the_disk(rig):
    store = FakeStore()
    one = rig(store=store, max_patches=16)
    store.gate.clear()
    one.warmups.add(message("a", "-".join(f"p{number}" for number in range(40))))
    one.settle()
    assert len(one.backend.encoded()) == 8, "of eight patches each, and four times the sixteen"
    store.gate.set()
    one.run()
    assert figures(one, "a") == [("video", 40, 40, 0, True)]
