"""The encoder pool over fake workers and a fake disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.vision.fake_backend import ROW_BYTES, FakeBackend, make_pool, rows_of
from tests.vision.fake_disk import FakeDisk
from vision.encoder_pool import EncoderPool
from vision.towers.temporal_patch import TemporalPatch

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


def test_inline_one_batch_is_encoded_a_call():
    backend = FakeBackend()
    pool = make_pool(backend, max_patches=8)
    keys = pool.submit(contents("abc"), order=0)
    assert pool.inline
    assert ready(pool, keys) == [False] * 3
    assert pool.advance()
    assert ready(pool, keys) == [True, True, False]
    assert not pool.busy
    assert pool.advance()
    assert ready(pool, keys) == [True] * 3
    assert not pool.advance()
    assert [pool.embeds(key).tolist() for key in keys] == [rows_of(patch).tolist() for patch in contents("abc")]
    pool.release(keys, order=0)


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


def test_equal_content_is_encoded_once_for_all_and_kept_until_the_last_lets_go():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, cache_rows=0)
    first = pool.submit(contents("aab"), order=0)
    pool.advance()
    second = pool.submit(contents("ba"), order=1)
    assert pool.stats().coalesced == 3
    finish_all(pool, backend)
    assert pool.submit(contents("a"), order=2) == first[:1]
    assert pool.stats().coalesced == 3, "only what is not ready is waited for together"
    assert backend.encoded() == [patch.digest for patch in contents("ab")]
    assert ready(pool, first + second) == [True] * 5
    pool.release(first, order=0)
    pool.release(first[:1], order=2)
    assert pool.embeds(second[0]).tolist() == rows_of(content("b")).tolist()
    assert ready(pool, second) == [True] * 2
    pool.release(second, order=1)
    assert pool.cache.device.bytes == 0
    with pytest.raises(KeyError):
        pool.is_ready(second[0])


def test_keys_are_of_the_tower_and_the_content():
    pool = make_pool(FakeBackend())
    assert len({pool.key(patch) for patch in (*contents("ab"), came_encoded("a"))}) == 3
    assert pool.key(content("a")) == pool.key(content("a"))
    assert pool.key(content("a")) != content("a").digest


def test_what_nobody_waits_for_any_more_is_finished_and_kept_if_it_is_under_way_and_forgotten_if_not():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, max_patches=4)
    keys = pool.submit(contents("abc"), order=0)
    pool.advance()
    pool.release(keys, order=0)
    assert (pool.stats().queued, pool.stats().under_way) == (0, 2)
    assert pool.working
    finish_all(pool, backend)
    assert backend.encoded() == [patch.digest for patch in contents("ab")]
    assert len(pool.cache.device) == 2
    again = pool.submit(contents("a"), order=1)
    pool.advance()
    assert ready(pool, again) == [True]
    assert len(backend.batches) == 2


def test_a_newcomer_may_join_what_everybody_else_gave_up():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, cache_rows=0)
    pool.release(pool.submit(contents("a"), order=0), order=0)
    keys = pool.submit(contents("a"), order=0)
    pool.advance()
    pool.release(keys, order=0)
    keys = pool.submit(contents("a"), order=1)
    finish_all(pool, backend)
    assert ready(pool, keys) == [True]
    assert len(backend.batches) == 1
    pool.release(keys, order=1)
    assert pool.cache.device.bytes == 0


def test_cached_rows_are_not_encoded_again_whichever_tier_they_are_in():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=2, host_rows=10)
    for name in "abc":
        pool.release(pool.submit([content(name)], order=0), order=0)
        keys = pool.submit([content(name)], order=0)
        pool.advance()
        pool.release(keys, order=0)
    assert (len(pool.cache.device), len(pool.cache.host)) == (2, 1)
    keys = pool.submit(contents("ba"), order=1)
    pool.advance()
    assert ready(pool, keys) == [True, True]
    assert len(backend.batches) == 3
    assert (pool.stats().device.hits, pool.stats().host.hits) == (1, 1)
    assert len(pool.cache.host) == 1


def test_what_came_encoded_passes_by_in_the_towers_dtype_and_is_kept_nowhere():
    pool = make_pool(backend := FakeBackend(), space_rows=2, host_rows=10)
    keys = pool.submit([came_encoded("x", 2), came_encoded("y", 1)], order=0)
    pool.advance()
    assert ready(pool, keys) == [True, False], "it takes room like all rows"
    assert pool.embeds(keys[0]).dtype == torch.int32
    assert pool.embeds(keys[0]).tolist() == [[7, 7]] * 2
    pool.release(keys[:1], order=0)
    pool.advance()
    assert ready(pool, keys[1:]) == [True]
    pool.release(keys[1:], order=0, place=1)
    assert backend.batches == []
    assert (len(pool.cache.device), len(pool.cache.host)) == (0, 0)


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


def test_cached_rows_wait_for_room_like_others():
    """Or many waiting requests would bring all of the host's memory to the device."""
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=2, host_rows=100)
    for name in "abcdef":
        keys = pool.submit([content(name)], order=0)
        pool.advance()
        pool.release(keys, order=0)
    keys = [pool.submit([content(name)], order=1 + number)[0] for number, name in enumerate("abcdef")]
    for number in range(6):
        pool.advance()
        assert pool.cache.device.bytes <= 2 * ROW_BYTES
        assert ready(pool, keys[number:][:2]) == [True] * len(keys[number:][:2])
        pool.release([keys[number]], order=1 + number)
    assert len(backend.batches) == 6


