"""The prefix cache that the settings ask for."""

from __future__ import annotations

from vlmserve.config.engine_args import EngineArgs
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.prefix_cache import ChunkCache, PrefixCache
from vlmserve.memory.radix_cache import RadixCache


def build_prefix_cache(args: EngineArgs, allocator: TokenToKVPoolAllocator) -> PrefixCache:
    """A prefix cache over the slots of `allocator`."""
    if args.disable_radix_cache:
        return ChunkCache(allocator.page_size)
    return RadixCache(allocator, policy=args.radix_eviction_policy)
