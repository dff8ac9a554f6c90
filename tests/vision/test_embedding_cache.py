"""The memory tiers of the embedding cache: what stays, what goes, and where to."""

from __future__ import annotations

from collections import OrderedDict

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


class Model:
    """A tier told in the plainest way: names in order of use, sizes beside them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.entries: OrderedDict[str, int] = OrderedDict()
        self.held: set[str] = set()
        self.hits = self.misses = 0

    def look(self, name: str) -> bool:
        found = name in self.entries
        self.hits += found
        self.misses += not found
        return found

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


@settings(max_examples=150, deadline=None)
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
            is_there = device.look(name) or host.look(name)
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
            assert (tier.stats().hits, tier.stats().misses) == (model.hits, model.misses)
        assert cache.device.held_bytes == device.bytes(held_only=True)
        assert cache.device.bytes <= max(cache.device.limit_bytes, cache.device.held_bytes)
        assert cache.host is None or cache.host.bytes <= cache.host.limit_bytes


def test_rows_of_another_process_go_to_a_gpu_without_waiting_for_it():
    with FakeCuda() as cuda:
        cache = EmbeddingCache(MemoryTier(100, CUDA))
        cache.add(b"k", torch.ones(2, 3))
        assert cache.embeds(b"k").is_cuda
        assert not cuda.counts.syncs


def test_rows_of_the_device_come_to_the_hosts_memory():
    """A tier never holds memory of the other's device."""

    class OfTheDevice(torch.Tensor):
        def cpu(self):
            return torch.ones(1, 1)

    cache = EmbeddingCache(MemoryTier(0, CPU), MemoryTier(100, CPU))
    cache.add(key("a"), torch.zeros(1, 1).as_subclass(OfTheDevice))
    assert type(cache.host.embeds(key("a"))) is torch.Tensor
    assert cache.host.embeds(key("a")).tolist() == [[1.0]]
