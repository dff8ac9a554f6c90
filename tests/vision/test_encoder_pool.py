"""The encoder pool over fake workers and a fake disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.vision.fake_backend import FakeBackend, make_pool, rows_of
from tests.vision.fake_disk import FakeDisk
from vision.encoder_pool import EncoderPool
from vision.towers.temporal_patch import TemporalPatch, embedding_key

NO_WORKER = "no vision encoder worker is left"
POISONED = "RuntimeError: poisoned"


def content(name: str, rows: int = 1) -> TemporalPatch:
    """A temporal patch of `rows` rows, four patches each."""
    return TemporalPatch(digest=name.encode().ljust(32, b"."), grid=(2, 2 * rows), pixels=np.zeros((4 * rows, 1)))


def contents(names: str, rows: int = 1) -> list[TemporalPatch]:
    return [content(name, rows) for name in names]


def came_encoded(name: str, rows: int = 1) -> TemporalPatch:
    pixels = np.full((rows, 2), 7, np.float32)
    pixels.flags.writeable = False
    return TemporalPatch(digest=name.encode().ljust(32, b"."), grid=(2, 2 * rows), pixels=pixels, encoded=True)


def names(batches: Sequence) -> list[tuple[int, str]]:
    """What was started: worker, and the contents' names."""
    return [(worker, "".join(chr(patch.digest[0]) for patch in batch.patches)) for worker, batch in batches]


def ready(pool: EncoderPool, keys: Sequence[bytes]) -> list[bool]:
    return [pool.is_ready(key) for key in keys]


def finish_all(pool: EncoderPool, backend: FakeBackend) -> None:
    """Until nothing is under way."""
    pool.advance()
    while pool.working:
        for number, queue in backend.queues.items():
            while queue:
                backend.finish(number)
        pool.advance()


# ---------------------------------------------------------------- who gets what


def test_it_says_whether_anything_changed_and_how_much_there_is():
    backend, disk = FakeBackend(inline=False), FakeDisk()
    pool = make_pool(backend, max_patches=4, space_rows=4, disk=disk)

    def figures() -> tuple[bool, int, int]:
        return pool.advance(), pool.stats().queued, pool.stats().under_way

    assert figures() == (False, 0, 0)
    keys = pool.submit(contents("abcde"), order=0)
    assert figures() == (True, 1, 4)
    assert figures() == (False, 1, 4)
    disk.finish_all()
    assert figures() == (True, 3, 2)
    assert figures() == (False, 3, 2)
    backend.die(0)
    assert figures()[0]
    for _ in range(3):
        backend.finish()
        assert figures()[0]
    assert ready(pool, keys) == [True, True, True, False, False]
    backend.finish()
    assert figures() == (True, 1, 0)
    assert figures() == (False, 1, 0)
    assert disk.saving == 4
    disk.finish_all()
    assert figures() == (True, 1, 0)
    again = pool.submit(contents("a"), order=7)
    pool.release(keys, order=0)
    more = pool.submit(contents("bcd"), order=8)
    assert figures() == (True, 0, 0), "all that is found in memory at once"
    assert ready(pool, again + more) == [True] * 4
    assert figures() == (False, 0, 0)


# ---------------------------------------------------------------- room


def test_room_is_given_in_order_and_nobody_overtakes():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=4)
    large = pool.submit(contents("ab", 3), order=1)
    small = pool.submit(contents("c"), order=2)
    first = pool.submit(contents("d"), order=0)
    pool.advance()
    assert names(backend.batches) == [(0, "da")]
    assert not pool.advance()
    pool.release(first, order=0)
    assert not pool.advance(), "b has no room, and c waits behind it"
    assert ready(pool, small) == [False]
    pool.release(large[:1], order=1)
    pool.advance()
    assert names(backend.batches[1:]) == [(0, "bc")]


def test_rows_that_wait_for_younger_requests_make_room_for_an_older_ones_youngest_first():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=3)
    young = [pool.submit([content(name)], order=order)[0] for name, order in (("a", 1), ("b", 3), ("c", 2))]
    pool.advance()
    assert ready(pool, young) == [True] * 3
    old = pool.submit([content("d", 2)], order=0)
    pool.advance()
    assert ready(pool, [*young, *old]) == [True, False, False, True]
    assert pool.stats().device.hits == 0, "the oldest of them did not go and come back"
    pool.release(old, order=0)
    pool.advance()
    pool.advance()
    assert ready(pool, young) == [True] * 3


