"""Media encoded ahead of time: a few temporal patches at a time, saved before they are confirmed, and nothing left.

`tests/vlmserve/engine/test_loop.py` has them beside requests.
"""

from __future__ import annotations

import pytest

from tests.vision.fake_backend import FakeBackend, make_pool
from tests.vision.fake_disk import FakeDisk
from tests.vlmserve.scheduler.prompts import item
from vision.cache.disk_tier import Saved
from vision.towers.temporal_patch import temporal_patches
from vlmserve.engine.encoder_warmups import EncoderWarmups
from vlmserve.ipc.messages import EncodeReqInput


class Disk(FakeDisk):
    """asked: how many saves. backlog: only those that insist are done."""

    def __init__(self, *, backlog: bool = False) -> None:
        super().__init__()
        self.store = self
        self.backlog, self.asked = backlog, 0

    def save(self, key, rows, *, insist=False, pin=False) -> int:
        self.asked += 1
        number = super().save(key, rows, insist=insist, pin=pin)
        if self.backlog and not insist:
            self.saves.pop()
            self._done.append(Saved(number=number, key=key, ok=False, new=False))
        return number


class Rig:
    """answers: by message. close: at the end, when nothing may be left."""

    def __init__(self, disk: Disk | None = None, *, space_rows: int = 1000, inline: bool = True) -> None:
        self.disk = disk
        self.backend = FakeBackend(inline=inline)
        self.pool = make_pool(self.backend, space_rows=space_rows, disk=disk)
        self.answers = {}
        self.warmups = EncoderWarmups(self.pool, send=self.take, max_patches=16)

    def take(self, output) -> None:
        assert output.rid not in self.answers
        self.answers[output.rid] = output

    def step(self) -> bool:
        changed = self.pool.advance()
        return self.warmups.advance(order=0) or changed

    def settle(self) -> None:
        """Get on as far as that goes without a write."""
        while self.step() or (self.disk is not None and self.disk.loads):
            if self.disk is not None and self.disk.loads:
                self.disk.finish_load()

    def run(self, *messages: EncodeReqInput) -> None:
        for message in messages:
            self.warmups.add(message)
        self.settle()
        while self.disk is not None and self.disk.saves:
            self.disk.finish_save()
            self.settle()
        assert not len(self.warmups)

    def close(self) -> None:
        self.run()
        stats = self.pool.stats()
        assert stats.queued == stats.under_way == self.pool.cache.device.held_bytes == 0


@pytest.fixture
def rig():
    rigs = []

    def make(*args, **options) -> Rig:
        rigs.append(Rig(*args, **options))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()


def message(rid: str, *contents: str, pin: bool = False) -> EncodeReqInput:
    """Pictures, or with dashes clips of as many temporal patches, of eight vision patches each."""
    return EncodeReqInput(rid=rid, items=tuple(item(content.encode()) for content in contents), pin=pin)


def figures(rig: Rig, rid: str) -> list[tuple]:
    return [(i.modality.value, i.temporal_patches, i.encoded, i.found, i.saved) for i in rig.answers[rid].items]


def test_what_is_encoded_is_saved_before_it_is_confirmed_and_found_the_next_time(rig):
    disk = Disk()
    one = rig(disk)
    one.warmups.add(message("a", "pic", "c-d-e"))
    one.settle()
    assert len(one.backend.encoded()) == 4
    assert one.answers == {}, "nothing is on disk yet"
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True), ("video", 3, 3, 0, True)]
    assert [i.patches_encoded for i in one.answers["a"].items] == [8, 24]
    assert len(disk.rows) == disk.asked == 4, "once each"
    assert not disk.pinned

    two = rig(disk)
    two.run(message("b", "pic", "c-x-e"))
    assert figures(two, "b") == [("image", 1, 0, 1, True), ("video", 3, 1, 2, True)]
    assert len(two.backend.encoded()) == 1


