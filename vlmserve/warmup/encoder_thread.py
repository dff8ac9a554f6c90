"""An encoder pool at work in a thread of its own, for callers that wait for their media."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait

import torch

from processors.inputs import MultimodalDataItem
from vision.encoder_pool import EncoderPool
from vlmserve.encoder_warmups import EncoderWarmups
from vlmserve.messages import EncodeOutput, EncodeReqInput
from vlmserve_common.errors import EngineError
from vlmserve_common.process.wake_up import WakeUp

logger = logging.getLogger(__name__)


class EncoderThread:
    """Owns the pool from now on. max_patches: see `EncoderWarmups`. num_threads: CPU threads of the tower."""

    def __init__(self, pool: EncoderPool, *, max_patches: int, num_threads: int) -> None:
        self._pool = pool
        self._warmups = EncoderWarmups(pool, send=self._answer, max_patches=max_patches)
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[tuple[EncodeReqInput, Future[EncodeOutput]]] = queue.SimpleQueue()
        self._futures: dict[str, Future[EncodeOutput]] = {}
        self._count = 0
        self._stopping = False
        self._wake_up = WakeUp()
        self._thread = threading.Thread(target=self._run, name="encoder")
        self._thread.start()

    def encode(self, items: Sequence[MultimodalDataItem], *, pin: bool) -> Future[EncodeOutput]:
        """The answer to come. Not from several threads at once."""
        self._count += 1
        future: Future[EncodeOutput] = Future()
        self._inbox.put((EncodeReqInput(rid=str(self._count), items=tuple(items), pin=pin), future))
        self._wake_up.call()
        return future

    def close(self) -> None:
        """End after the batch in work; what is encoded by then is written. Futures that are not done never will be."""
        self._stopping = True
        self._wake_up.call()
        self._thread.join()
        self._wake_up.close()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # each thread has its own
        try:
            while not self._stopping:
                self._step()
        except Exception as error:
            logger.exception("the encoder failed")
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._pool.close()

    def _step(self) -> None:
        self._take_messages()
        changed = self._pool.advance()
        changed |= self._warmups.advance(order=0)
        if not changed:
            self._wait(self._pool.wait_handles())

    def _wait(self, handles: Sequence[int]) -> None:
        if not self._stopping:  # its wake-up may have been taken with those of messages
            wait([self._wake_up.fd, *handles])

    def _take_messages(self) -> None:
        self._wake_up.take()
        with contextlib.suppress(queue.Empty):
            while True:
                message, future = self._inbox.get_nowait()
                self._futures[message.rid] = future
                self._warmups.add(message)

    def _answer(self, output: EncodeOutput) -> None:
        future = self._futures.pop(output.rid)
        if future.set_running_or_notify_cancel():
            future.set_result(output)

    def _fail(self, why: str) -> None:
        """Answer whatever comes from now on."""
        while not self._stopping:
            self._take_messages()
            for future in self._futures.values():
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineError(f"the encoder has failed: {why}"))
            self._futures.clear()
            self._wait(())
