"""Changes the weights of a running engine between its steps, on all its processes together."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vision.towers.loading import OF_THE_TOWER
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.weights.rank import RankWeights
from vlmserve.ipc.control_messages import ControlRefused
from vlmserve.ipc.weight_messages import (
    ChangeWeightsReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    WeightsDone,
    WeightsOrder,
)
from vlmserve_common.checkpoint.given import reader_of

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks

log = logging.getLogger(__name__)


class EngineWeights:
    """The weights of an engine. Call `handle` between steps, in the engine's thread.

    own: this process's part. ranks, tell: those that share the model, and what gives them an order; None for a process
    that is alone.
    """

    def __init__(
        self,
        loop: EventLoop,
        own: RankWeights,
        *,
        ranks: Ranks | None = None,
        tell: Callable[[WeightsOrder], object] = lambda order: None,
    ) -> None:
        self._loop, self._own = loop, own
        self._ranks, self._tell = ranks, tell

    @property
    def are_there(self) -> bool:
        """Whether steps can be computed: nothing is released, and no tensor is missing."""
        return not self._own.memory.released and not self._own.missing

    def handle(self, order: WeightsOrder) -> WeightsDone | ControlRefused:
        """Carry an order out. The answer of a change that failed has the status 500: weights may be lost then."""
        began, tower = time.monotonic(), False
        if isinstance(order, ChangeWeightsReq):
            names = [place.name for place in order.source.tensors] or reader_of(order.source).tensors
            tower = any(re.search(OF_THE_TOWER, name) for name in names)
        if isinstance(order, ChangeWeightsReq | ReleaseMemoryReq):
            self._loop.settle()
        if isinstance(order, ReleaseMemoryReq) and (running := self._loop.stats().num_running_reqs):
            return ControlRefused(
                message=f"{running} requests are running, and need their memory: abort or retract them first"
            )
        released = self._own.memory.released
        failure, nbytes = self._loop.device.submit(self._everywhere, order).result()
        if failure:
            if isinstance(order, ReleaseMemoryReq):  # some ranks may have given it back
                again = ResumeMemoryReq(tags=tuple(tag for tag in order.tags if tag not in released))
                self._loop.device.submit(self._everywhere, again).result()
            return ControlRefused(message=failure, status=500 if isinstance(order, ChangeWeightsReq) else 400)
        match order:
            case ChangeWeightsReq():
                self._loop.weights_changed(order.epoch, tower=tower)
                log.info(
                    "weights of %s, %.2f GB in %.2f s", order.source.called, nbytes / 1e9, time.monotonic() - began
                )
            case ReleaseMemoryReq() if "kv_cache" in order.tags:
                self._loop.forget_kv()
                log.info("%.2f GB given back", nbytes / 1e9)
            case ResumeMemoryReq():
                log.info("%.2f GB taken again", nbytes / 1e9)
        return WeightsDone(nbytes=nbytes, missing=len(self._own.missing))

    def _everywhere(self, order: WeightsOrder) -> tuple[str, int]:
        if self._ranks is None:
            return self._own.obey(order)
        self._tell(order)
        failure, nbytes = self._own.obey(order)
        return self._ranks.failure(failure), nbytes
