"""Records steps with torch's profiler, as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vlmserve.ipc.control_messages import Activity

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
