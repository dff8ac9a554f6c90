"""Processes media in worker processes: a file that crashes or hangs a decoder harms only its own request."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from processors.families.base import MultimodalProcessor, modality_of
from processors.inputs import Modality
from processors.pool import prepare_processes
from processors.pool.maker import Made, MediaWork, closing_error
from processors.pool.media_process import MediaJob, MediaProcess, NotBegunError, WorkerBugError
from processors.pool.media_worker import MediaWorkerSettings, run_worker
from processors.pool.messages import WorkOrder
from processors.pool.turns import BYTES_PER_S, Turns
from processors.processed import ProcessedMedium, features_of
from processors.video.adaptive import FirstLook
from vlmserve_common.errors import EngineError
from vlmserve_common.process.child import Parent
from vlmserve_common.process.supervisor import ProcessPlan
from vlmserve_common.transport.shm import SharedArrays

WorkerMain: TypeAlias = Callable[[Parent, MediaWorkerSettings], None]
"""The main function of a worker; see `processors.pool.media_worker`."""

_MAX_TRIES = 3
_MOST_DEATHS = 4
_RECOVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    """Settings of the worker processes.

    `count`: worker processes. `shared_dir`: an existing private directory for `SharedArrays`, on tmpfs. `picture_s`,
    `video_s`, `audio_s`: seconds to decode one; a list of frames is a video. `video_grace_s`: see `MediaJob`.
    `startup_timeout_s`: for a worker's start. `first_pause_s`: see `ProcessPlan`.
    """

    count: int
    shared_dir: Path
    picture_s: float = 10.0
    video_s: float = 300.0
    audio_s: float = 60.0
    video_grace_s: float = 30.0
    startup_timeout_s: float = 120.0
    first_pause_s: float = 1.0
    log_level: str = "info"


class ProcessMaker:
    """A `MediaMaker` with worker processes, for one event loop. Close it when done. `main`: a worker's main function.

    Its workers start when it is made, and a worker that dies is replaced. The medium it was decoding fails with a
    `FatalMediumError`; other media wait.
    """

    def __init__(
        self, processor: MultimodalProcessor, settings: ProcessSettings, main: WorkerMain = run_worker
    ) -> None:
        self._settings = settings
        self._turns = Turns(settings.count, cost_per_s=BYTES_PER_S)
        self._closing = False
        shared = SharedArrays(settings.shared_dir, mapped=True)
        worker = MediaWorkerSettings(
            processor=type(processor),
            config=processor.config,
            limits=processor.limits,
            shared_dir=settings.shared_dir,
            picture_cpu_s=settings.picture_s,
            video_cpu_s=(settings.video_s + settings.video_grace_s) * processor.limits.video.decode_threads,
            audio_cpu_s=settings.audio_s + settings.video_grace_s,
        )
        prepare_processes()
        atexit.register(self.close_now)  # or multiprocessing would wait for the workers for ever
        self._workers = [
            MediaProcess(
                ProcessPlan(
                    name=f"media-{number}",
                    title=f"media worker {number}",
                    main=main,
                    args=(worker,),
                    log_level=settings.log_level,
                    startup_timeout_s=settings.startup_timeout_s,
                    forked=True,
                    most_deaths=_MOST_DEATHS,
                    first_pause_s=settings.first_pause_s,
                ),
                shared,
            )
            for number in range(settings.count)
        ]
        self._idle = list(self._workers)
        self._freed = asyncio.Event()

    def wait_ready(self) -> None:
        """Block until all workers are ready for the first time. Raises EngineError if one cannot start; `close` is
        still needed."""
        done, _ = wait([worker.first_start for worker in self._workers], return_when=FIRST_EXCEPTION)
        for start in done:
            start.result()

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """End the workers, by force after 2 s. Work under way fails with status 503."""
        if self._closing:
            return
        self._closing = True
        for worker in self._workers:
            worker.begin_close()
        for worker in self._workers:
            worker.close()
        atexit.unregister(self.close_now)

    async def make(self, work: MediaWork, *, client: str = "") -> ProcessedMedium:
        order = WorkOrder.of(work)
        made = await self._done(order, work, client)
        if isinstance(made, FirstLook) or modality_of(made) is not order.modality:
            raise WorkerBugError(f"a worker made a {type(made).__name__} of a {order.what}")
        for feature in features_of(made):
            feature.flags.writeable = False
        return made

    async def look(self, work: MediaWork, *, client: str = "") -> FirstLook:
        found = await self._done(WorkOrder.of(work, looks=True), work, client)
        if not isinstance(found, FirstLook):
            raise WorkerBugError(f"a worker made a {type(found).__name__} of a look at a video")
        return found

    async def _done(self, order: WorkOrder, work: MediaWork, client: str) -> Made:
        given = self._settings
        limits = {Modality.IMAGE: given.picture_s, Modality.VIDEO: given.video_s, Modality.AUDIO: given.audio_s}
        seconds, grace_s = limits[order.modality], given.video_grace_s if work.is_clip else 0.0
        async with self._turns.turn(cost=work.cost, clip=work.is_clip, client=client):
            for _ in range(_MAX_TRIES):
                worker = await self._take_worker()
                job = MediaJob(order=order, seconds=seconds, grace_s=grace_s)
                try:
                    return await worker.make(job)
                except NotBegunError as error:  # something else was in its way, such as a signal
                    reason = str(error)
                except Exception:
                    if self._closing:
                        raise closing_error() from None
                    raise
                finally:
                    self._idle.append(worker)
                    self._freed.set()
            raise (
                closing_error() if self._closing else EngineError(f"no media worker takes the {order.what}: {reason}")
            )

    async def _take_worker(self) -> MediaProcess:
        """Take an idle worker; there is one for each turn. A worker that is down is taken only if all are: it gives the
        reason."""
        while True:
            worker = min(self._idle, key=lambda one: one.is_down)
            if not worker.is_down or all(one.is_down for one in self._workers):
                self._idle.remove(worker)
                return worker
            self._freed.clear()
            with suppress(TimeoutError):  # one that is down may be up again
                await asyncio.wait_for(self._freed.wait(), _RECOVERY_S)
