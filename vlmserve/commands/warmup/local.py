"""Encodes in this process, into a folder of embeddings: the tower alone is loaded, and no more of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import blake3
import torch

from processors.families.base import data_item
from vision.towers.loading import load_tower, outline_tower
from vision.towers.temporal_patch import temporal_patches
from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.warmup.encoder_loop import EncoderLoop
from vlmserve.commands.warmup.target import Warmed, WarmupStopped
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ServerSettings
from vlmserve.config.start_settings import StartSettings
from vlmserve.engine.encoder import build_encoder_pool, resolve_warmup_patches
from vlmserve.engine.picture_limit import auto_max_pixels
from vlmserve.frontend.stage import make_request_media, stage_limits
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base
from vlmserve.memory.sizing import check_weights_fit, weight_bytes
from vlmserve.models.registry import load_config
from vlmserve_common.compute.cpus import usable_threads
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.tensors import dtype_setting
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.library import activate, torch_threads


class LocalTarget:
    """settings.engine.embedding_cache_dir must be there. pin: entries are never evicted. `settings` is text that is
    another where the same medium would become other entries.

    Raises CheckpointError, and EngineError for a folder that cannot be used.
    """

    def __init__(self, settings: ServerSettings, *, pin: bool) -> None:
        folder = resolve_model(settings.engine.model)
        args = replace(settings.engine, model=str(folder), processor_cache_mib=0)  # nothing comes twice
        device = resolve_device(args.device)
        num_threads = usable_threads(args.num_threads, "--num-threads")
        torch.set_num_threads(num_threads)
        if device.type == "cpu":  # also where encoder processes compute: their speed is measured here
            activate(args.cpu_kernels, threads=num_threads)
        fused.activate(args.gpu_kernels, device)
        limits = stage_limits(settings)
        self._pin = pin
        self._counts = limits.counts
        with ExitStack() as stack:
            max_len = args.max_model_len or load_config(folder).max_position_embeddings
            processes = args.num_encoders + args.media_processes
            start = None
            if processes:
                start = StartSettings(
                    shared_dir=stack.enter_context(PrivateDirectory(shared_memory_base())).path,
                    log_level=settings.log_level,
                    startup_timeout_s=settings.startup_timeout_s,
                )
            dtype = dtype_setting(args.dtype)
            tower = outline_tower(folder, dtype=dtype)
            tower_dtype = next(tower.parameters()).dtype
            self._media = make_request_media(
                args,
                limits,
                max_model_len=max_len,
                auto_pixels=auto_max_pixels(args, dtype=tower_dtype, device=device),
                start=start,
            )
            stack.callback(lambda: asyncio.run(self._media.close()))  # for what fails here
            if not args.num_encoders:
                check_weights_fit(weight_bytes(tower), model=args.model, dtype=tower_dtype, device=device)
                tower = load_tower(folder, device=device, dtype=dtype)
            self._pool = build_encoder_pool(args, tower, dtype=tower_dtype, device=device, start=start)
            max_patches = resolve_warmup_patches(args, device)
            num_threads = torch_threads(num_threads, tower_dtype)
            self._encoder = EncoderLoop(self._pool, max_patches=max_patches, num_threads=num_threads)
            self._stack = stack.pop_all()
        assert self._pool.store is not None
        self._store = self._pool.store
        digest = blake3.blake3(self._pool.fingerprint + self._media.describe_settings().encode())
        self.settings = f"{'pinned' if pin else 'unpinned'} {digest.hexdigest()}"

    async def encode(self, request: ChatRequest) -> Warmed:
        """Return when everything is encoded and, where there is a disk, saved. BadRequestError and EngineError are
        about this request, WarmupStopped about all."""
        named = self._media.media_of(request.messages, request.options.get("mm_processor_kwargs") or {}, self._counts)
        items = [data_item(medium) for medium in await self._media.load(named)]
        keys = tuple(self._pool.key(patch) for item in items for patch in temporal_patches(item))
        output = await self._encoder.encode(items, pin=self._pin)
        if output.error is not None:
            raise EngineError(output.error.message)
        if any(item.saved is False for item in output.items):
            raise WarmupStopped(self._store.trouble or "embeddings could not be written")
        return Warmed(items=output.items, keys=keys)

    def holds(self, keys: Sequence[bytes]) -> bool:
        """Whether entries of these keys are still there, as far as that can be known."""
        return all(key in self._store for key in keys)

    def notes(self) -> list[str]:
        """What the user should know at the end, a sentence each."""
        evictions = self._store.stats().evictions
        if not evictions:
            return []
        return [f"{evictions} entries gave way to others: the cache is full (settings --embedding-cache-gib, --pin)"]

    async def close(self) -> None:
        """Break off what is under way, and write what waits to be written."""
        await self._media.close()
        await self._encoder.close()
        await asyncio.to_thread(self._stack.close)
