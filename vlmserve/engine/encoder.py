"""Builds the vision encoder: where it computes, what it keeps, and on which disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vision.cache.disk_tier import DiskTier
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.cache.store import EmbeddingStore
from vision.encoder_pool import EmbedShape, EncoderPool, PoolLimits
from vision.towers.blocks import VisionTower
from vision.towers.loading import tower_fingerprint
from vision.towers.runner import TowerRunner
from vision.workers.backend import EncoderBackend
from vision.workers.inline import BATCHES_IN_WORK, InlineBackend
from vision.workers.settings import WorkerSettings
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.start_settings import StartSettings
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.cpus import available_cpus, usable_threads
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.lanes import lane_beside
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.version import __version__

if TYPE_CHECKING:
    from vision.workers.process_backend import ProcessBackend

log = logging.getLogger(__name__)

_WARMUP_PATCHES = 8192


def resolve_max_patches(args: EngineArgs, device: torch.device) -> int:
    """The `--encoder-max-patches` setting. A CPU gains nothing by large batches, and the first answers come sooner."""
    if args.encoder_max_patches is not None:
        return args.encoder_max_patches
    return 1024 if device.type == "cpu" else 65536


def resolve_warmup_patches(args: EngineArgs, device: torch.device) -> int:
    """Vision patches that media encoded ahead of time have under way at a time: enough to keep the encoder busy, and
    few, since a request that comes then waits for them."""
    return min(resolve_max_patches(args, device), _WARMUP_PATCHES) * max(1, 2 * args.num_encoders)


def embed_shape(tower: VisionTower, dtype: torch.dtype) -> EmbedShape:
    """Of the embeddings that a tower makes."""
    return EmbedShape(
        merge=tower.spatial_merge_size,
        width=tower.out_hidden_size * (1 + tower.num_deepstack_layers),
        dtype=dtype,
    )


def build_encoder_pool(
    args: EngineArgs,
    tower: VisionTower,
    *,
    dtype: torch.dtype,
    device: torch.device,
    start: StartSettings | None = None,
    store: EmbeddingStore | None = None,
) -> EncoderPool:
    """The encoder for a checkpoint's tower, which is on `device` and computes in `dtype`. Where there are encoder
    processes, these have its weights, and it may be on the meta device.

    start: needed where `args` asks for any. store: where embeddings are kept for good; by default what
    `--embedding-cache-dir` says. Raises EngineError.
    """
    hf_config = read_hf_config(Path(args.model))
    shape = embed_shape(tower, dtype)
    space_bytes = args.encoder_cache_mib * 2**20
    with ExitStack() as stack:
        backend: EncoderBackend
        if args.num_encoders:
            workers = _start_workers(args, dtype, device, start)
            stack.callback(workers.close)
            backend, fingerprint = workers, workers.wait_ready()
        else:
            backend = InlineBackend(TowerRunner(tower, device), lane=lane_beside(device))
            fingerprint = tower_fingerprint(tower, hf_config["vision_config"])  # of the weights as they are stored
            pack_linears(tower)
        if store is None and args.embedding_cache_dir is not None:
            store = open_store(args, fingerprint, shape, hf_config)
        pool = EncoderPool(
            backend,
            make_cache(device, device_bytes=space_bytes, host_bytes=args.encoder_host_cache_mib * 2**20),
            fingerprint=fingerprint,
            embed_shape=shape,
            limits=PoolLimits(
                max_patches=resolve_max_patches(args, device),
                space_bytes=space_bytes,
                batches_ahead=2 if args.num_encoders else BATCHES_IN_WORK,
            ),
            disk=None if store is None else DiskTier(store),
        )
        stack.pop_all()
        return pool


def make_cache(device: torch.device, *, device_bytes: int, host_bytes: int) -> EmbeddingCache:
    """Keeps embeddings in the memory of `device`, and of the host behind it if that is another and has any bytes."""
    return EmbeddingCache(
        MemoryTier(device_bytes, device),
        MemoryTier(host_bytes, torch.device("cpu")) if host_bytes and device.type != "cpu" else None,
    )


def open_store(args: EngineArgs, fingerprint: bytes, shape: EmbedShape, hf_config: Mapping[str, Any]) -> EmbeddingStore:
    """The folder of `--embedding-cache-dir`, for the embeddings of one tower. EngineError if it cannot be used."""
    assert args.embedding_cache_dir is not None
    return EmbeddingStore(
        Path(args.embedding_cache_dir).expanduser(),
        fingerprint=fingerprint,
        limit_bytes=int(args.embedding_cache_gib * 2**30),
        about={
            "model": Path(args.model).name,
            "family": str(hf_config.get("model_type")),
            "dtype": dtype_name(shape.dtype),
            "row_width": str(shape.width),
            "version": __version__,
        },
    )


def _start_workers(
    args: EngineArgs, dtype: torch.dtype, device: torch.device, start: StartSettings | None
) -> ProcessBackend:
    assert start is not None, "encoder processes need a directory for arrays"
    # Only who has such processes needs what they talk with.
    from vision.workers.process_backend import ProcessBackend

    devices = encoder_devices(args, device)
    settings = WorkerSettings(
        model=Path(args.model),
        devices=devices,
        shared_dir=start.shared_dir,
        rows_device=str(device),
        dtype=dtype_name(dtype),
        cpu_kernels=args.cpu_kernels,
        gpu_kernels=args.gpu_kernels,
        cuda_graphs=not args.disable_vit_cuda_graph,
        threads=encoder_threads(args),
        log_level=start.log_level,
        startup_timeout_s=start.startup_timeout_s,
        ready_by=start.ready_by,
        batch_timeout_s=args.encoder_timeout_s or (3600.0 if "cpu" in devices else 600.0),
    )
    return ProcessBackend(settings)


def encoder_threads(args: EngineArgs) -> int:
    """Of each encoder process that computes on the CPU."""
    return usable_threads(args.encoder_threads or max(1, available_cpus() // args.num_encoders), "--encoder-threads")


def encoder_devices(args: EngineArgs, device: torch.device) -> tuple[str, ...]:
    """The device of each encoder process. device: the model's."""
    count = args.num_encoders
    if args.encoder_devices is not None:
        given = [str(resolve_device(name, "--encoder-devices")) for name in args.encoder_devices.split(",")]
        return tuple(given if len(given) == count else given * count)
    if device.type == "cpu":
        return ("cpu",) * count
    gpus = torch.cuda.device_count()
    first = (device.index or 0) + (0 if args.encodes_on_all_ranks else len(args.own_ranks))
    return tuple(f"cuda:{(first + place) % gpus}" for place in range(count))