def test_one_larger_than_all_room_goes_alone():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=4)
    keys = [pool.submit([content(*what)], order=0, place=place)[0] for place, what in enumerate([("a", 1), ("b", 9)])]
    pool.advance()
    assert not pool.advance()
    assert ready(pool, keys) == [True, False]
    pool.release(keys[:1], order=0)
    keys += pool.submit(contents("c"), order=1)
    pool.advance()
    assert names(backend.batches[1:]) == [(0, "b")]
    assert not pool.advance()
    pool.release(keys[1:2], order=0, place=1)
    pool.advance()
    assert ready(pool, keys[2:]) == [True]


def test_without_room_entries_go_one_by_one():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=0)
    keys = pool.submit(contents("abc"), order=0)
    for place, key in enumerate(keys):
        pool.advance()
        pool.advance()
        assert ready(pool, [key]) == [True]
        pool.release([key], order=0, place=place)
    assert names(backend.batches) == [(0, "a"), (0, "b"), (0, "c")]
    assert pool.cache.device.bytes == 0


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


def test_younger_ones_keep_their_room_where_it_would_not_be_enough():
    pool = make_pool(FakeBackend(), space_rows=4)
    old, young = pool.submit([content("a", 2)], order=0), pool.submit([content("b", 1)], order=2)
    pool.advance()
    middle = pool.submit([content("c", 3)], order=1)
    assert not pool.advance()
    assert ready(pool, [*old, *young, *middle]) == [True, True, False]


def test_what_is_under_way_keeps_its_room():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, space_rows=1)
    young = pool.submit(contents("a"), order=1)
    pool.advance()
    old = pool.submit(contents("b"), order=0)
    assert not pool.advance()
    backend.finish()
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (0, "b")]
    assert ready(pool, [*young, *old]) == [False, False]


def test_a_request_that_goes_back_to_its_beginning_gets_that_first():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=2)
    later = pool.submit(contents("cd"), order=0, place=2)
    pool.advance()
    assert ready(pool, later) == [True, True]
    earlier = pool.submit(contents("ab"), order=0, place=0)
    pool.advance()
    assert ready(pool, [*earlier, *later]) == [True, True, False, False]


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


def test_an_older_request_that_goes_leaves_an_entry_its_place_among_the_younger():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=1)
    keys = pool.submit(contents("a"), order=0) + pool.submit(contents("b"), order=2)
    pool.submit(contents("b"), order=1)
    pool.submit(contents("c"), order=1, place=1)
    pool.release(keys[1:], order=1)
    pool.release(keys[:1], order=0)
    pool.advance()
    assert names(backend.batches) == [(0, "c")]


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


def test_urgent_rows_too_take_the_room_of_younger_ones_where_that_is_enough():
    pool = make_pool(FakeBackend(), space_rows=3)
    keys = pool.submit([content("a", 2)], order=0) + pool.submit(contents("y"), order=5)
    pool.advance()
    keys += pool.submit([content("b", 2)], order=1) + pool.submit(contents("u"), order=2)
    assert not pool.advance()
    pool.advance(urgent=keys[3])
    assert ready(pool, keys) == [True, False, False, True]
    assert pool.cache.device.held_bytes == 3 * ROW_BYTES


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


def test_those_with_less_to_do_get_more():
    backend = FakeBackend(2, inline=False)
    pool = make_pool(backend)
    pool.submit(contents("ab"), order=0)
    pool.advance()
    backend.finish(0)
    pool.submit(contents("cde"), order=1)
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (1, "b"), (0, "cd"), (1, "e")]


