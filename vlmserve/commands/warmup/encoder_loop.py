"""An encoder pool at work in a thread of its own, for coroutines that wait for their media."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from processors.inputs import MultimodalDataItem
from vision.encoder_pool import EncoderPool
from vlmserve.engine.encoder_warmups import EncoderWarmups
from vlmserve.ipc.messages import EncodeOutput, EncodeReqInput
from vlmserve_common.errors import EngineError

logger = logging.getLogger(__name__)


class EncoderLoop:
    """Owns the pool from now on. Of one event loop. max_patches: see `EncoderWarmups`. num_threads: CPU threads of the
    tower."""

    def __init__(self, pool: EncoderPool, *, max_patches: int, num_threads: int) -> None:
        self._pool = pool
        self._answers: list[EncodeOutput] = []
        self._warmups = EncoderWarmups(pool, send=self._answers.append, max_patches=max_patches)
        self._thread = ThreadPoolExecutor(1, "encoder", torch.set_num_threads, (num_threads,))  # each has its own
        self._waiting: dict[str, asyncio.Future[EncodeOutput]] = {}
        self._new: list[EncodeReqInput] = []
        self._stirred = asyncio.Event()
        self._rids = map(str, itertools.count())
        self._driver: asyncio.Task[None] | None = None

    async def encode(self, items: Sequence[MultimodalDataItem], *, pin: bool) -> EncodeOutput:
        """The answer. EngineError once the encoder has failed."""
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
        """End after the batch in work; what is encoded by then is written."""
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
        """For another message, or something that the pool has to do."""
        loop, handles = asyncio.get_running_loop(), self._pool.wait_handles()
        for handle in handles:
            loop.add_reader(handle, self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            for handle in handles:
                loop.remove_reader(handle)
