"""The prefix cache that the settings ask for."""

from __future__ import annotations

from vlmserve.config.engine_args import EngineArgs
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.page_digests import MediaIdentity
from vlmserve.memory.prefix_cache import ChunkCache, PrefixCache
from vlmserve.memory.radix_cache import RadixCache


def build_prefix_cache(
    args: EngineArgs,
    allocator: TokenToKVPoolAllocator,
    host: TokenToKVPoolAllocator | None = None,
    *,
    storage: KVStorage | None = None,
    identity: MediaIdentity | None = None,
) -> PrefixCache:
    """A prefix cache over the slots of `allocator`, with those of `host` behind them if there are any; see
    `HiRadixCache` for the rest."""
    if args.disable_radix_cache:
        return ChunkCache(allocator.page_size)
    if host is not None:
        return HiRadixCache(
            allocator,
            host,
            policy=args.radix_eviction_policy,
            write_policy=args.hicache_write_policy,
            storage=storage,
            identity=identity,
        )
    return RadixCache(allocator, policy=args.radix_eviction_policy)
