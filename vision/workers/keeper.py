"""Keeps one encoder worker running: starts it, hands it its batches, takes its results, starts it again when it dies.

Three threads, so that whoever submits a batch never waits: one starts the process and reads from it; while it lives,
another packs batches and writes to it, and a third shuts the pipe when it is too long over a batch. That is handled as
a death is, in this order: the pipe is shut, the writer ends, the process is reaped, its blocks of shared memory and
those on the way to it are freed, its batches fail, and only then is it started again. Rows that it lent from its GPU's
memory are copied in the reading thread, and count if it was alive at the end of that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

from vision.workers.backend import EncodeBatch, EncodeResult, attempt
from vision.workers.channel import (
    EncodeDone,
    EncodeWork,
    MessageChannel,
    RowsAnswer,
    RowsOffer,
    RowsTaken,
)
from vision.workers.cuda_rows import RowsBorrower, try_out
from vision.workers.settings import WorkerSettings
from vlmserve_common.compute.tensors import from_array
from vlmserve_common.errors import EngineError
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.stop_signals import stop_signals_held
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import Frame

logger = logging.getLogger(__name__)

WorkerMain: TypeAlias = Callable[[Parent, WorkerSettings, str], None]
"""A worker's work; see `vision.workers.start`."""

_MAX_DEATHS = 3


