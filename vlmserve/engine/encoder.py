"""Builds the vision encoder: its device, its caches, its folder on disk, and how large pictures may be on a CPU."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from processors.families.config import ProcessorConfig, read_processor_config
from processors.resize import smart_resize
from vision.cache.disk_tier import DiskTier
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.cache.store import EmbeddingStore
from vision.encoder_pool import EmbedShape, EncoderPool, PoolLimits
from vision.towers.blocks import VisionTower, encoding_flops
from vision.towers.loading import joined_fingerprint, outline_tower, tower_fingerprint
from vision.towers.runner import TowerRunner
from vision.workers.backend import EncoderBackend
from vision.workers.inline import BATCHES_IN_WORK, InlineBackend
from vision.workers.settings import WorkerSettings
from vlmserve.config.engine_args import AUTO, EngineArgs, StartSettings
from vlmserve.config.model_path import resolve_model
from vlmserve_common.checkpoint.hf_config import has_tower, read_hf_config
from vlmserve_common.compute.adapter_store import AdapterStore
from vlmserve_common.compute.cpus import available_cpus, usable_threads
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.lanes import lane_beside
from vlmserve_common.compute.linear import Linear, pack_linears
from vlmserve_common.compute.shard import Shard
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.kernels.quantized import Mode, tower_mode
from vlmserve_common.version import __version__

if TYPE_CHECKING:
    from vision.cache.stats import LinkStats
    from vision.remote.protocol import TowerIdentity
    from vision.workers.process_backend import ProcessBackend


log = logging.getLogger(__name__)

_WARMUP_PATCHES = 8192


def resolve_max_patches(args: EngineArgs, device: torch.device) -> int:
    """Return the `--encoder-max-patches` setting. By default a CPU has small batches: large ones are no faster, and
    delay the first answers."""
    if args.encoder_max_patches is not None:
        return args.encoder_max_patches
    return 1024 if device.type == "cpu" else 65536


def resolve_warmup_patches(args: EngineArgs, device: torch.device) -> int:
    """Vision patches that media encoded ahead of time have under way at a time: enough to keep the encoder busy, and
    few, since a request that comes then waits for them."""
    return min(resolve_max_patches(args, device), _WARMUP_PATCHES) * max(1, 2 * args.num_encoders)


def embed_shape(tower: VisionTower, dtype: torch.dtype, *behind: VisionTower) -> EmbedShape:
    """Return the shape of the embeddings that towers make, side by side."""
    return EmbedShape(
        merge=tower.spatial_merge_size,
        width=sum(one.row_width for one in (tower, *behind)),
        dtype=dtype,
        main_width=tower.out_hidden_size,
    )


def build_encoder_pool(
    args: EngineArgs,
    tower: VisionTower,
    *behind: VisionTower,
    dtype: torch.dtype,
    device: torch.device,
    space_bytes: int,
    start: StartSettings | None = None,
    store: EmbeddingStore | None = None,
    adapters: AdapterStore | None = None,
) -> EncoderPool:
    """Build the encoder for a checkpoint's tower, which is on `device` and computes in `dtype`. The tower may be on the
    meta device if there are encoder processes, which load it. behind: the tower of a model that guesses, if it has one.

    space_bytes: for embeddings on the device. start: needed if `args` asks for encoder processes. store: keeps
    embeddings for good; by default the folder of `--embedding-cache-dir`. adapters: those that may change the tower.
    Raises EngineError.
    """
    with ExitStack() as stack:
        backend, fingerprint = build_backend(
            args, tower, *behind, dtype=dtype, device=device, start=start, adapters=adapters
        )
        stack.callback(backend.close)
        shape = embed_shape(tower, dtype, *behind)
        if args.encoder_urls is None:
            pool = make_pool(args, backend, fingerprint, shape, device=device, space_bytes=space_bytes, store=store)
        else:
            from vision.remote.remote_backend import BATCHES_AHEAD, RemoteBackend

            remote = RemoteBackend(
                backend,
                args.encoder_urls.split(","),
                tower=tower_identity(args, fingerprint, shape),
                rows=shape.of,
                key=args.peer_key,
                timeout_s=args.encoder_peer_timeout_s,
            )
            stack.callback(remote.close)
            pool = make_pool(
                args,
                remote,
                fingerprint,
                shape,
                device=device,
                space_bytes=space_bytes,
                store=store,
                batches=(1, BATCHES_AHEAD),
                link_stats=remote.stats,
            )
        stack.pop_all()
        return pool


def build_backend(
    args: EngineArgs,
    tower: VisionTower,
    *behind: VisionTower,
    dtype: torch.dtype,
    device: torch.device,
    start: StartSettings | None = None,
    adapters: AdapterStore | None = None,
) -> tuple[EncoderBackend, bytes]:
    """Return what encodes on this machine, and the fingerprint of its towers; see `build_encoder_pool`."""
    second = resolve_model(args.speculative_draft_model_path) if behind and args.speculative_draft_model_path else None
    if args.num_encoders:
        workers = _start_workers(args, dtype, device, start, second)
        try:
            return workers, workers.wait_ready()
        except BaseException:
            workers.close()
            raise
    backend = InlineBackend(TowerRunner(tower, device, *behind, adapters=adapters), lane=lane_beside(device))
    mode = tower_mode(args.quantization, device)
    configs = [read_hf_config(folder) for folder in (Path(args.model), second) if folder is not None]
    fingerprint = joined_fingerprint(  # of the weights as stored
        [
            tower_fingerprint(one, config.get("vision_config", {}), mode)
            for one, config in zip((tower, *behind), configs, strict=True)
        ]
    )
    for one in (tower, *behind):
        pack_linears(one, mode)
    return backend, fingerprint


def make_pool(
    args: EngineArgs,
    backend: EncoderBackend,
    fingerprint: bytes,
    shape: EmbedShape,
    *,
    device: torch.device,
    space_bytes: int,
    store: EmbeddingStore | None = None,
    batches: tuple[int, int] | None = None,
    link_stats: Callable[[], LinkStats] | None = None,
) -> EncoderPool:
    """Make the encoder pool over a backend, with the caches that the settings ask for. space_bytes, store: see
    `build_encoder_pool`. batches: vision patches in one, and how many a worker gets ahead, if the backend needs others
    than the settings'. EngineError for the folder."""
    if store is None and args.embedding_cache_dir is not None:
        store = open_store(args, fingerprint, shape, read_hf_config(Path(args.model)))
    most, ahead = batches or (resolve_max_patches(args, device), 2 if args.num_encoders else BATCHES_IN_WORK)
    return EncoderPool(
        backend,
        make_cache(device, device_bytes=space_bytes, host_bytes=args.encoder_host_cache_mib * 2**20),
        fingerprint=fingerprint,
        embed_shape=shape,
        limits=PoolLimits(max_patches=most, space_bytes=space_bytes, batches_ahead=ahead),
        disk=None if store is None else DiskTier(store),
        link_stats=link_stats,
    )


