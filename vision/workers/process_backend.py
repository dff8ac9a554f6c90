"""Encodes batches in worker processes, one for each device.

Pixels and rows cross in shared memory of the host. Rows from one GPU to another are copied from memory to memory
(`cuda_rows`), if a trial at the worker's start shows that this works.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait

from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncodeResult
from vision.workers.cuda_rows import CudaBorrower
from vision.workers.settings import WorkerSettings
from vision.workers.start import start_worker
from vision.workers.worker_keeper import WorkerKeeper, WorkerMain
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
        self._closed = True
        self._wake_up.close()
        atexit.unregister(self.close)

    def _deliver(self, result: EncodeResult) -> None:
        self._results.append(result)
        self._wake_up.call()
