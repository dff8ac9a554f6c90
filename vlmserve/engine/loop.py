"""What one process of the engine does in turn: the scheduler's steps, and media encoded ahead of time beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vision.encoder_pool import EncoderPool
from vlmserve.engine.encoder_warmups import EncoderWarmups
from vlmserve.engine.lockstep import EngineScheduler
from vlmserve.ipc.messages import (
    AbortReq,
    EncodeReqInput,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from vlmserve.scheduler.batch_log import BatchLog
from vlmserve_common.errors import EngineError

# An encoder in this process takes its time from requests: beside them, media that are encoded ahead of time come in at
# every so many turns.
_TURNS_PER_WARMUP = 16


class EngineLoop:
    """A scheduler and the warmups that share its encoder. Single-threaded: call `handle` and `step` in turn.

    max_patches: see `EncoderWarmups`. send: gets the warmups' answers. batch_log: none by default.
    """

    def __init__(
        self,
        scheduler: EngineScheduler,
        encoder: EncoderPool,
        send: Callable[[SchedulerOutput], None],
        *,
        max_patches: int,
        batch_log: BatchLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._encoder = encoder
        self._send = send
        self._warmups = EncoderWarmups(encoder, send=send, max_patches=max_patches)
        self._turns = 0
        self._batch_log = batch_log or BatchLog(0.0)

    def handle(self, message: TokenizedGenerateReqInput | EncodeReqInput | AbortReq) -> None:
        """Take one message. A request that can never be answered is refused at once."""
        if isinstance(message, EncodeReqInput):
            self._warmups.add(message)
        elif not isinstance(message, AbortReq) or not self._warmups.abort(message.rid):
            self.scheduler.handle(message)

    def step(self) -> bool:
        """See `Scheduler.step`."""
        busy = self.scheduler.step(encoder_is_shared=len(self._warmups) > 0)
        alone = self.scheduler.is_idle()
        may_ask = not self._encoder.inline or alone or self._turns % _TURNS_PER_WARMUP == 0
        self._turns += 1
        # behind the requests that are there, and before those to come
        busy |= self._warmups.advance(order=self.scheduler.behind_all_media() if may_ask else None)
        self._batch_log.step(self.stats, idle=alone)
        if alone and not busy and len(self._warmups) and not self._encoder.busy:
            raise EngineError(f"{len(self._warmups)} requests to encode ahead of time wait, and none gets on")
        return busy

    def drain(self) -> None:
        """See `Scheduler.drain`."""
        self.scheduler.drain()

    def flush_cache(self) -> int:
        """See `Scheduler.flush_cache`."""
        return self.scheduler.flush_cache()

    def is_idle(self) -> bool:
        """Whether there is neither a request nor anything to be encoded ahead of time."""
        return self.scheduler.is_idle() and not len(self._warmups)

    def stats(self) -> SchedulerStats:
        """Plain figures of this moment."""
        return replace(self.scheduler.stats(), num_warmups=len(self._warmups))
