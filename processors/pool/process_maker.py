"""Media in worker processes: a file that crashes a decoder, or never lets go of it, harms its own request only.

Whoever has a medium borrows a worker, hands it the bytes and waits; patches come back in shared memory. One thread for
each worker starts it, sees its end, and starts another one. An end is handled in this order: whoever borrowed the
worker gives it back, it is reaped, its blocks of shared memory are freed, and the next one is started.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from processors.families.base import MultimodalProcessor, ProcessedImage
from processors.knobs import ImageKnobs
from processors.pool.maker import FatalMediumError, closing_error
from processors.pool.messages import (
    ANSWER_MESSAGES,
    WORK_MESSAGES,
    ClipWork,
    FramesWork,
    MediaWork,
    PictureWork,
    WorkBegun,
    WorkFailed,
    WorkRefused,
)
from processors.pool.worker_start import MediaWorkerSettings, start_worker
from processors.video.clips import ProcessedVideo
from processors.video.options import VideoKnobs
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.stop_signals import stop_signals_held
from vlmserve_common.process.wake_up import WakeUp
from vlmserve_common.transport.channel import MessageChannel
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import WireError

logger = logging.getLogger(__name__)

WorkerMain: TypeAlias = Callable[[Parent, MediaWorkerSettings], None]
"""A worker's work; see `processors.pool.worker_start`."""

_Processed = TypeVar("_Processed", ProcessedImage, ProcessedVideo)
_MAX_TRIES = 3
_LONGEST_PAUSE_S = 30.0
_MANY = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimit:
    """Seconds that a worker may be at one medium, then it is killed; setting: what to say moves that.

    grace_s: more seconds for a worker that knows the limit, too, to refuse the medium by itself.
    """

    seconds: float
    setting: str
    grace_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    """count: worker processes. shared_dir: an existing private directory for `SharedArrays`, on tmpfs.

    picture_time, video_time: for one of these; a list of frames is a video.
    startup_timeout_s: for a worker's start. first_pause_s: between a start that failed and the next one; it doubles.
    """

    count: int
    shared_dir: Path
    picture_time: TimeLimit = TimeLimit(seconds=30.0, setting="--max-image-decode-s")
    video_time: TimeLimit = TimeLimit(seconds=300.0, setting="--max-video-decode-s", grace_s=30.0)
    startup_timeout_s: float = 120.0
    first_pause_s: float = 1.0
    log_level: str = "info"


