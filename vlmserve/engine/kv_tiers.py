"""Builds the prefix cache with its tiers: device, host, disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import blake3

from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.kv_transfer import HostKVPool, KVTransfer
from vlmserve.memory.kv_writeback import KVWriteback
from vlmserve.memory.media_keys import MediaIdentity, MediaKeyTable
from vlmserve.memory.prefix_cache import ChunkCache, PrefixCache
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.sizing import host_pool_size
from vlmserve_common.compute.tensors import dtype_name

_GIB = 1024**3


def build_tiers(
    args: EngineArgs,
    runner: ModelRunner,
    allocator: TokenToKVPoolAllocator,
    media_keys: MediaKeyTable,
    *,
    bytes_per_token: int,
) -> tuple[PrefixCache, Callable[[float | None], int]]:
    """Build the prefix cache that the settings ask for, and connect its host tier to the runner.

    Also returns the function that closes the cache: see `KVWriteback.close`. EngineError for memory or a folder that is
    missing.
    """
    host_slots = host_pool_size(args, bytes_per_token=bytes_per_token, device=runner.device)
    if not host_slots:
        return build_prefix_cache(args, allocator), lambda _: 0
    pool = HostKVPool(num_slots=host_slots + args.page_size, kv_cache=runner.kv_cache)
    storage = None
    if args.hicache_storage_dir is not None:
        storage = KVStorage(
            Path(args.hicache_storage_dir) / _fingerprint(args, runner),
            limit_bytes=int(args.hicache_storage_gib * _GIB),
            bytes_per_token=pool.bytes_per_token,
            page_size=args.page_size,
        )
    transfer = KVTransfer(runner.kv_cache, pool, storage)
    runner.attach_host_tier(transfer)
    cache = build_prefix_cache(
        args,
        allocator,
        TokenToKVPoolAllocator(host_slots, args.page_size),
        storage=storage,
        identity=media_keys.identity,
    )
    if storage is None or not isinstance(cache, HiRadixCache):
        return cache, lambda _: 0
    return cache, KVWriteback(cache, transfer, storage, bytes_per_token=pool.bytes_per_token).close


def build_prefix_cache(
    args: EngineArgs,
    allocator: TokenToKVPoolAllocator,
    host: TokenToKVPoolAllocator | None = None,
    *,
    storage: KVStorage | None = None,
    identity: MediaIdentity | None = None,
) -> PrefixCache:
    """Build the prefix cache over the slots of `allocator`, with a second tier if there are `host` slots. See
    `HiRadixCache` for the other arguments."""
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


def _fingerprint(args: EngineArgs, runner: ModelRunner) -> str:
    """Digest everything that KV depends on: weights, how they are computed with, and the cache's dtype and page
    size."""
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for path in sorted(Path(args.model).glob("*")):
        if path.suffix in (".safetensors", ".json"):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update_mmap(path)
    kept = (args.quantization, dtype_name(runner.model.dtype), dtype_name(runner.kv_cache.dtype), args.page_size)
    digest.update(repr(kept).encode())
    return digest.hexdigest(length=16)
