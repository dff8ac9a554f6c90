"""Operators' requests to a running engine: pause it, flush its cache, profile it, end requests, describe it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, assert_never

import torch

from vlmserve.engine.loop import EventLoop
from vlmserve.ipc.control_messages import (
    AbortRequestsReq,
    Activity,
    ContinueReq,
    ControlRefused,
    ControlRequest,
    ControlResult,
    EngineState,
    FlushCacheReq,
    GetServerInfoReq,
    PauseReq,
    ProfileResult,
    ServerInfo,
    StartProfileReq,
    StopProfileReq,
)
from vlmserve.ipc.messages import AbortReq

log = logging.getLogger(__name__)


class Profiler:
    """One recording at a time, of all threads of the process. All methods are called in one thread, between turns.

    name: the process's, used in file names. clock: Unix time in seconds. steps: of the recording that is under way, or
    else of the last one.
    """

    def __init__(self, name: str = "scheduler", *, clock: Callable[[], float] = time.time) -> None:
        self.steps = 0
        self._name = name
        self._clock = clock
        self._recording: Any = None
        self._path = Path()
        self._most: int | None = None

    @property
    def recording(self) -> bool:
        """Whether a recording is under way."""
        return self._recording is not None

    def start(self, folder: Path, steps: int | None, activities: Sequence[Activity]) -> Path:
        """Begin a recording, and return the file that the trace will be written to. OSError if the folder cannot be
        written to; KeyError for an activity that this machine does not have."""
        assert self._recording is None
        self._path = folder / f"{self._name}-{os.getpid()}-{int(self._clock() * 1000)}.trace.json.gz"
        available = {"CPU": torch.profiler.ProfilerActivity.CPU}
        if torch.cuda.is_available():
            available["GPU"] = torch.profiler.ProfilerActivity.CUDA
        wanted = [available[name] for name in activities or available]
        self._path.touch()  # what cannot be written is known now
        # A step is computed by the scheduler's thread or by the device's.
        every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        recording = torch.profiler.profile(activities=wanted, experimental_config=every_thread)
        recording.start()
        self._recording, self.steps, self._most = recording, 0, steps
        log.info("profiling %s into %s", "until it is stopped" if steps is None else f"{steps} steps", self._path)
        return self._path

    def step_done(self) -> None:
        """Count a computed step. The last one wanted ends the recording."""
        if self._recording is None:
            return
        self.steps += 1
        if self._most is not None and self.steps >= self._most:
            try:
                self.stop()
            except Exception as error:  # a full disk: the requests have nothing to do with it
                log.error("the profile of %d steps is lost: %s", self.steps, error)

    def stop(self) -> Path:
        """End the recording and write the trace, which takes a while. OSError or RuntimeError if that fails."""
        recording, self._recording = self._recording, None
        recording.stop()
        # Under another name until it is whole.
        unfinished = self._path.with_name(f".{self._path.name.removesuffix('.gz')}.unfinished.gz")
        try:
            recording.export_chrome_trace(str(unfinished))
            unfinished.replace(self._path)
        except BaseException:
            for path in (unfinished, self._path):
                path.unlink(missing_ok=True)
            raise
        log.info("profiled %d steps: %s", self.steps, self._path)
        return self._path


class _RefusedError(Exception):
    """Becomes a `ControlRefused`."""


class EngineControl:
    """Answers operators' requests, and pauses the engine. Call `step` in place of the engine's own, and `handle`
    between steps, in the same thread.

    device, dtype: the model's, for `ServerInfo`. url: where other servers reach this engine.
    """

    def __init__(self, engine: EventLoop, profiler: Profiler, *, device: str, dtype: str, url: str = "") -> None:
        self.paused = False
        self._engine = engine
        self._profiler = profiler
        self._device, self._dtype, self._url = device, dtype, url

    def step(self) -> bool:
        """Do the engine's next step. While the engine is paused no step begins, as if there were nothing to do."""
        if self.paused:
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
                return self._set_paused(True)
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
        assert_never(message)

    def _state(self, flushed: int = 0) -> EngineState:
        stats = self._engine.stats()
        return EngineState(
            paused=self.paused,
            num_running_reqs=stats.num_running_reqs,
            num_waiting_reqs=stats.num_waiting_reqs,
            flushed=flushed,
        )

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
