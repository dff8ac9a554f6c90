"""Keeps one encoder worker running, hands it its batches and takes its results.

There are three threads, so that submitting a batch never waits. The keeper's thread reads from the process. While the
process lives, a second thread packs batches and writes to it, and a third shuts the pipe when a batch takes too long. A
shut pipe is handled like a death, in this order: the writer ends, the process is reaped, its blocks of shared memory
and those on the way to it are freed, its batches fail, and only then it is started again. Rows that it lent from its
GPU's memory are copied in the reading thread. They count only if the worker was alive at the end of the copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncodeResult, attempt
from vision.workers.cuda_rows import CudaBorrower, try_out
from vision.workers.encoder_messages import (
    EncodeDone,
    RowsAnswer,
    RowsOffer,
    RowsTaken,
    TowerChange,
    TowerChanged,
    encoder_channel,
)
from vision.workers.start import WorkerSettings
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.compute.tensors import from_array
from vlmserve_common.errors import EngineError
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.supervisor import ProcessKeeper, ProcessPlan
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import Frame, MessageChannel

logger = logging.getLogger(__name__)

WorkerMain: TypeAlias = Callable[[Parent, WorkerSettings, str], None]
"""A worker's main function; see `vision.workers.start`."""


class WorkerKeeper:
    """One worker and its batches. It does not start again with another tower than the first one.

    `deliver`: takes every result, in a thread of this object; must not block. `borrower`: copies rows that the worker
    lends. `clock`: in seconds.
    """

    def __init__(
        self,
        name: str,
        main: WorkerMain,
        settings: WorkerSettings,
        device: str,
        deliver: Callable[[EncodeResult], None],
        borrower: CudaBorrower,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.useful = False
        self._name = name
        self._title = f"the encoder worker on {device}"
        self._settings = settings
        self._may_lend = settings.may_lend(device)
        self._deliver = deliver
        self._borrower = borrower
        self._clock = clock
        self._shared = SharedArrays(settings.shared_dir)
        self._changed = threading.Condition()
        self._unsent: deque[EncodeBatch] = deque()
        self._sent: dict[int, Sequence[Frame]] = {}  # in order: number -> frames, to discard the message
        self._taken: deque[int] = deque()  # batches whose rows the worker need not keep, which it is still to be told
        self._unwritten: deque[WeightSource] = deque()
        self._unanswered = 0  # of the weights that were sent
        self._kept: tuple[WeightSource, ...] = ()
        self._change: Future[None] | None = None
        self._turn_began_s = 0.0  # when the first of the batches that the worker owes had its turn
        self._overdue = ""
        self._child: ChildProcess | None = None
        self._helpers: list[threading.Thread] = []
        self._given_up = ""
        plan = ProcessPlan(
            name=name,
            title=self._title,
            main=main,
            args=(settings, device),
            log_level=settings.log_level,
            startup_timeout_s=settings.startup_timeout_s,
            ready_by=settings.ready_by,
        )
        self._process = ProcessKeeper(plan, self, self._shared, clock)
        self.first_start = self._process.first_start
        self._process.start()

    @property
    def usable(self) -> bool:
        """Whether the worker runs or is being started."""
        return not self._given_up

    def submit(self, batch: EncodeBatch) -> None:
        """Queue a batch for the worker. It fails at once if the worker was given up, and is forgotten after `close`."""
        with self._changed:
            if not self._given_up:
                if not self._sent and not self._unsent:
                    self._turn_began_s = self._clock()
                self._unsent.append(batch)
                self._changed.notify_all()
                return
        self._deliver(EncodeResult(number=batch.number, embeds=None, error=self._given_up, untried=True))

    def write_tower(self, source: WeightSource, kept: Sequence[WeightSource]) -> Future[None]:
        """Write other weights into the worker's tower, behind its batches. `kept`: what a worker that starts again has
        to write, one after the other."""
        with self._changed:
            self._kept, self._change = tuple(kept), Future()
            if self._given_up:
                self._change.set_exception(EngineError(self._given_up))
            elif self._child is not None:  # otherwise it will begin with all of them
                self._unwritten.append(source)
                self._changed.notify_all()
            return self._change

    def begin_close(self) -> None:
        self._process.begin_close()

    def close(self) -> None:
        """End the worker (see `ProcessKeeper`)."""
        self._process.close()

    def begin(self, child: ChildProcess, report: dict[str, Any]) -> None:
        """Open the channel to a new process (see `Life`)."""
        first = self.first_start
        if first.done() and first.exception() is None and first.result() != report:
            raise EngineError(f"{self._title} found other weights or settings in {self._settings.model} than before")
        self._channel = encoder_channel(child.pipe.send_bytes, child.pipe.recv_bytes, self._shared)
        with self._changed:
            self._child, self._overdue, self._turn_began_s = child, "", self._clock()
            self._unwritten, self._unanswered = deque(self._kept), 0

    def live(self, child: ChildProcess) -> None:
        """Take results until the process ends (see `Life`)."""
        self._help("watch", self._watch, child)
        try:
            if self._may_lend:
                self._agree_on_lending(self._channel)
            self._help("send", self._write, child, self._channel)
            while True:
                self._take(self._channel.receive(), child)
        except (EOFError, OSError):
            if self._overdue:
                raise EngineError(self._overdue) from None
            raise

    def let_go(self) -> None:
        """End the helper threads (see `Life`)."""
        with self._changed:
            self._child = None
            self._taken.clear()
            self._changed.notify_all()
        while self._helpers:
            self._helpers.pop().join()

    def ended(self, reason: str, *, down: bool) -> None:
        """Fail the batches (see `Life`). Only the first batch that the worker still owes can have ended it."""
        self._borrower.worker_gone()
        with self._changed:
            sent, unsent = dict(self._sent), [batch.number for batch in self._unsent]
            self._sent.clear()
            self._unsent.clear()
            if down:
                self._given_up = reason
            change, self._change = self._change, None
        if change is not None:
            change.set_exception(EngineError(reason))
        for frames in sent.values():
            self._channel.discard(frames)
        first = next(iter(sent), None)
        for number in (*sent, *unsent):
            self._deliver(EncodeResult(number=number, embeds=None, error=reason, untried=number != first))

    def _help(self, what: str, run: Callable[..., None], *args: object) -> None:
        """Run a function in a thread that ends when the process is let go."""
        helper = threading.Thread(target=run, args=args, name=f"{self._name}-{what}", daemon=True)
        self._helpers.append(helper)
        helper.start()

    def _agree_on_lending(self, channel: MessageChannel) -> None:
        """Try whether rows can be copied out of the worker's GPU memory, and tell it to lend them or not."""
        offer: RowsOffer = channel.receive()
        error, trial = offer.error, offer.trial
        if trial is not None:
            _, error = attempt(lambda: try_out(self._borrower, trial))
        channel.send(channel.encode(RowsAnswer(lend=not error)))
        if error:
            logger.warning("rows of %s come through the host's memory: no CUDA IPC: %s", self._title, error)
        else:
            logger.info("rows of %s come by CUDA IPC", self._title)

    def _take(self, done: EncodeDone | TowerChanged, child: ChildProcess) -> None:
        if isinstance(done, TowerChanged):
            self._take_change(done)
            return
        embeds, error, lent, untried = None, done.error, done.lent, False
        if lent is not None:
            embeds, error = attempt(lambda: self._borrower.copy(lent))
            if not child.alive:  # its memory may have gone before the copy ended
                embeds, error, untried = None, f"{self._title} died before its rows were copied", True
            with self._changed:
                self._taken.append(done.number)
                self._changed.notify_all()
        elif not error:
            embeds = tuple(from_array(array, done.dtype) for array in done.rows)
        with self._changed:
            del self._sent[done.number]
            self._turn_began_s = self._clock()
        self.useful |= not untried
        self._deliver(EncodeResult(number=done.number, embeds=embeds, error=error, untried=untried))

    def _take_change(self, done: TowerChanged) -> None:
        if done.error:
            raise EngineError(f"{self._title} has no whole tower any more: {done.error}")
        with self._changed:
            self._unanswered -= 1
            if self._unwritten or self._unanswered:
                return
            change, self._change = self._change, None
        if change is not None:
            change.set_result(None)

    def _watch(self, child: ChildProcess) -> None:
        """End a child that does not finish a batch in time: it may hang without dying."""
        limit_s = self._settings.batch_timeout_s
        with self._changed:
            while self._child is child:
                left_s = self._turn_began_s + limit_s - self._clock() if self._sent or self._unsent else limit_s
                if left_s <= 0:
                    self._overdue = f"{self._title} was not done with a batch after {limit_s:g} s"
                    self._overdue += "; --encoder-timeout-s allows more"
                    child.hang_up()
                    return
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def _write(self, child: ChildProcess, channel: MessageChannel) -> None:
        """Send batches to a child until it is gone."""
        with contextlib.suppress(OSError):  # the reading thread sees its end, too
            while self._write_next(child, channel):
                pass

    def _write_next(self, child: ChildProcess, channel: MessageChannel) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._taken or self._unwritten or self._unsent or self._child is not child)
            if self._child is not child:
                return False
            change = self._unwritten.popleft() if self._unwritten else None
            self._unanswered += change is not None
            taken = self._taken.popleft() if change is None and self._taken else None
            if change is None and taken is None:
                batch = self._unsent.popleft()
                self._sent[batch.number] = ()
        if change is not None:
            channel.send(channel.encode(TowerChange(source=change)))
            return True
        if taken is not None:
            channel.send(channel.encode(RowsTaken(number=taken)))
            return True
        frames, error = attempt(lambda: channel.encode(batch))
        if frames is None:
            with self._changed:
                del self._sent[batch.number]
            self._deliver(EncodeResult(number=batch.number, embeds=None, error=error))
        else:
            self._sent[batch.number] = frames[:2]
            channel.send(frames)
        return True