def test_an_older_request_that_joins_brings_an_entry_forward():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=0)
    for number, name in enumerate("abcd", 1):
        pool.submit([content(name)], order=number)
    joined = pool.submit(contents("d"), order=0)
    pool.submit(contents("d"), order=7)
    pool.advance()
    assert names(backend.batches) == [(0, "d")]
    pool.release(joined, order=0)
    pool.advance()
    assert names(backend.batches) == [(0, "d"), (0, "a")], "who is left to need it is younger than a"
    assert ready(pool, joined) == [False]


def test_urgent_rows_come_whether_or_not_there_is_room():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=2)
    pool.submit(contents("ab"), order=0)
    keys = pool.submit(contents("cd"), order=1)
    pool.advance()
    assert not pool.advance()
    assert pool.advance(urgent=keys[1])
    assert ready(pool, keys) == [False, True]
    assert not pool.advance(urgent=keys[1])


def test_urgent_rows_are_encoded_before_all_that_waits():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, max_patches=4)
    keys = pool.submit(contents("abcd"), order=0)
    pool.advance()
    backend.finish()
    pool.advance(urgent=keys[3])
    assert names(backend.batches) == [(0, "a"), (0, "b"), (0, "d")]


# ---------------------------------------------------------------- batches


def test_free_workers_get_even_shares():
    for workers in (1, 2, 3, 4):
        backend = FakeBackend(workers, inline=False)
        pool = make_pool(backend)
        pool.submit(contents("abcdefghijkl"), order=0)
        pool.advance()
        assert [len(text) for _, text in names(backend.batches)] == [12 // workers] * workers
        assert "".join(text for _, text in names(backend.batches)) == "abcdefghijkl"
        assert [worker for worker, _ in names(backend.batches)] == list(range(workers))


def test_shares_take_into_account_what_workers_have_to_do():
    backend = FakeBackend(3, inline=False)
    pool = make_pool(backend)
    pool.submit([content("a"), content("L", 2), content("M", 2)], order=0)
    pool.advance()
    pool.submit(contents("cdefg"), order=1)
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (1, "L"), (2, "M"), (0, "cd"), (1, "e"), (2, "f")]


def test_a_batch_keeps_the_compute_budget_and_a_large_picture_goes_alone():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, max_patches=8)
    pool.submit([*contents("abc"), content("L", 5), *contents("de")], order=0)
    finish_all(pool, backend)
    assert names(backend.batches) == [(0, "ab"), (0, "c"), (0, "L"), (0, "de")]


# ---------------------------------------------------------------- failures


def test_what_failed_is_tried_once_more_and_alone_and_its_mates_get_on():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend)
    keys = pool.submit(contents("abc"), order=0)
    backend.fail[content("b").digest] = 2
    finish_all(pool, backend)
    assert names(backend.batches) == [(0, "abc"), (0, "a"), (0, "b"), (0, "c")]
    assert pool.take_failures() == {keys[1]: POISONED}
    assert pool.take_failures() == {}
    assert ready(pool, keys) == [True, False, True]
    assert (pool.stats().failed, pool.stats().retried, pool.stats().encoded) == (1, 3, 2)
    assert pool.stats().patches_encoded == 8
    pool.release(keys[1:2], order=0, place=1)
    pool.submit(contents("b"), order=1)
    finish_all(pool, backend)
    assert ready(pool, keys) == [True] * 3, "who comes later tries anew"


def test_what_its_worker_never_came_to_was_not_tried():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, max_patches=4)
    keys = pool.submit(contents("ab"), order=0)
    pool.advance()
    backend.die(0)
    pool.advance()
    backend.finish()
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (0, "b"), (0, "a"), (0, "b")]
    backend.die(0)
    finish_all(pool, backend)
    assert ready(pool, keys) == [True, True]


def test_a_retry_waits_for_a_worker_with_nothing_to_do():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, max_patches=4)
    pool.submit(contents("abc"), order=0)
    backend.fail[content("a").digest] = 1
    pool.advance()
    backend.finish()
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (0, "b")]
    backend.finish()
    pool.advance()
    assert names(backend.batches[2:]) == [(0, "a")]


def test_with_no_worker_left_what_must_be_encoded_fails_and_what_is_kept_comes():
    backend, disk = FakeBackend(2, inline=False), FakeDisk()
    pool = make_pool(backend, disk=disk)
    pool.submit(contents("a"), order=0)
    pool.advance()
    disk.finish_all()
    finish_all(pool, backend)
    disk.finish_all()
    disk.rows[pool.key(content("d"))] = rows_of(content("d"))
    pool.submit(contents("b"), order=0)
    pool.advance()
    disk.finish_all()
    pool.advance()
    backend.die(0)
    backend.usable.clear()
    keys = pool.submit([*contents("abcd"), came_encoded("e")], order=1)
    pool.advance()
    disk.finish_all()
    assert pool.advance()
    assert pool.take_failures() == {keys[1]: NO_WORKER, keys[2]: NO_WORKER}
    assert ready(pool, keys) == [True, False, False, True, True]


