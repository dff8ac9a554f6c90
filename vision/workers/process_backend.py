"""Encodes batches in worker processes, one for each device.

Pixels and rows cross in shared memory of the host. Rows from one GPU to another are copied from memory to memory
(`cuda_rows`), if a trial at the worker's start shows that this works.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import replace
from typing import IO

from vision.towers.loading import OF_THE_TOWER
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncodeResult
from vision.workers.cuda_rows import CudaBorrower
from vision.workers.settings import WorkerSettings
from vision.workers.start import start_worker
from vision.workers.worker_keeper import WorkerKeeper, WorkerMain
from vlmserve_common.checkpoint.given import copied, reader_of
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.errors import EngineError
from vlmserve_common.process.wake_up import WakeUp


class ProcessBackend:
    """An `EncoderBackend` with worker processes, which start when it is made.

    A worker that dies is started again, and its batches fail. A worker that dies three times without finishing a batch
    in between is given up. A worker that takes longer than `batch_timeout_s` for a batch is ended, and counts as dead.
    `main`: a worker's main function. `borrower`: makes the object that copies rows, given the device that needs them.
    `clock`: in seconds.
    """

    takes_turns = False

    def __init__(
        self,
        settings: WorkerSettings,
        main: WorkerMain = start_worker,
        borrower: Callable[[str], CudaBorrower] = CudaBorrower,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = settings.model
        self._patience_s = settings.startup_timeout_s
        self._kept: list[tuple[IO[bytes], WeightSource]] = []
        self._results: deque[EncodeResult] = deque()
        self._wake_up = WakeUp()
        self._closed = False
        atexit.register(self.close)  # or multiprocessing would wait for the workers for ever
        self._keepers = [
            WorkerKeeper(
                f"encoder-{number}", main, settings, device, self._deliver, borrower(settings.rows_device), clock
            )
            for number, device in enumerate(settings.devices)
        ]

    def wait_ready(self) -> bytes:
        """Block until all workers are ready for the first time; return the fingerprint of their towers.

        Raises EngineError with a worker's own message if it cannot start; `close` is still needed then.
        """
        starts = [keeper.first_start for keeper in self._keepers]
        done, _ = wait(starts, return_when=FIRST_EXCEPTION)
        fingerprints = {bytes.fromhex(start.result()["fingerprint"]) for start in done}
        if len(fingerprints) > 1:
            raise EngineError(f"{self._model} changed while the encoder workers loaded it: their towers differ")
        return fingerprints.pop()

    def workers(self) -> Sequence[int]:
        """Return the usable workers. One that is being started is usable: its batches wait for it."""
        return [number for number, keeper in enumerate(self._keepers) if keeper.usable]

    def start(self, worker: int, batch: EncodeBatch) -> None:
        """Queue a batch. A thread copies its pixels. Ignored after `close`."""
        if not self._closed:
            self._keepers[worker].submit(batch)

    def cancel(self, worker: int, number: int) -> None:
        """Do nothing: a worker finishes every batch."""

    def write_tower(self, source: WeightSource) -> None:
        """Write other weights into all towers. They are kept in a file, for workers that have to start again."""
        stored = reader_of(source).tensors
        names = [name for name in stored if re.search(OF_THE_TOWER, name)]
        if not names:
            return
        file = tempfile.TemporaryFile(prefix="vlmserve-tower-")  # noqa: SIM115 -- it stays as long as this process
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"  # it has no other name, so nothing is left of it
        places = tuple(replace(place, file=path) for place in copied((stored[name] for name in names), file))
        kept = replace(source, folder=None, file=None, tensors=places)
        older = [one for one in self._kept if not {place.name for place in one[1].tensors} <= set(names)]
        self._kept = [*older, (file, kept)]
        sources = [one for _, one in self._kept]
        for change in [keeper.write_tower(kept, sources) for keeper in self._keepers]:
            change.result(self._patience_s)

    has_work = False

    def work(self, budget_s: float) -> bool:
        return False

    def collect(self) -> list[EncodeResult]:
        if self._closed:
            return []
        self._wake_up.take()
        return [self._results.popleft() for _ in range(len(self._results))]

    def wait_handles(self) -> Sequence[int]:
        return () if self._closed else (self._wake_up.fd,)

    def close(self) -> None:
        """End the workers, which takes at most 2 s. Unfinished batches give no result."""
        if self._closed:
            return
        for keeper in self._keepers:
            keeper.begin_close()
        for keeper in self._keepers:
            keeper.close()
        for file, _ in self._kept:
            file.close()
        self._closed = True
        self._wake_up.close()
        atexit.unregister(self.close)

    def _deliver(self, result: EncodeResult) -> None:
        self._results.append(result)
        self._wake_up.call()