def tower_identity(args: EngineArgs, fingerprint: bytes, shape: EmbedShape) -> TowerIdentity:
    """Return what servers that share embeddings must have in common."""
    from vision.remote.protocol import TowerIdentity

    return TowerIdentity(
        family=str(read_hf_config(Path(args.model)).get("model_type")),
        fingerprint=fingerprint.hex(),
        dtype=dtype_name(shape.dtype),
        width=shape.width,
        merge=shape.merge,
    )


def make_cache(device: torch.device, *, device_bytes: int, host_bytes: int) -> EmbeddingCache:
    """Make a cache in the memory of `device`. A host tier is behind it if `host_bytes` is above 0 and the device is no
    CPU."""
    return EmbeddingCache(
        MemoryTier(device_bytes, device),
        MemoryTier(host_bytes, torch.device("cpu")) if host_bytes and device.type != "cpu" else None,
    )


def open_store(args: EngineArgs, fingerprint: bytes, shape: EmbedShape, hf_config: Mapping[str, Any]) -> EmbeddingStore:
    """Open the folder of `--embedding-cache-dir` for one tower's embeddings. EngineError if it cannot be used."""
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
    args: EngineArgs, dtype: torch.dtype, device: torch.device, start: StartSettings | None, second: Path | None
) -> ProcessBackend:
    assert start is not None, "encoder processes need a directory for arrays"
    # Imported only if there are such processes.
    from vision.workers.process_backend import ProcessBackend

    devices = encoder_devices(args, device)
    settings = WorkerSettings(
        model=Path(args.model),
        second=second,
        devices=devices,
        shared_dir=start.shared_dir,
        rows_device=str(device),
        dtype=dtype_name(dtype),
        cpu_kernels=args.cpu_kernels,
        gpu_kernels=args.gpu_kernels,
        cuda_graphs=not args.disable_vit_cuda_graph,
        quantization=args.quantization,
        threads=encoder_threads(args),
        log_level=start.log_level,
        startup_timeout_s=start.startup_timeout_s,
        ready_by=start.ready_by,
        max_lora_rank=args.max_lora_rank if args.enable_lora else 0,
        max_loaded_loras=args.max_loaded_loras,
        batch_timeout_s=args.encoder_timeout_s or (3600.0 if "cpu" in devices else 600.0),
    )
    return ProcessBackend(settings)