def test_shares_take_into_account_what_workers_have_to_do():
    backend = FakeBackend(3, inline=False)
    pool = make_pool(backend)
    pool.submit([content("a"), content("L", 2), content("M", 2)], order=0)
    pool.advance()
    pool.submit(contents("cdefg"), order=1)
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (1, "L"), (2, "M"), (0, "cd"), (1, "e"), (2, "f")]


def test_uneven_shares_differ_by_one():
    backend = FakeBackend(6, inline=False)
    pool = make_pool(backend)
    pool.submit(contents("abcdefghijk"), order=0)
    pool.advance()
    assert [len(text) for _, text in names(backend.batches)] == [2, 2, 2, 2, 2, 1]


def test_a_batch_keeps_the_compute_budget_and_a_large_picture_goes_alone():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, max_patches=8)
    pool.submit([*contents("abc"), content("L", 5), *contents("de")], order=0)
    finish_all(pool, backend)
    assert names(backend.batches) == [(0, "ab"), (0, "c"), (0, "L"), (0, "de")]


def test_a_worker_is_given_two_batches_at_a_time():
    backend = FakeBackend(2, inline=False)
    pool = make_pool(backend, max_patches=4)
    pool.submit(contents("abcdef"), order=0)
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    backend.finish(1)
    pool.advance()
    assert names(backend.batches[4:]) == [(1, "e")]


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


def test_nothing_else_is_given_to_a_worker_that_retries():
    backend = FakeBackend(2, inline=False)
    pool = make_pool(backend)
    pool.submit(contents("ab"), order=0)
    backend.fail[content("a").digest] = 1
    pool.advance()
    backend.finish(0)
    pool.advance()
    pool.submit(contents("cd"), order=1)
    pool.advance()
    assert names(backend.batches) == [(0, "a"), (1, "b"), (0, "a"), (1, "c")]
    backend.finish(0)
    pool.submit(contents("e"), order=2)
    pool.advance()
    assert names(backend.batches[4:]) == [(0, "de")]


def test_a_retry_goes_alone_also_where_it_is_not_the_first():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend)
    pool.submit(contents("b"), order=1)
    backend.fail[content("b").digest] = 1
    pool.advance()
    backend.finish()
    pool.submit(contents("a"), order=0)
    finish_all(pool, backend)
    assert names(backend.batches) == [(0, "b"), (0, "a"), (0, "b")]


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


def test_a_worker_that_dies_takes_no_innocents_with_it():
    """What it had not come to is as good as new, however often that happens."""
    backend = FakeBackend(inline=False)
    pool = make_pool(backend, max_patches=8)
    keys = pool.submit(contents("abcd"), order=0)
    pool.advance()
    assert names(backend.batches) == [(0, "ab"), (0, "cd")]
    backend.die(0)
    pool.advance()
    assert names(backend.batches[2:]) == [(0, "a")]
    backend.die(0)
    finish_all(pool, backend)
    assert pool.take_failures() == {keys[0]: "died"}
    assert names(backend.batches[3:]) == [(0, "b"), (0, "cd")]
    assert ready(pool, keys) == [False, True, True, True]


def test_who_comes_to_what_has_failed_hears_of_it_too():
    backend = FakeBackend()
    pool = make_pool(backend)
    backend.fail[content("a").digest] = 2
    keys = pool.submit(contents("a"), order=0)
    pool.advance()
    pool.advance()
    assert pool.take_failures() == {keys[0]: POISONED}
    pool.submit(contents("a"), order=1)
    assert pool.stats().coalesced == 0
    assert pool.take_failures() == {keys[0]: POISONED}
    pool.submit(contents("a"), order=2)
    for order in range(3):
        pool.release(keys, order=order)
    assert pool.take_failures() == {}, "nobody is left to be told"
    assert pool.cache.device.stats().held_bytes == 0


def test_what_failed_gives_its_room_to_others():
    backend = FakeBackend()
    pool = make_pool(backend, space_rows=1)
    backend.fail[content("a").digest] = 2
    keys = pool.submit(contents("ab"), order=0)
    for _ in range(3):
        pool.advance()
    assert ready(pool, keys) == [False, True]


def test_a_failure_that_nobody_waits_for_leaves_nothing():
    backend = FakeBackend(inline=False)
    pool = make_pool(backend)
    backend.fail[content("a").digest] = 2
    keys = pool.submit(contents("a"), order=0)
    pool.advance()
    backend.finish()
    pool.advance()
    pool.release(keys, order=0)
    backend.finish()
    pool.advance()
    assert pool.take_failures() == {}
    assert pool.submit(contents("b"), order=0) != keys
    assert pool.stats().queued == 1


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


