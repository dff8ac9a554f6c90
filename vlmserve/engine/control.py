"""Operators' requests to a running engine: pause it, flush its cache, profile it, end requests, describe it."""

from __future__ import annotations

import logging
from pathlib import Path

from vlmserve.engine.adapters import EngineAdapters
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.profiling import Profiler
from vlmserve.engine.weights.changing import EngineWeights
from vlmserve.ipc.control_messages import (
    AbortRequestsReq,
    ContinueReq,
    ControlRefused,
    ControlRequest,
    ControlResult,
    EngineState,
    FlushCacheReq,
    GetServerInfoReq,
    LoadAdapterReq,
    PauseReq,
    ProfileResult,
    ServerInfo,
    StartProfileReq,
    StopProfileReq,
    UnloadAdapterReq,
)
from vlmserve.ipc.messages import AbortReq
from vlmserve_common.errors import CheckpointError

log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """Becomes a `ControlRefused`."""


class EngineControl:
    """Answers operators' requests, and pauses the engine. Call `step` in place of the engine's own, and `handle`
    between steps, in the same thread.

    device, dtype: the model's, for `ServerInfo`. url: where other servers reach this engine. adapters: of all ranks, if
    there may be any.
    """

    def __init__(
        self,
        engine: EventLoop,
        profiler: Profiler,
        weights: EngineWeights,
        *,
        device: str,
        dtype: str,
        url: str = "",
        adapters: EngineAdapters | None = None,
    ) -> None:
        self.paused = False
        self._adapters = adapters
        self._engine = engine
        self._profiler = profiler
        self._weights = weights
        self._device, self._dtype, self._url = device, dtype, url

    @property
    def goes_on(self) -> bool:
        """Whether steps are computed: the engine is not paused, and has its weights and its memory."""
        return not self.paused and self._weights.are_there

    def step(self) -> bool:
        """Do the engine's next step. Unless the engine goes on, no step begins, as if there were nothing to do."""
        if not self.goes_on:
            self._engine.drain()
            return False
        busy = self._engine.step()
        if busy:
            self._profiler.step_done()
        return busy

    def handle(self, message: ControlRequest) -> ControlResult:
        """Answer a request. Never raises: errors become answers."""
        try:
            return self._answer(message)
        except _RefusedError as refusal:
            return ControlRefused(message=str(refusal))
        except CheckpointError as error:
            return ControlRefused(message=str(error), status=400)
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            return ControlRefused(message=f"{type(error).__name__}: {error}", status=500)

    def _answer(self, message: ControlRequest) -> ControlResult:
        match message:
            case FlushCacheReq():
                return self._state(flushed=self._engine.flush_cache())
            case GetServerInfoReq():
                return ServerInfo(
                    stats=self._engine.stats(),
                    paused=self.paused,
                    profiling=self._profiler.recording,
                    device=self._device,
                    dtype=self._dtype,
                    urls=(self._url,) if self._url else (),
                )
            case PauseReq():
                return self._pause(message)
            case ContinueReq():
                return self._set_paused(False)
            case StartProfileReq():
                return self._start_profile(message)
            case StopProfileReq():
                return self._stop_profile()
            case AbortRequestsReq():
                for rid in message.rids:
                    self._engine.handle(AbortReq(rid=rid))
                return self._state()
            case LoadAdapterReq():
                return self._adapters_here().load(message.path)
            case UnloadAdapterReq():
                self._adapters_here().unload(message.digest)
                return self._state()
            case _:
                return self._weights.handle(message)

    def _adapters_here(self) -> EngineAdapters:
        if self._adapters is None:
            raise _RefusedError("this server takes no LoRA adapters (setting --enable-lora)")
        return self._adapters

    def _state(self, flushed: int = 0) -> EngineState:
        stats = self._engine.stats()
        return EngineState(
            paused=self.paused,
            num_running_reqs=stats.num_running_reqs,
            num_waiting_reqs=stats.num_waiting_reqs,
            flushed=flushed,
        )

    def _pause(self, message: PauseReq) -> EngineState:
        state = self._set_paused(True)
        if not message.retract:
            return state
        self._engine.retract_all()
        return self._state()

    def _set_paused(self, paused: bool) -> EngineState:
        if paused == self.paused:
            raise _RefusedError("generation is paused already" if paused else "generation is not paused")
        self.paused = paused
        state, what = self._state(), "is paused" if paused else "goes on"
        log.info("generation %s: %d requests running, %d waiting", what, state.num_running_reqs, state.num_waiting_reqs)
        return state

    def _start_profile(self, message: StartProfileReq) -> ProfileResult:
        if self._profiler.recording:
            raise _RefusedError(f"a profile is being recorded already ({self._profiler.steps} steps so far)")
        try:
            path = self._profiler.start(Path(message.folder), message.steps, message.activities)
        except OSError as error:
            raise _RefusedError(f"{message.folder} cannot be written to: {error} (setting --profile-dir)") from None
        except KeyError as error:
            raise _RefusedError(f"there is no {error.args[0]} here to profile") from None
        return ProfileResult(path=str(path), steps=0)

    def _stop_profile(self) -> ProfileResult:
        if not self._profiler.recording:
            raise _RefusedError("no profile is being recorded")
        return ProfileResult(path=str(self._profiler.stop()), steps=self._profiler.steps)
