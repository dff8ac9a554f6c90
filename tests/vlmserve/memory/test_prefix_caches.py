"""Which prefix cache settings ask for, and how large its host tier is."""

import pytest
import torch

from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.kv_tiers import build_prefix_cache
from vlmserve.memory import sizing
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.prefix_cache import ChunkCache
from vlmserve.memory.radix_cache import RadixCache
from vlmserve_common.errors import EngineError

CPU = torch.device("cpu")


def test_settings_choose():
    device, host = TokenToKVPoolAllocator(64, 16), TokenToKVPoolAllocator(64, 16)
    assert type(build_prefix_cache(EngineArgs(model="m"), device)) is RadixCache
    assert type(build_prefix_cache(EngineArgs(model="m"), device, host)) is HiRadixCache
    for tier in (None, host):
        assert type(build_prefix_cache(EngineArgs(model="m", disable_radix_cache=True), device, tier)) is ChunkCache


def test_the_hosts_slots(monkeypatch):
    monkeypatch.setattr(sizing, "free_memory", lambda device: (8 * 2**30, 8 * 2**30))

    def slots(**settings: object) -> int:
        args = EngineArgs(model="m", **settings)
        return sizing.host_pool_size(args, bytes_per_token=2**20, device=CPU)

    assert slots() == 0
    assert slots(enable_hierarchical_cache=True, disable_radix_cache=True) == 0
    assert slots(enable_hierarchical_cache=True) == 4096 - 16
    assert slots(enable_hierarchical_cache=True, hicache_size_gib=1.01, page_size=64) == 1024 - 64
    with pytest.raises(EngineError, match=r"--hicache-size-gib is 7.9, room for .* 8 GiB of memory are free"):
        slots(enable_hierarchical_cache=True, hicache_size_gib=7.9)
    with pytest.raises(EngineError, match=r"--hicache-size-gib is 0.03, room for 0 tokens of 1048576 bytes"):
        slots(enable_hierarchical_cache=True, hicache_size_gib=0.03)
