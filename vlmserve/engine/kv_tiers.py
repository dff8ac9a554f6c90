"""Builds the prefix cache with its tiers: device, host, disk."""

from __future__ import annotations

from pathlib import Path

import blake3

from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.kv_transfer import KVTransfer
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.sizing import host_pool_size
from vlmserve_common.compute.tensors import dtype_name


def build_prefix_cache(
    args: EngineArgs,
    runner: ModelRunner,
    allocator: TokenToKVPoolAllocator,
    media_keys: MediaKeyTable,
    *,
    bytes_per_token: int,
) -> RadixCache:
    """Build the prefix cache that the settings ask for, and connect its host tier to the runner. EngineError for memory
    or a folder that is missing."""
    host_slots = host_pool_size(args, bytes_per_token=bytes_per_token, device=runner.device)
    if not host_slots:
        return RadixCache(allocator, policy=args.radix_eviction_policy, shares=not args.disable_radix_cache)
    storage = None
    if args.hicache_storage_dir is not None:
        storage = KVStorage(
            Path(args.hicache_storage_dir) / _fingerprint(args, runner),
            limit_bytes=int(args.hicache_storage_gib * 2**30),
            bytes_per_token=bytes_per_token,
            page_size=args.page_size,
        )
    transfer = KVTransfer(runner.kv_cache, host_slots + args.page_size, storage)
    runner.attach_host_tier(transfer)
    return HiRadixCache(
        allocator,
        TokenToKVPoolAllocator(host_slots, args.page_size),
        policy=args.radix_eviction_policy,
        write_policy=args.hicache_write_policy,
        storage=storage,
        identity=media_keys.identity,
        transfer=transfer,
    )


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
