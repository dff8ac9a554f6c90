"""The memory tiers of the embedding cache: what stays, what goes, and where to."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_cuda.tensors import CUDA, FakeCuda
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier

CPU = torch.device("cpu")


def rows(name: str, count: int = 1) -> torch.Tensor:
    """int64 [count, 1]: 8 bytes a row, unlike those of other names."""
    return torch.full((count, 1), ord(name))


def key(name: str) -> bytes:
    return name.encode()


def names(gone: list[tuple[bytes, torch.Tensor]]) -> str:
    for name, was in gone:
        assert torch.equal(was, rows(name.decode(), len(was)))
    return "".join(name.decode() for name, _ in gone)


def tier(limit_rows: int, **contents: int) -> MemoryTier:
    """contents: name and number of rows, the first used the longest ago."""
    made = MemoryTier(8 * limit_rows, CPU)
    for name, count in contents.items():
        assert made.put(key(name), rows(name, count)) == []
    return made


def test_the_least_recently_used_goes_first_and_only_what_must():
    made = tier(4, a=1, b=1, c=1, d=1)
    assert made.touch(key("a"))
    assert names(made.put(key("e"), rows("e", 2))) == "bc"
    assert [key(name) in made for name in "abcde"] == [True, False, False, True, True]
    assert (len(made), made.bytes) == (3, 32)
    made.embeds(key("d"))  # is no use in this sense
    assert names(made.put(key("f"), rows("f"))) == "d"
    assert made.stats().evictions == 3


def test_the_limit_may_be_met():
    made = tier(3, a=1, b=1)
    assert made.put(key("c"), rows("c")) == []
    assert names(made.put(key("d"), rows("d"))) == "a"


def test_what_is_larger_than_the_limit_goes_itself():
    made = tier(3, a=1, b=1)
    assert names(made.put(key("L"), rows("L", 4))) == "L"
    assert (len(made), made.bytes, made.stats().evictions) == (2, 16, 1)


def test_what_is_held_stays_and_is_counted_once_it_is_here():
    made = tier(2, a=1)
    made.hold(key("a"))
    made.hold(key("b"))
    assert made.held_bytes == 8
    assert made.put(key("b"), rows("b", 2)) == []
    assert (made.bytes, made.held_bytes) == (24, 24)
    assert names(made.put(key("c"), rows("c"))) == "c"
    assert names(made.let_go(key("a"))) == "a"
    assert (made.bytes, made.held_bytes) == (16, 16)
    assert made.let_go(key("b")) == []
    assert (made.bytes, made.held_bytes) == (16, 0)


def test_what_is_let_go_counts_as_just_used_and_goes_if_it_is_too_large_to_stay():
    made = tier(3, a=1, b=1, c=1)
    made.hold(key("a"))
    assert made.let_go(key("a")) == []
    assert names(made.put(key("d"), rows("d"))) == "b"
    made.hold(key("L"))
    assert names(made.put(key("L"), rows("L", 5))) == "cad"
    assert names(made.let_go(key("L"))) == "L"
    assert (made.bytes, made.held_bytes, len(made)) == (0, 0, 0)


def test_what_is_taken_out_while_it_is_held_is_held_when_it_comes_back():
    made = tier(1, a=1)
    made.hold(key("a"))
    assert torch.equal(made.pop(key("a")), rows("a"))
    assert (made.bytes, made.held_bytes, len(made)) == (0, 0, 0)
    made.put(key("a"), rows("a"))
    assert made.held_bytes == 8
    assert names(made.put(key("b"), rows("b"))) == "b"


def test_looking_counts_and_reading_does_not():
    made = tier(2, a=1)
    assert (made.touch(key("a")), made.touch(key("b"))) == (True, False)
    made.embeds(key("a"))
    with pytest.raises(KeyError):
        made.embeds(key("b"))
    stats = made.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.entries, stats.bytes) == (1, 1, 0, 1, 8)


def test_holding_twice_letting_go_unheld_and_adding_twice_are_errors():
    made = tier(2, a=1)
    made.hold(key("a"))
    with pytest.raises(AssertionError):
        made.hold(key("a"))
    with pytest.raises(KeyError):
        made.let_go(key("b"))
    with pytest.raises(AssertionError):
        made.put(key("a"), rows("a"))


def test_what_the_device_gives_up_goes_to_the_host_and_comes_back_when_it_is_looked_for():
    cache = EmbeddingCache(MemoryTier(16, CPU), MemoryTier(16, CPU))
    for name in "abc":
        cache.add(key(name), rows(name))
    assert (key("a") in cache.device, key("a") in cache.host) == (False, True)
    cache.hold(key("a"))
    assert cache.find(key("a"))
    assert torch.equal(cache.embeds(key("a")), rows("a"))
    assert (key("a") in cache.host, key("b") in cache.host) == (False, True)
    assert not cache.find(key("x"))
    assert (cache.device.stats().hits, cache.device.stats().misses) == (0, 2)
    assert (cache.host.stats().hits, cache.host.stats().misses) == (1, 1)


def test_rows_for_a_device_of_its_own_are_brought_there():
    cache = EmbeddingCache(MemoryTier(100, torch.device("meta")))
    cache.add(key("a"), rows("a"))
    assert cache.embeds(key("a")).device.type == "meta"


def test_rows_of_the_device_come_to_the_hosts_memory():
    """A tier never holds memory of the other's device."""

    class OfTheDevice(torch.Tensor):
        def cpu(self):
            return torch.ones(1, 1)

    cache = EmbeddingCache(MemoryTier(0, CPU), MemoryTier(100, CPU))
    cache.add(key("a"), torch.zeros(1, 1).as_subclass(OfTheDevice))
    assert type(cache.host.embeds(key("a"))) is torch.Tensor
    assert cache.host.embeds(key("a")).tolist() == [[1.0]]


