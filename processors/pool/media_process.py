"""One media worker, and the thread that hands it one medium after the other."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from processors.pool.maker import FatalMediumError, Made
from processors.pool.messages import ANSWER_MESSAGES, WORK_MESSAGES, WorkBegun, WorkFailed, WorkOrder, WorkRefused
from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.child import ChildProcess, is_stopped_by_a_signal
from vlmserve_common.process.supervisor import EndedInOrderError, ProcessKeeper, ProcessPlan
from vlmserve_common.process.wake_up import WakeUp
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import MessageChannel, WireError


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaJob:
    """One medium and the future of its result.

    `seconds`: time limit; after it the worker is killed. `grace_s`: extra seconds for a worker that knows the limit
    too, and can refuse the medium itself.
    """

    order: WorkOrder
    seconds: float
    grace_s: float = 0.0
    made: Future[Made] = field(default_factory=Future)


class WorkerBugError(Exception):
    """A worker failed in a way that it never should. It is no EngineError: it belongs in the log, not in an answer."""


class NotBegunError(Exception):
    """The job was not begun, so another worker may take it: this one died, hung, was stopped by a signal or cannot
    start."""


class MediaProcess:
    """A worker that is kept running, and does one job after the other.

    If the worker ends, its job fails. A job that it had not begun, or during which it was stopped, raises
    NotBegunError.
    """

    def __init__(self, plan: ProcessPlan, shared: SharedArrays) -> None:
        self.useful = False
        self._lock = threading.Lock()
        self._jobs: deque[MediaJob] = deque()
        self._job: MediaJob | None = None
        self._child: ChildProcess | None = None
        self._killed = False
        self._left = False
        self._trouble = ""
        self._shared = shared
        self._wake_up = WakeUp()
        self._process = ProcessKeeper(plan, self, shared)
        self.first_start = self._process.first_start
        self.begin_close = self._process.begin_close
        self._process.start()

    @property
    def is_down(self) -> bool:
        """Whether the worker cannot be started. Jobs then fail with the reason."""
        return bool(self._trouble)

    async def make(self, job: MediaJob) -> Made:
        """Return the result of a job. Cancelling it ends it at once, and kills the process that works on it."""
        with self._lock:
            if self._trouble:
                raise EngineError(self._trouble)
            self._jobs.append(job)
        self._wake_up.call()
        try:
            return await asyncio.wrap_future(job.made)
        except asyncio.CancelledError:
            with self._lock:
                job.made.cancel()
                if self._job is job and self._child is not None:
                    self._left = self.useful = True  # it is not its fault that nothing came of it
                    self._kill(self._child)
            raise

    def close(self) -> None:
        """End the process (see `ProcessKeeper`). Its jobs fail."""
        self._process.close()
        self.ended("media processes have ended", down=True)
        self._wake_up.close()

    def begin(self, child: ChildProcess, report: dict[str, Any]) -> None:
        with self._lock:
            self._child, self._killed, self._left, self._trouble = child, False, False, ""

    def live(self, child: ChildProcess) -> None:
        """Run jobs until the process ends (see `Life`)."""
        channel = MessageChannel(
            child.pipe.send_bytes,
            child.pipe.recv_bytes,
            send_types=WORK_MESSAGES,
            receive_types=ANSWER_MESSAGES,
            shared=self._shared,
        )
        while not self._killed:
            job = self._next_job()
            if job is not None:
                self._run(job, child, channel)
            elif child.pipe in wait([child.pipe, self._wake_up.fd]):
                break  # nothing is due from it: it is gone
            else:
                self._wake_up.take()
        if self._left:
            raise EndedInOrderError(f"{child.title} was ended with a task that nobody waits for any more")
        raise EOFError

    def let_go(self) -> None:
        """Forget the process (see `Life`)."""
        with self._lock:
            self._child = None

    def ended(self, reason: str, *, down: bool) -> None:
        """Fail the waiting jobs if the process stays down (see `Life`). Otherwise they wait for the next start."""
        if down:
            with self._lock:
                self._trouble, jobs = reason, list(self._jobs)
                self._jobs.clear()
            for job in jobs:
                if job.made.set_running_or_notify_cancel():
                    job.made.set_exception(NotBegunError(reason))

    def _next_job(self) -> MediaJob | None:
        with self._lock:
            while self._jobs:
                job = self._jobs.popleft()
                if job.made.set_running_or_notify_cancel():
                    self._job = job
                    return job
        return None

    def _run(self, job: MediaJob, child: ChildProcess, channel: MessageChannel) -> None:
        future = job.made
        try:
            made = self._do(job, child, channel)
        except Exception as error:
            del job  # the error has this frame, and the future has the error: a circle
            future.set_exception(error)
        else:
            future.set_result(made)
        finally:
            with self._lock:
                self._job = None

    def _do(self, job: MediaJob, child: ChildProcess, channel: MessageChannel) -> Made:
        frames, begun = channel.encode(job.order), False
        deadline = time.monotonic() + job.seconds + job.grace_s
        try:
            channel.send(frames)
            while True:
                if not child.pipe.poll(max(0.0, deadline - time.monotonic())):
                    stopped = is_stopped_by_a_signal(child.pid)
                    self._kill(child)
                    if stopped or not begun:
                        raise NotBegunError(f"{child.title} {'was stopped' if stopped else 'does nothing'}")
                    raise _too_slow(job)
                answer = channel.receive()
                if not isinstance(answer, WorkBegun):
                    break
                begun = self.useful = True
        except (EOFError, OSError):
            self._kill(child)
            raise _death(job, child) if begun else NotBegunError(child.how_it_died()) from None
        except WireError as error:
            self._kill(child)
            raise WorkerBugError(f"{child.title} sent what cannot be used: {error}") from error
        finally:
            channel.discard(frames[:2])
        if isinstance(answer, WorkFailed):
            raise WorkerBugError(f"{child.title} failed: {answer.message}")
        if not isinstance(answer, WorkRefused):
            return answer
        if answer.out_of_memory:
            self._kill(child)
        kind = FatalMediumError if answer.out_of_memory else BadRequestError
        raise kind(answer.message, code=answer.code, status=answer.status)

    def _kill(self, child: ChildProcess) -> None:
        self._killed = True
        child.kill()


def _death(job: MediaJob, child: ChildProcess) -> BadRequestError:
    """Return the error of a job whose worker died by itself or by its limits. A worker that somebody killed blames
    nobody."""
    if child.was_ended_by(signal.SIGXCPU):
        return _too_slow(job)
    kind = BadRequestError if child.was_killed else FatalMediumError
    return kind(
        f"the {job.order.what} ended the process that decoded it ({child.how_it_died()}): it is broken, or takes more "
        "memory than there is",
        code="media_crash",
    )


def _too_slow(job: MediaJob) -> FatalMediumError:
    setting = f"--max-{job.order.modality.value}-decode-s"
    return FatalMediumError(
        f"the {job.order.what} took longer than {job.seconds:g} s, the limit (setting {setting}): the process that "
        "decoded it was ended",
        code="media_too_costly",
    )