# ---------------------------------------------------------------- the disk


def test_the_disk_is_asked_first_and_what_is_encoded_is_saved():
    backend, disk = FakeBackend(), FakeDisk()
    pool = make_pool(backend, disk=disk)
    disk.rows[pool.key(content("a"))] = rows_of(content("a"))
    keys = pool.submit(contents("ab"), order=0)
    pool.advance()
    assert list(disk.loads) == keys
    assert (pool.busy, pool.working, pool.stats().under_way) == (True, True, 2)
    assert not pool.advance()
    disk.finish_all()
    pool.advance()
    assert ready(pool, keys) == [True, True]
    assert backend.encoded() == [content("b").digest]
    assert pool.embeds(keys[0]).tolist() == rows_of(content("a")).tolist()
    assert [pool.is_saved(key) for key in keys] == [True, None]
    assert [(key, insist, pin) for _, key, _, insist, pin in disk.saves] == [(keys[1], False, False)]
    assert (pool.busy, pool.working) == (True, False)
    disk.finish_all()
    pool.advance()
    assert not pool.busy
    assert [pool.is_saved(key) for key in keys] == [True, True]
    assert disk.rows[keys[1]].tolist() == rows_of(content("b")).tolist()
    assert (pool.stats().saved, pool.stats().save_failures, pool.stats().disk.entries) == (1, 0, 2)


def test_saving_to_order_is_insisted_on_and_what_was_saved_of_itself_is_no_answer():
    backend, disk = FakeBackend(), FakeDisk()
    pool = make_pool(backend, disk=disk)
    keys = pool.submit(contents("a"), order=0)
    pool.advance()
    disk.finish_all()
    pool.advance()
    for key in keys:
        pool.save(key, pin=True)
    assert [(insist, pin) for _, _, _, insist, pin in disk.saves] == [(False, False), (True, True)]
    disk.broken = True
    disk.finish_save()
    pool.advance()
    assert pool.is_saved(keys[0]) is None
    disk.broken = False
    disk.finish_save()
    pool.advance()
    assert pool.is_saved(keys[0]) is True
    assert disk.pinned == set(keys)
    for key in keys:
        pool.save(key)
    assert pool.is_saved(keys[0]) is None
    disk.broken = True
    disk.finish_all()
    pool.advance()
    assert pool.is_saved(keys[0]) is False
    assert (pool.stats().saved, pool.stats().save_failures) == (1, 2)


def test_rows_that_came_encoded_are_never_written():
    disk = FakeDisk()
    pool = make_pool(FakeBackend(), disk=disk)
    keys = pool.submit([came_encoded("a")], order=0)
    pool.advance()
    with pytest.raises(AssertionError, match="came from outside"):
        pool.save(keys[0], pin=True)
    assert (list(disk.saves), list(disk.loads), disk.saving) == ([], [], 0)


def test_a_write_that_outlives_its_entry():
    backend, disk = FakeBackend(), FakeDisk()
    pool = make_pool(backend, disk=disk)
    for _ in range(2):
        keys = pool.submit(contents("a"), order=0)
        pool.advance()
        disk.finish_load() if disk.loads else None
        pool.advance()
        for key in keys:
            pool.save(key)
        pool.release(keys, order=0)
    keys = pool.submit(contents("a"), order=0)
    disk.finish_all()
    pool.advance()
    assert pool.is_saved(keys[0]) is None, "it was asked of another"
    assert not pool.busy


def test_keys_are_of_the_tower_and_the_content():
    pool = make_pool(FakeBackend())
    assert len({pool.key(patch) for patch in (*contents("ab"), came_encoded("a"))}) == 3
    assert pool.key(content("a")) == pool.key(content("a"))
    assert embedding_key(b"one tower", content("a")) != embedding_key(b"another", content("a"))


# ---------------------------------------------------------------- the pool and a backend in slices


def test_a_batch_is_cancelled_when_the_last_of_its_entries_is_released():
    backend = FakeBackend(inline=False, cancels=True)
    pool = make_pool(backend)
    first = pool.submit([content("a"), content("b")], order=0)
    also = pool.submit([content("b")], order=1)
    pool.advance()
    pool.release(first, order=0)
    assert backend.cancelled == [], "somebody waits for b"
    pool.release(also, order=1)
    assert backend.cancelled == [1]
    assert pool.busy
    assert pool.advance()
    assert not pool.busy
    stats = pool.stats()
    assert (stats.queued, stats.under_way, stats.retried, stats.failed, stats.device.held_bytes) == (0, 0, 0, 0, 0)
