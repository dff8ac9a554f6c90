"""Warmup in this process, into a folder of embeddings. Only the vision tower of the model is loaded."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import blake3
import torch

from processors.families.base import data_items
from processors.inputs import MultimodalDataItem
from vision.encoder_pool import EncoderPool
from vision.towers.loading import load_tower, outline_tower
from vision.towers.temporal_patch import temporal_patches
from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.warmup.run import Warmed, WarmupStopped
from vlmserve.config.engine_args import StartSettings
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import ServerSettings
from vlmserve.engine.encoder import auto_max_pixels, build_encoder_pool, resolve_warmup_patches
from vlmserve.engine.encoder_warmups import EncoderWarmups
from vlmserve.engine.model_loading import prepare_device
from vlmserve.frontend.stage import make_request_media, stage_limits
from vlmserve.ipc.messages import EncodeOutput, EncodeReqInput
from vlmserve.ipc.private_dir import PrivateDirectory, shared_memory_base
from vlmserve.memory.sizing import check_weights_fit, embeds_bytes, weight_bytes
from vlmserve.models.registry import load_config
from vlmserve_common.compute.memory import free_memory
from vlmserve_common.compute.tensors import dtype_setting
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.library import torch_threads

logger = logging.getLogger(__name__)


class EncoderLoop:
    """Runs an encoder pool in a thread of its own, for the coroutines of one event loop. It owns the pool.

    max_patches: see `EncoderWarmups`. num_threads: CPU threads of the tower.
    """

    def __init__(self, pool: EncoderPool, *, max_patches: int, num_threads: int) -> None:
        self._pool = pool
        self._answers: list[EncodeOutput] = []
        self._warmups = EncoderWarmups(pool, send=self._answers.append, max_patches=max_patches)
        self._thread = ThreadPoolExecutor(
            1, "encoder", torch.set_num_threads, (num_threads,)
        )  # the number is a thread's own
        self._waiting: dict[str, asyncio.Future[EncodeOutput]] = {}
        self._new: list[EncodeReqInput] = []
        self._stirred = asyncio.Event()
        self._rids = map(str, itertools.count())
        self._driver: asyncio.Task[None] | None = None

    async def encode(self, items: Sequence[MultimodalDataItem], *, pin: bool) -> EncodeOutput:
        """Encode items. EngineError after the encoder has failed."""
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        message = EncodeReqInput(rid=next(self._rids), items=tuple(items), pin=pin)
        future = self._waiting[message.rid] = asyncio.get_running_loop().create_future()
        self._new.append(message)
        self._stirred.set()
        await asyncio.wait([future, self._driver], return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            self._driver.result()
        return future.result()

    async def close(self) -> None:
        """End after the current batch, and write everything encoded so far."""
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])
        await asyncio.get_running_loop().run_in_executor(self._thread, self._pool.close)
        self._thread.shutdown()

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._stirred.clear()
                new, self._new = self._new, []
                changed = await loop.run_in_executor(self._thread, self._step, new)
                while self._answers:
                    answer = self._answers.pop()
                    self._waiting.pop(answer.rid).set_result(answer)
                if not changed:
                    await self._wait()
        except Exception as error:
            logger.exception("the encoder failed")
            raise EngineError(f"the encoder has failed: {type(error).__name__}: {error}") from error

    def _step(self, new: Sequence[EncodeReqInput]) -> bool:
        for message in new:
            self._warmups.add(message)
        changed = self._pool.advance()
        changed |= self._pool.work(math.inf) and self._pool.advance()
        return self._warmups.advance(order=0) or changed

    async def _wait(self) -> None:
        loop, handles = asyncio.get_running_loop(), self._pool.wait_handles()
        for handle in handles:
            loop.add_reader(handle, self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            for handle in handles:
                loop.remove_reader(handle)


class LocalTarget:
    """Encodes in this process, into settings.engine.embedding_cache_dir. pin: entries are never evicted.

    `settings` is text that differs when the same medium would become other entries. Raises CheckpointError, and
    EngineError for a folder that cannot be used.
    """

    def __init__(self, settings: ServerSettings, *, pin: bool) -> None:
        folder = resolve_model(settings.engine.model, settings.engine.revision)
        args = replace(settings.engine, model=str(folder), processor_cache_mib=0)  # no input comes twice
        device, num_threads = prepare_device(args, None)  # also for encoder processes: their speed is measured here
        limits = stage_limits(settings)
        self._pin = pin
        self._counts = limits.counts
        with ExitStack() as stack:
            max_len = args.max_model_len or load_config(folder).context_length
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
            stack.callback(lambda: asyncio.run(self._media.close()))  # if a later line fails
            if not args.num_encoders:
                check_weights_fit(weight_bytes(tower), model=args.model, dtype=tower_dtype, device=device)
                tower = load_tower(folder, device=device, dtype=dtype)
            row_bytes, (free, _) = tower.row_width * tower_dtype.itemsize, free_memory(device)
            space = embeds_bytes(args, row_bytes=row_bytes, free=free)
            self._pool = build_encoder_pool(
                args, tower, dtype=tower_dtype, device=device, space_bytes=space, start=start
            )
            max_patches = resolve_warmup_patches(args, device)
            num_threads = torch_threads(num_threads, tower_dtype)
            self._encoder = EncoderLoop(self._pool, max_patches=max_patches, num_threads=num_threads)
            self._stack = stack.pop_all()
        assert self._pool.store is not None
        self._store = self._pool.store
        digest = blake3.blake3(self._pool.fingerprint + self._media.describe_settings().encode())
        self.settings = f"{'pinned' if pin else 'unpinned'} {digest.hexdigest()}"

    async def encode(self, request: ChatRequest) -> Warmed:
        """Encode and save all media of a request. BadRequestError and EngineError concern this request alone."""
        named = self._media.media_of(request.messages, request.options.get("mm_processor_kwargs") or {}, self._counts)
        merge = self._media.merge_size
        items = [item for medium in await self._media.load(named) for item in data_items(medium, merge)]
        keys = tuple(self._pool.key(patch) for item in items for patch in temporal_patches(item))
        output = await self._encoder.encode(items, pin=self._pin)
        if output.error is not None:
            raise EngineError(output.error.message)
        if any(item.saved is False for item in output.items):
            raise WarmupStopped(self._store.trouble or "embeddings could not be written")
        return Warmed(items=output.items, keys=keys)

    def holds(self, keys: Sequence[bytes]) -> bool:
        """Return True if all entries of these keys are still there."""
        return all(key in self._store for key in keys)

    def notes(self) -> list[str]:
        """Return sentences for the user at the end of the run."""
        evictions = self._store.stats().evictions
        if not evictions:
            return []
        return [
            f"{evictions} entries were evicted for new ones: the cache is full (settings --embedding-cache-gib, --pin)"
        ]

    async def close(self) -> None:
        """End current work, and write all waiting entries."""
        await self._media.close()
        await self._encoder.close()
        await asyncio.to_thread(self._stack.close)