def test_letting_go_of_what_is_too_large_hands_it_to_the_host_and_dropping_keeps_it_nowhere():
    for drop in (False, True):
        cache = EmbeddingCache(MemoryTier(8, CPU), MemoryTier(100, CPU))
        cache.hold(key("a"))
        cache.add(key("a"), rows("a", 3))
        assert cache.device.held_bytes == 24
        (cache.drop if drop else cache.let_go)(key("a"))
        assert (cache.device.bytes, cache.device.held_bytes) == (0, 0)
        assert (key("a") in cache.host) == (not drop)
        cache.hold(key("a"))  # is no longer held


class Model:
    """A tier told in the plainest way: names in order of use, sizes beside them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: OrderedDict[str, int] = OrderedDict()
        self.held: set[str] = set()

    def bytes(self, held_only: bool = False) -> int:
        return 8 * sum(count for name, count in self.entries.items() if not held_only or name in self.held)

    def trim(self, newest: str) -> str:
        gone = ""
        while self.bytes() > self.limit:
            free = [name for name in self.entries if name not in self.held]
            if newest in free and 8 * self.entries[newest] > self.limit:
                free = [newest]
            if not free:
                break
            del self.entries[free[0]]
            gone += free[0]
        return gone


sizes = dict(zip("abcdef", (1, 1, 2, 3, 4, 7), strict=True))


@settings(max_examples=300, deadline=None)
@given(
    limit=st.integers(0, 9),
    host_limit=st.sampled_from([None, 0, 3, 9]),
    acts=st.lists(st.tuples(st.sampled_from(["want", "let go", "drop"]), st.sampled_from("abcdef")), max_size=40),
)
def test_two_tiers_are_as_told(limit, host_limit, acts):
    """As the pool uses them: hold, look, add what is nowhere, and let go or drop."""
    cache = EmbeddingCache(MemoryTier(8 * limit, CPU), None if host_limit is None else MemoryTier(8 * host_limit, CPU))
    device, host = Model(8 * limit), Model(-1 if host_limit is None else 8 * host_limit)

    def pass_on(gone: str) -> None:
        for name in gone:
            host.entries[name] = sizes[name]
            host.trim(name)

    for act, name in acts:
        if act == "want" and name not in device.held:
            device.held.add(name)
            cache.hold(key(name))
            is_there = name in device.entries or name in host.entries
            assert cache.find(key(name)) == is_there
            host.entries.pop(name, None)
            if not is_there:
                cache.add(key(name), rows(name, sizes[name]))
            device.entries[name] = sizes[name]
            device.entries.move_to_end(name)
            pass_on(device.trim(name))
        elif act != "want" and name in device.held:
            device.held.remove(name)
            if act == "drop":
                cache.drop(key(name))
                del device.entries[name]
            else:
                cache.let_go(key(name))
                device.entries.move_to_end(name)
                pass_on(device.trim(name))
        for model, tier in ((device, cache.device), (host, cache.host)):
            if tier is None:
                assert not model.entries
                continue
            assert {key(name) for name in model.entries} == {key(name) for name in sizes if key(name) in tier}
            assert all(torch.equal(tier.embeds(key(name)), rows(name, sizes[name])) for name in model.entries)
            assert (tier.bytes, len(tier)) == (model.bytes(), len(model.entries))
        assert cache.device.held_bytes == device.bytes(held_only=True)
        assert cache.device.bytes <= max(cache.device.limit_bytes, cache.device.held_bytes)
        assert cache.host is None or cache.host.bytes <= cache.host.limit_bytes


def test_rows_of_another_process_go_to_a_gpu_without_waiting_for_it():
    with FakeCuda() as cuda:
        cache = EmbeddingCache(MemoryTier(100, CUDA))
        cache.add(b"k", torch.ones(2, 3))
        assert cache.embeds(b"k").is_cuda
        assert not cuda.counts.syncs