def test_pinning_holds_for_what_is_encoded_loaded_and_in_memory(rig):
    disk = Disk()
    one = rig(disk)
    one.run(message("a", "pic"))
    assert not disk.pinned
    one.run(message("again", "pic", "new", pin=True))
    assert figures(one, "again") == [("image", 1, 0, 1, True), ("image", 1, 1, 0, True)]
    assert disk.pinned == set(disk.rows)
    two = rig(disk)
    disk.pinned.clear()
    two.run(message("b", "pic", "new", pin=True))
    assert disk.pinned == set(disk.rows)
    assert two.backend.encoded() == []


def test_a_pin_is_not_confirmed_by_a_write_before_it(rig):
    """What is encoded is written on the pool's own accord, too, and unpinned."""
    disk = Disk()
    one = rig(disk)
    one.warmups.add(message("a", "pic", pin=True))
    one.settle()
    disk.finish_save()
    one.settle()
    assert (one.pool.stats().saved, one.answers) == (1, {})
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True)]
    assert disk.pinned == set(disk.rows)


def test_what_the_pool_does_not_write_for_lack_of_time_is_asked_for(rig):
    disk = Disk(backlog=True)
    one = rig(disk)
    one.run(message("a", "pic", "c-d-e"))
    assert figures(one, "a") == [("image", 1, 1, 0, True), ("video", 3, 3, 0, True)]
    assert len(disk.rows) == 4


def test_a_full_disk_is_told(rig):
    disk = Disk()
    disk.broken = True
    one = rig(disk)
    one.run(message("a", "pic", "b-c"))
    assert figures(one, "a") == [("image", 1, 1, 0, False), ("video", 2, 2, 0, False)]


def test_a_message_without_media_is_answered(rig):
    one = rig()
    one.run(message("a"))
    assert one.answers["a"].items == ()


def test_few_are_under_way_and_messages_go_in_turn(rig):
    one = rig(inline=False)
    for rid in "abc":
        one.warmups.add(message(rid, f"{rid}1-{rid}2-{rid}3"))
    one.settle()
    stats = one.pool.stats()
    assert stats.queued + stats.under_way == 2, "of eight patches each"
    while len(one.warmups):
        one.backend.finish()
        one.settle()
    assert list(one.answers) == ["a", "b", "c"]
    digests = [digest[2:].rstrip(b",").decode() for digest in one.backend.encoded()]
    assert digests == [f"{a}{n}" for a in "abc" for n in "123"]


def test_an_aborted_message_is_not_answered_and_leaves_nothing(rig):
    one = rig(Disk())
    one.warmups.add(message("a", "a1-a2-a3-a4"))
    one.settle()
    assert one.warmups.abort("a")
    assert not one.warmups.abort("a")
    one.run()
    assert one.answers == {}


def room_taken_while_writing(one: Rig) -> bytes:
    """An urgent request, whose key is returned, takes the room of rows that wait for the disk."""
    one.warmups.add(message("a", "pic"))
    one.settle()
    (wanted,) = one.pool.submit(temporal_patches(item(b"urgent")), order=-1)
    while not one.pool.is_ready(wanted):
        if not one.pool.advance(urgent=wanted):
            one.disk.finish_load()
    return wanted


def test_rows_given_up_for_another_before_they_are_saved_are_still_confirmed(rig):
    one = rig(Disk(), space_rows=2)
    one.pool.release([room_taken_while_writing(one)], order=-1)
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True)]


def test_rows_given_up_for_another_and_not_saved_are_made_again(rig):
    one = rig(Disk(), space_rows=2)
    wanted = room_taken_while_writing(one)
    one.disk.broken = True
    one.disk.finish_all()
    one.settle()
    assert one.answers == {}
    one.disk.broken = False
    one.pool.release([wanted], order=-1)
    one.run()
    assert figures(one, "a") == [("image", 1, 1, 0, True)]
    assert len(one.backend.encoded()) == 3


def test_few_wait_for_the_disk(rig):
    one = rig(Disk())
    one.warmups.add(message("a", "-".join(f"p{number}" for number in range(40))))
    one.settle()
    assert len(one.backend.encoded()) == 8, "of eight patches each, and four times the sixteen"
    one.run()
    assert figures(one, "a") == [("video", 40, 40, 0, True)]