class ProcessMaker:
    """See `MediaMaker`. Its workers start when it is made; one that dies is replaced. The medium that it had in work
    fails with a `FatalMediumError`, others wait. Close it when done.

    main: what a worker runs.
    """

    def __init__(
        self, processor: MultimodalProcessor, settings: ProcessSettings, main: WorkerMain = start_worker
    ) -> None:
        self._settings = settings
        self._main = main
        plain = pickle.dumps((type(processor), processor.config, processor.limits))
        self._worker_settings = MediaWorkerSettings(processor=plain, shared_dir=settings.shared_dir)
        self._shared = SharedArrays(settings.shared_dir, mapped=True)
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._started: set[int] = set()  # numbers of workers that have been ready once
        self._troubles: dict[int, str] = {}  # why the last start failed, by number
        self._closing = False
        self._wake_up = WakeUp()
        atexit.register(self.close)  # or multiprocessing would wait for the workers for ever
        self._threads = [
            threading.Thread(target=self._keep, args=(number,), name=f"media-keeper-{number}", daemon=True)
            for number in range(settings.count)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Block until all workers are ready for the first time. EngineError if one cannot start; still to be closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._troubles or len(self._started) == self._settings.count
            )
            for trouble in self._troubles.values():
                raise EngineError(trouble)

    def picture(self, data: bytes, knobs: ImageKnobs) -> ProcessedImage:
        """See `MediaMaker`."""
        return self._make(PictureWork(data=_array(data), knobs=knobs), "picture", ProcessedImage)

    def clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        """See `MediaMaker`."""
        return self._make(ClipWork(data=_array(data), knobs=knobs), "video", ProcessedVideo)

    def frames(self, files: Sequence[bytes], knobs: VideoKnobs) -> ProcessedVideo:
        """See `MediaMaker`."""
        work = FramesWork(data=_array(b"".join(files)), sizes=tuple(map(len, files)), knobs=knobs)
        return self._make(work, "video", ProcessedVideo)

    def close(self) -> None:
        """End the workers, whatever they do, by force after 2 s. Work under way fails with status 503."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._wake_up.call()
        for thread in self._threads:
            thread.join()
        self._wake_up.close()
        atexit.unregister(self.close)

    def _make(self, work: MediaWork, what: str, kind: type[_Processed]) -> _Processed:
        limit = self._settings.picture_time if isinstance(work, PictureWork) else self._settings.video_time
        for _ in range(_MAX_TRIES):
            worker = self._borrow()
            try:
                made = worker.make(work, what, limit)
            except _NotBegunError as error:  # it died of something else, such as a signal while it was idle
                reason = str(error)
            except BadRequestError:
                if self._closing:
                    raise closing_error() from None
                raise
            else:
                if not isinstance(made, kind):
                    raise WorkerBugError(f"{worker.child.title} made a {type(made).__name__} of a {what}")
                made.feature.flags.writeable = False
                return made
            finally:
                self._give_back(worker)
        raise EngineError(f"no media worker takes the {what}: {reason}")

    def _borrow(self) -> _Worker:
        """A worker that waits for work; blocks until there is one."""

        def settled() -> bool:
            return bool(self._closing or self._idle or len(self._troubles) == self._settings.count)

        with self._changed:
            self._changed.wait_for(settled)
            if self._closing:
                raise closing_error()
            if not self._idle:
                raise EngineError(next(iter(self._troubles.values())))
            worker = self._idle.pop()
            worker.borrowed = True
            return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._changed:
            worker.borrowed = False
            if not worker.broken:
                self._idle.append(worker)
            self._changed.notify_all()

    def _keep(self, number: int) -> None:
        """One worker after the other."""
        pause_s, idle_deaths = self._settings.first_pause_s, 0
        while not self._closing:
            try:
                idle_deaths = 0 if self._live(number) else idle_deaths + 1
                if idle_deaths < _MANY:  # a few may be accidents
                    pause_s = self._settings.first_pause_s
                    continue
                trouble, expected = f"media worker {number} died {idle_deaths} times before it had done anything", True
            except Exception as error:
                expected = isinstance(error, EngineError)
                trouble = str(error) if expected else f"media worker {number} cannot be started; the log has the reason"
                if not expected:
                    logger.exception("a media worker cannot be started")
            with self._changed:
                if self._closing:
                    return
                self._troubles[number] = trouble
                self._changed.notify_all()
                logger.error("%s: the next try in %g s", trouble, pause_s)
                self._changed.wait_for(lambda: self._closing, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _live(self, number: int) -> bool:
        """One life of a worker, of which nothing is left: whether it was of any use. EngineError if it does not get
        ready."""
        with stop_signals_held():
            child = ChildProcess(
                f"media-{number}",
                self._main,
                (self._worker_settings,),
                title=f"media worker {number}",
                log_level=self._settings.log_level,
            )
        worker = _Worker(child, self._shared)
        try:
            self._await_start(child)
            with self._changed:
                self._troubles.pop(number, None)
                self._started.add(number)
                self._idle.append(worker)
                self._changed.notify_all()
            wait([child.sentinel, self._wake_up.fd])
            child.hang_up()
            with self._changed:
                worker.broken = True
                if worker in self._idle:
                    self._idle.remove(worker)
                self._changed.wait_for(lambda: not worker.borrowed)
            if not self._closing:
                logger.warning("%s: another one is started", child.how_it_died())
            return worker.used
        finally:
            child.stop()
            self._shared.discard_of(child.pid)

    def _await_start(self, child: ChildProcess) -> None:
        patience_s = self._settings.startup_timeout_s
        ready = wait([child.pipe, self._wake_up.fd], patience_s)
        if child.pipe not in ready:
            raise EngineError(f"{child.title} is not ready after {patience_s:g} s; --startup-timeout-s allows more")
        child.take_report()


class WorkerBugError(Exception):
    """A worker failed as it never should. Like any exception that nobody expects in a thread: for the log, not for
    clients, and so no EngineError."""


class _NotBegunError(Exception):
    """A worker died before it looked at its work."""


class _Worker:
    """A process that is ready. One thread at a time may use it."""

    def __init__(self, child: ChildProcess, shared: SharedArrays) -> None:
        self.child = child
        self.borrowed = False
        self.broken = False
        self.used = False
        self._channel = MessageChannel(
            child.pipe.send_bytes,
            child.pipe.recv_bytes,
            send_types=WORK_MESSAGES,
            receive_types=ANSWER_MESSAGES,
            shared=shared,
        )

    def make(self, work: MediaWork, what: str, limit: TimeLimit) -> object:
        """What becomes of a medium. `what` errors call it."""
        frames = self._channel.encode(work)
        begun = False
        deadline = time.monotonic() + limit.seconds + limit.grace_s
        try:
            self._channel.send(frames)
            while True:
                if not self.child.pipe.poll(max(0.0, deadline - time.monotonic())):
                    self._kill()
                    raise _too_slow(what, limit)
                answer = self._channel.receive()
                if not isinstance(answer, WorkBegun):
                    break
                begun = self.used = True
        except (EOFError, OSError):
            self._kill()
            reason = self.child.how_it_died()
            if not begun:
                raise _NotBegunError(reason) from None
            raise _crashed(what, reason, by_itself=not self.child.was_killed) from None
        except WireError as error:
            self._kill()
            raise WorkerBugError(f"{self.child.title} sent what cannot be used: {error}") from error
        finally:
            self._channel.discard(frames[:2])
        if isinstance(answer, WorkRefused):
            raise BadRequestError(answer.message, code=answer.code, status=answer.status)
        if isinstance(answer, WorkFailed):
            raise WorkerBugError(f"{self.child.title} failed: {answer.message}")
        return answer

    def _kill(self) -> None:
        self.broken = True
        self.child.kill()


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _crashed(what: str, reason: str, *, by_itself: bool) -> BadRequestError:
    error = FatalMediumError if by_itself else BadRequestError  # who is killed may have been in somebody's way
    return error(
        f"the {what} ended the process that decoded it ({reason}): it is broken, or takes more memory than there is",
        code="media_crash",
    )


def _too_slow(what: str, limit: TimeLimit) -> BadRequestError:
    return BadRequestError(
        f"the {what} took longer than {limit.seconds:g} s, the limit (setting {limit.setting}): the process that "
        "decoded it was ended",
        code="media_too_costly",
    )