def encoder_threads(args: EngineArgs) -> int:
    """Return the threads of each encoder process that computes on the CPU."""
    return usable_threads(args.encoder_threads or max(1, available_cpus() // args.num_encoders), "--encoder-threads")


def encoder_devices(args: EngineArgs, device: torch.device) -> tuple[str, ...]:
    """Return the device of each encoder process. device: the model's."""
    count = args.num_encoders
    if args.encoder_devices is not None:
        given = [str(resolve_device(name, "--encoder-devices")) for name in args.encoder_devices.split(",")]
        return tuple(given if len(given) == count else given * count)
    if device.type == "cpu":
        return ("cpu",) * count
    gpus = torch.cuda.device_count()
    first = (device.index or 0) + (0 if args.encodes_on_all_ranks else len(args.own_ranks))
    return tuple(f"cuda:{(first + place) % gpus}" for place in range(count))


def encoders_beside(args: EngineArgs, device: torch.device, shard: Shard) -> int:
    """Return how many encoder processes compute on a rank's GPU. Those of other replicas count only if
    `replica_args` chose their devices. device, shard: the rank's."""
    rank = shard.stage.rank * shard.size + shard.rank
    if not args.num_encoders or device.type != "cuda" or rank >= args.world_size // args.nnodes:
        return 0  # the first machine has all of them
    leader = torch.device("cuda", (device.index or 0) - rank)
    return encoder_devices(args, leader).count(f"cuda:{device.index or 0}")


SMALLEST_PIXELS = 448 * 448
# What else an encoding takes, beside its products at full speed.
_OVERHEAD = 1.5
_ROWS, _MEASURE_S = 256, 0.06

Rate = Callable[[torch.dtype, int, int], float]
"""As `product_rate`."""


def auto_max_pixels(
    args: EngineArgs, *, dtype: torch.dtype, device: torch.device, rate: Rate | None = None
) -> int | None:
    """Return the largest area of a picture, in pixels, or None for the checkpoint's own limit. Log which, and why.

    None also if `--max-pixels` is set, or if a GPU encodes. args.model: the checkpoint folder. dtype: the tower's.
    device: the model's. Takes some tens of milliseconds.
    """
    devices = encoder_devices(args, device) if args.num_encoders else (str(device),)
    if args.max_pixels != AUTO or "cpu" not in devices:
        return None
    folder = Path(args.model)
    hf_config = read_hf_config(folder)
    if not has_tower(hf_config):
        return None
    config = read_processor_config(folder, hf_config)
    sizes = allowed_sizes(config)
    if len(sizes) == 1:
        return None
    tower = outline_tower(folder, dtype=dtype)
    layer = (weight for name, weight in tower.named_parameters() if name.startswith("blocks.0."))
    outer, inner = max((weight.shape for weight in layer if weight.ndim == 2), key=math.prod)
    threads = encoder_threads(args) if args.num_encoders else min(args.num_threads or math.inf, available_cpus())
    measure = rate or partial(product_rate, mode=tower_mode(args.quantization, torch.device("cpu")))
    measured = threads * measure(dtype, inner, outer)
    times = {area: encode_seconds(tower, config, area, measured) for area in sizes}
    chosen = max((area for area in sizes if times[area] <= args.max_pixels_auto_s), default=sizes[0])
    if chosen == config.max_pixels:
        log.debug("pictures have the checkpoint's full size: about %.1f s at %.3g FLOP/s", times[chosen], measured)
        return None
    height, width = smart_resize(3072, 4096, factor=config.patches.factor, min_pixels=0, max_pixels=chosen)
    log.info(
        "pictures are scaled down to at most %d pixels (%dx%d of 4:3), which this CPU encodes in about %.2g s "
        "(--max-pixels auto); --max-pixels checkpoint gives the full size, --max-pixels %d keeps this one",
        chosen,
        width,
        height,
        times[chosen],
        chosen,
    )
    return chosen


def allowed_sizes(config: ProcessorConfig) -> list[int]:
    """Return the areas to choose from, in pixels, smallest first; the last is the checkpoint's limit.

    There are few, so that each start on a machine chooses the same one: kept embeddings belong to one size.
    """
    token = config.patches.factor**2
    steps = max(0, math.ceil(2 * math.log2(config.max_pixels / SMALLEST_PIXELS)))
    areas = [int(SMALLEST_PIXELS * 2 ** (step / 2)) // token * token for step in range(steps)]
    return [*(area for area in areas if config.min_pixels <= area < config.max_pixels), config.max_pixels]


def encode_seconds(tower: VisionTower, config: ProcessorConfig, area: int, rate: float) -> float:
    """Estimate the seconds for a picture of so many pixels, at so many FLOP/s."""
    return _OVERHEAD * encoding_flops(tower, area // config.patches.patch_size**2) / rate


def product_rate(dtype: torch.dtype, inner: int, outer: int, *, mode: Mode | None = None) -> float:
    """Measure the FLOP/s of products of that dtype with weights [outer, inner] on one idle core. CPU time of all
    threads counts, so other work during the start does not. mode: how the weights are quantised."""
    x = torch.full((_ROWS, inner), 0.5, dtype=dtype)
    layer = Linear(inner, outer, bias=False).to(dtype)
    layer.load_state_dict({"weight": torch.full((outer, inner), 0.01)})
    layer.pack(mode)
    layer(x)
    runs, spent, started = 0, 0.0, time.process_time()
    while spent < _MEASURE_S:
        layer(x)
        runs += 1
        # of all runs: what other threads took of one is told late
        spent = time.process_time() - started
    return 2.0 * _ROWS * inner * outer * runs / spent
