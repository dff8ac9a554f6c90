"""Recordings of steps by torch's profiler: a trace of one process, or of all ranks of a model in one file."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from vlmserve.executor.profile_order import ProfileOrder
from vlmserve.ipc.control_messages import Activity

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0
"""How long to wait for the traces of other ranks, once this process has written its own."""


def _activities() -> dict[str, torch.profiler.ProfilerActivity]:
    every = {"CPU": torch.profiler.ProfilerActivity.CPU}
    if torch.cuda.is_available():
        every["GPU"] = torch.profiler.ProfilerActivity.CUDA
    return every


class Recording:
    """A recording of all threads of this process, which begins at once. path: of the trace. OSError if it cannot be
    written to; KeyError for an activity that this machine does not have."""

    def __init__(self, path: Path, activities: Sequence[str]) -> None:
        self.path, available = path, _activities()
        wanted = [available[name] for name in activities or available]
        path.touch()  # what cannot be written is known now
        # A step is computed by the scheduler's thread or by the device's.
        every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = torch.profiler.profile(activities=wanted, experimental_config=every_thread)
        self._profile.start()

    def write(self) -> None:
        """End the recording and write the trace, which takes a while. OSError or RuntimeError if that fails; there is
        no file then."""
        self._profile.stop()
        # Under another name until it is whole.
        unfinished = self.path.with_name(f".{self.path.name.removesuffix('.gz')}.unfinished.gz")
        try:
            self._profile.export_chrome_trace(str(unfinished))
            unfinished.replace(self.path)
        except BaseException:
            for path in (unfinished, self.path):
                path.unlink(missing_ok=True)
            raise


class FollowingProfiler:
    """The recordings of a rank that is not the first, which orders them. What fails is logged: steps go on."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._recording: Recording | None = None

    def obey(self, order: ProfileOrder) -> None:
        """Begin a recording, or end the one that is under way and write its trace."""
        try:
            if order.path is not None:
                self._recording = None
                self._recording = Recording(_of_rank(Path(order.path), self._rank), order.activities)
            elif self._recording is not None:
                recording, self._recording = self._recording, None
                recording.write()
        except Exception as error:
            log.error("the profile of rank %d is lost: %s", self._rank, error)
            if order.path is not None:
                with contextlib.suppress(OSError):
                    _of_rank(Path(order.path), self._rank).unlink(missing_ok=True)


class Profiler:
    """One recording at a time, of this process and of the ranks that it leads. All methods are called in one thread,
    between turns.

    name: the process's, used in file names. clock: Unix time in seconds. others: ranks of this machine that write
    traces, too, which are joined to this one's. tell: gives an order to all ranks, behind the steps in flight. steps:
    of the recording that is under way, or else of the last one.
    """

    def __init__(
        self,
        name: str = "scheduler",
        *,
        clock: Callable[[], float] = time.time,
        others: Iterable[int] = (),
        tell: Callable[[ProfileOrder], object] = lambda order: None,
    ) -> None:
        self.steps = 0
        self._name = name
        self._clock = clock
        self._others, self._tell = tuple(others), tell
        self._recording: Recording | None = None
        self._most: int | None = None

    @property
    def recording(self) -> bool:
        """Whether a recording is under way."""
        return self._recording is not None

    def start(self, folder: Path, steps: int | None, activities: Sequence[Activity]) -> Path:
        """Begin a recording, and return the file that the trace will be written to. Errors of `Recording`."""
        assert self._recording is None
        path = folder / f"{self._name}-{os.getpid()}-{int(self._clock() * 1000)}.trace.json.gz"
        self._recording, self.steps, self._most = Recording(path, activities), 0, steps
        for rank in self._others:
            _of_rank(path, rank).touch()
        self._tell(ProfileOrder(path=str(path), activities=tuple(activities)))
        log.info("profiling %s into %s", "until it is stopped" if steps is None else f"{steps} steps", path)
        return path

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
        assert recording is not None
        self._tell(ProfileOrder())
        parts = {rank: _of_rank(recording.path, rank) for rank in self._others}
        try:
            recording.write()
            _await(parts.values())
            _join(recording.path, parts)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)
        log.info("profiled %d steps: %s", self.steps, recording.path)
        return recording.path


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"rank-{rank}-of-{path.name}")


def _await(parts: Iterable[Path]) -> None:
    """Wait until each trace is written, or given up and removed."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and any(part.exists() and not part.stat().st_size for part in parts):
        time.sleep(0.02)


def _join(path: Path, parts: dict[int, Path]) -> None:
    """Add the events of other ranks' traces to a trace. Ranks without one are named in the log."""
    if not parts:
        return
    whole = _load(path)
    events = whole["traceEvents"] = _named(whole["traceEvents"], 0)
    for rank, part in parts.items():
        if not part.exists() or not part.stat().st_size:
            log.warning("the profile has no steps of rank %d, which has not written them", rank)
            continue
        trace = _load(part)
        later = (trace.get("baseTimeNanoseconds", 0) - whole.get("baseTimeNanoseconds", 0)) / 1000
        for event in _named(trace["traceEvents"], rank):
            if "ts" in event:
                event["ts"] += later
            events.append(event)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with gzip.open(unfinished, "wt", compresslevel=1) as file:
        json.dump(whole, file)
    unfinished.replace(path)


def _named(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Name a trace's process by its rank, and keep its arrows apart from those of other ranks."""
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            event["args"]["name"] = f"rank {rank}: {event['args']['name']}"
        if "id" in event:
            event["id"] = f"{rank}/{event['id']}"
    return events


def _load(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        trace: dict[str, Any] = json.load(file)
        return trace
