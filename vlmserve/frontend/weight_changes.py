"""Weights that change, and memory that is given back, in front of a running engine.

A change is all or nothing. It is checked first. Then the door closes, requests under way end with the old weights (or
are aborted), and all processes of all replicas change together. Requests in front of the door get the new weights. If
generation is paused, requests that the engine holds stay there, and go on with the new weights.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve.ipc.weight_messages import (
    ChangeWeightsReq,
    CheckWeightsReq,
    MemoryTag,
    ReceiveWeightsReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    WeightsDone,
    WeightsOrder,
)
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.errors import BadRequestError

_T = TypeVar("_T")


class WeightChanges:
    """Changes to the weights of one engine. released: memory that is given back.

    lock: held by whoever changes weights, or pauses generation. order: gives an order to all processes; it raises
    BadRequestError with their reason, or an EngineError. end_inside: ends all requests that have passed the door.
    is_paused: whether generation is.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        lock: asyncio.Lock,
        *,
        order: Callable[[WeightsOrder], Awaitable[WeightsDone]],
        end_inside: Callable[[], Awaitable[object]],
        is_paused: Callable[[], bool],
    ) -> None:
        self.released: set[MemoryTag] = set()
        self._manager, self._lock, self._order = manager, lock, order
        self._end_inside, self._is_paused = end_inside, is_paused
        self._tasks: set[asyncio.Task[Any]] = set()

    async def change(self, source: WeightSource, *, abort: bool = False) -> WeightsDone:
        """Change the weights. abort: end requests under way in place of waiting for them."""
        async with self._lock:
            await self._order(CheckWeightsReq(source=source))
            async with self._quiet(abort=abort):
                if source.group is not None:
                    await self._order(ReceiveWeightsReq(source=source))
                try:
                    done = await self._order(ChangeWeightsReq(source=source, epoch=secrets.token_hex(8)))
                except Exception as error:
                    reason = f"weights were changed in part, and an update has to bring all of them: {error}"
                    self._manager.suspend(reason, by="weights")
                    raise
                finally:
                    self._manager.door.changes += 1
                self._note_missing(done)
                return done

    async def finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for some work, which goes on if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def alone(self, order: WeightsOrder) -> None:
        """Give an order that changes nothing."""
        async with self._lock:
            await self._order(order)

    async def release(self, tags: Sequence[MemoryTag], *, discard: bool = False) -> WeightsDone:
        """Give memory back; requests wait until it is resumed. discard: forget the weights."""
        async with self._lock, self._quiet(abort=False):
            try:
                done = await self._order(ReleaseMemoryReq(tags=tuple(tags), discard=discard))
            except BadRequestError:  # other replicas may have given it back
                again = ResumeMemoryReq(tags=tuple(tag for tag in tags if tag not in self.released))
                await self._order(again)
                raise
            self.released |= set(tags)
            if self.released:
                self._manager.door.close("released")
            if discard:
                self._note_missing(done)
        return done

    async def resume(self, tags: Sequence[MemoryTag]) -> WeightsDone:
        """Take memory again."""
        async with self._lock:
            done = await self._order(ResumeMemoryReq(tags=tuple(tags)))
            self.released -= set(tags)
            if not self.released:
                self._manager.door.open("released")
        return done

    @asynccontextmanager
    async def _quiet(self, *, abort: bool) -> AsyncIterator[None]:
        """Keep requests out while the engine changes. Those inside end first, unless generation is paused."""
        door = self._manager.door
        with door.shut("changing"):
            if abort:
                await self._end_inside()
            if not self._is_paused():
                await door.empty()
            yield

    def _note_missing(self, done: WeightsDone) -> None:
        reason = (
            f"{done.missing} tensors of the weights are missing: an update has to bring them" if done.missing else None
        )
        self._manager.suspend(reason, by="weights")