def test_the_workers_that_are_left_get_all():
    backend = FakeBackend(2, inline=False)
    pool = make_pool(backend)
    keys = pool.submit(contents("abcd"), order=0)
    pool.advance()
    backend.die(0)
    backend.usable.remove(0)
    finish_all(pool, backend)
    assert ready(pool, keys) == [True] * 4


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


@pytest.mark.parametrize(
    "found",
    [torch.zeros((2, 1), dtype=torch.int32), torch.zeros((2, 2), dtype=torch.int32), torch.zeros((1, 2))],
    ids=["shape", "size", "dtype"],
)
def test_rows_of_another_form_are_not_used(found):
    backend, disk = FakeBackend(), FakeDisk()
    pool = make_pool(backend, disk=disk)
    [key] = pool.submit(contents("a"), order=0)
    disk.rows[key] = found
    pool.advance()
    disk.finish_load()
    pool.advance()
    assert pool.embeds(key).tolist() == rows_of(content("a")).tolist()


def test_rows_that_gave_up_their_room_come_from_the_disk_again():
    backend, disk = FakeBackend(), FakeDisk()
    pool = make_pool(backend, space_rows=1, disk=disk)

    def play() -> None:
        for _ in range(3):
            pool.advance()
            disk.finish_all()
        pool.advance()

    young = pool.submit(contents("a"), order=1)
    play()
    old = pool.submit(contents("b"), order=0)
    play()
    assert ready(pool, [*young, *old]) == [False, True]
    pool.release(old, order=0)
    play()
    assert ready(pool, young) == [True]
    assert backend.encoded() == [content("a").digest, content("b").digest]


def test_a_load_that_nobody_waits_for_any_more():
    for is_there in (False, True):
        backend, disk = FakeBackend(), FakeDisk()
        pool = make_pool(backend, disk=disk)
        keys = pool.submit(contents("a"), order=0)
        disk.rows |= {keys[0]: rows_of(content("a"))} if is_there else {}
        pool.advance()
        pool.release(keys, order=0)
        disk.finish_all()
        pool.advance()
        assert (pool.stats().queued, pool.stats().under_way) == (0, 0)
        assert len(pool.cache.device) == is_there
        assert backend.batches == []


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


def test_what_is_saved_of_itself_and_then_pinned_is_counted_once():
    backend, disk = FakeBackend(), FakeDisk()
    pool = make_pool(backend, disk=disk)
    keys = pool.submit(contents("a"), order=0)
    pool.advance()
    disk.finish_all()
    pool.advance()
    for key in keys:
        pool.save(key, pin=True)
    disk.finish_all()
    pool.advance()
    assert disk.pinned == set(keys)
    assert pool.stats().saved == 1


def test_rows_that_came_encoded_are_never_written():
    disk = FakeDisk()
    pool = make_pool(FakeBackend(), disk=disk)
    keys = pool.submit([came_encoded("a")], order=0)
    pool.advance()
    with pytest.raises(AssertionError, match="came from outside"):
        pool.save(keys[0], pin=True)
    assert (list(disk.saves), list(disk.loads), disk.saving) == ([], [], 0)


def test_where_there_is_room_nobody_looks_at_all_that_is_there():
    class Admitted(dict):
        looks = 0

        def values(self):
            self.looks += 1
            return super().values()

    pool = make_pool(FakeBackend(inline=False))
    pool._admitted = Admitted()
    keys = pool.submit([content(f"{number}") for number in range(100)], order=0)
    pool.advance()
    assert len(pool._admitted) == len(keys)
    assert pool._admitted.looks <= 2, "to start batches, and no more for each entry"


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


def test_saving_needs_a_disk():
    pool = make_pool(FakeBackend())
    keys = pool.submit(contents("a"), order=0)
    pool.advance()
    with pytest.raises(AssertionError, match="no disk tier"):
        pool.save(keys[0])


def test_handles_are_those_of_the_workers_and_the_disk():
    assert make_pool(FakeBackend()).wait_handles() == []
    assert make_pool(FakeBackend(inline=False)).wait_handles() == [0]
    both = make_pool(FakeBackend(inline=False), disk=FakeDisk())
    assert both.wait_handles() == [0, 99]
    inline = make_pool(FakeBackend(), disk=FakeDisk())
    assert inline.inline
    assert not both.inline


def test_closing_ends_workers_and_disk():
    backend, disk = FakeBackend(), FakeDisk()
    make_pool(backend, disk=disk).close()
    assert disk.closed
    assert backend.closed
    make_pool(FakeBackend()).close()


def test_figures_of_tiers_that_are_not_there_are_none():
    stats = make_pool(FakeBackend()).stats()
    assert (stats.host, stats.disk) == (None, None)