class WorkerKeeper:
    """One worker and its batches. deliver: takes every result, in a thread of this object's; must not block. borrower:
    copies what it lends, if it does. clock: in seconds.

    first_start: the fingerprint of the worker's tower (`towers.fingerprint`), once it is ready for the first time;
    an EngineError that says why if it cannot start. With another tower than at first, it does not start again.
    """

    def __init__(
        self,
        name: str,
        main: WorkerMain,
        settings: WorkerSettings,
        device: str,
        deliver: Callable[[EncodeResult], None],
        borrower: RowsBorrower,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first_start: Future[bytes] = Future()
        self._name = name
        self._title = f"the encoder worker on {device}"
        self._main = main
        self._settings = settings
        self._device = device
        self._deliver = deliver
        self._borrower = borrower
        self._clock = clock
        self._shared = SharedArrays(settings.shared_dir)
        self._changed = threading.Condition()
        self._unsent: deque[EncodeBatch] = deque()
        self._sent: dict[int, Sequence[Frame]] = {}  # in order: number -> what is needed to discard the message
        self._taken: deque[int] = deque()  # batches whose rows the worker need not keep, which it is still to be told
        self._turn_began_s = 0.0  # when the first of the batches that the worker owes had its turn
        self._overdue = ""
        self._child: ChildProcess | None = None
        self._given_up = ""
        self._closing = False
        self._finished_any = False
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether the worker runs or is being started."""
        return not self._given_up

    def submit(self, batch: EncodeBatch) -> None:
        """Queue a batch for the worker. It fails at once if the worker was given up; it is forgotten after `close`."""
        with self._changed:
            if not self._given_up:
                if not self._sent and not self._unsent:
                    self._turn_began_s = self._clock()
                self._unsent.append(batch)
                self._changed.notify_all()
                return
        self._deliver(EncodeResult(number=batch.number, embeds=None, error=self._given_up, untried=True))

    def begin_close(self) -> None:
        """Tell the worker to end."""
        with self._changed:
            self._closing = True
            if self._child is not None:
                self._child.hang_up()
            self._changed.notify_all()

    def close(self) -> None:
        """End the worker, by force if it does not of itself in `STOP_PATIENCE_S`. May be called again."""
        self.begin_close()
        self._thread.join()

    def _keep(self) -> None:
        deaths = 0
        while not self._given_up:
            self._finished_any = False
            try:
                reason = self._run_once()
            except Exception as error:
                logger.exception("%s fails", self._title)
                reason = f"{self._title} cannot be started: {type(error).__name__}: {error}"
            deaths = 0 if self._finished_any else deaths + 1
            if not self.first_start.done():
                self.first_start.set_exception(EngineError(reason))
            if self._closing:
                return
            self._fail_all(reason, give_up=deaths == _MAX_DEATHS)

    def _run_once(self) -> str:
        """One life of the worker. Returns how it ended; nothing of it is left but the batches that it owes."""
        self._overdue = ""
        with stop_signals_held():
            child = ChildProcess(
                self._name,
                self._main,
                (self._settings, self._device),
                title=self._title,
                log_level=self._settings.log_level,
            )
        with self._changed:
            self._child = child
            if self._closing:
                child.hang_up()
        channel = MessageChannel(child.pipe.send_bytes, child.pipe.recv_bytes, self._shared)
        writer = threading.Thread(target=self._write, args=(child, channel), name=f"{self._name}-send", daemon=True)
        watcher = threading.Thread(target=self._watch, args=(child,), name=f"{self._name}-watch", daemon=True)
        try:
            self._await_start(child)
            watcher.start()
            if self._settings.may_lend(self._device):
                self._agree_on_lending(channel)
            writer.start()
            while True:
                self._take(channel.receive(), child)
        except (EOFError, OSError):
            return f"{self._title} was stopped" if self._closing else self._overdue or child.how_it_died()
        except EngineError as error:
            return str(error)
        except Exception as error:
            logger.exception("%s does not make sense", self._title)
            return f"{self._title} sent what cannot be used: {type(error).__name__}: {error}"
        finally:
            child.hang_up()
            with self._changed:
                self._child = None
                self._taken.clear()
                self._changed.notify_all()
            for helper in (writer, watcher):
                if helper.ident is not None:
                    helper.join()
            child.stop()
            self._shared.discard_of(child.pid)
            self._borrower.worker_gone()
            for frames in self._sent.values():
                channel.discard(frames)

    def _await_start(self, child: ChildProcess) -> None:
        limit_s = patience_s = self._settings.startup_timeout_s
        if not self.first_start.done():
            patience_s = max(0.0, min(limit_s, self._settings.ready_by - self._clock()))
        if not child.pipe.poll(patience_s):
            raise EngineError(f"{self._title} is not ready after {limit_s:g} s; --startup-timeout-s allows more")
        fingerprint = bytes.fromhex(child.take_report()["fingerprint"])
        if not self.first_start.done():
            self.first_start.set_result(fingerprint)
        elif self.first_start.exception() is None and self.first_start.result() != fingerprint:
            raise EngineError(f"{self._title} found other weights or settings in {self._settings.model} than before")
        with self._changed:
            self._turn_began_s = self._clock()

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

    def _take(self, done: EncodeDone, child: ChildProcess) -> None:
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
        self._finished_any |= not untried
        self._deliver(EncodeResult(number=done.number, embeds=embeds, error=error, untried=untried))

    def _watch(self, child: ChildProcess) -> None:
        """Have a child ended that does not end a batch in time: it may hang without dying."""
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
        with contextlib.suppress(OSError):  # whoever reads from it sees that it is gone, too
            while self._write_next(child, channel):
                pass

    def _write_next(self, child: ChildProcess, channel: MessageChannel) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._taken or self._unsent or self._child is not child)
            if self._child is not child:
                return False
            taken = self._taken.popleft() if self._taken else None
            if taken is None:
                batch = self._unsent.popleft()
                self._sent[batch.number] = ()
        if taken is not None:
            channel.send(channel.encode(RowsTaken(number=taken)))
            return True
        frames, error = attempt(lambda: channel.encode(EncodeWork(number=batch.number, patches=batch.patches)))
        if frames is None:
            with self._changed:
                del self._sent[batch.number]
            self._deliver(EncodeResult(number=batch.number, embeds=None, error=error))
        else:
            self._sent[batch.number] = frames[:2]
            channel.send(frames)
        return True

    def _fail_all(self, reason: str, *, give_up: bool) -> None:
        """Fail what the worker owes. Only the batch that it was given first of these can be what ended it."""
        with self._changed:
            sent, unsent = list(self._sent), [batch.number for batch in self._unsent]
            self._sent.clear()
            self._unsent.clear()
            if give_up:
                self._given_up = reason
        if give_up:
            logger.error("%s: given up after %d deaths without a batch done between them", reason, _MAX_DEATHS)
        else:
            logger.warning("%s: starting it again; %d batches fail", reason, len(sent) + len(unsent))
        for number in (*sent, *unsent):
            self._deliver(EncodeResult(number=number, embeds=None, error=reason, untried=number not in sent[:1]))
