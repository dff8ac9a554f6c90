"""A caption run: items are read and asked, a few at a time, and the results go to the output and the journal.

Besides the event loop's thread, one thread pulls items, some read files, and one writes. The writer takes all finished
results at once, so one wait for the disk covers many. Results count once they are written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

from vlmserve.commands.batch.item import ChatRequest, Failed
from vlmserve.commands.caption.feed import Feed, Shared
from vlmserve.commands.caption.opening import CaptionSettings, OpenedItem, open_item, record_of
from vlmserve.commands.caption.result import Captioned, CaptionTask, Result, Touched, like_another
from vlmserve_common.errors import BadRequestError, EngineError, VlmserveError

logger = logging.getLogger(__name__)

_UNKNOWN_BYTES = 1 << 20
_READERS = 16  # they mostly wait for disks or other hosts
_MOST_AT_ONCE = 256

_T = TypeVar("_T")
_Answer: TypeAlias = tuple[dict[str, Any], Mapping[str, Any] | None]


class CaptionStopped(VlmserveError):
    """No engine or server can answer any more. The run ends, and finished captions stay."""


class Captioner(Protocol):
    """The engine in this process, or servers, that answer requests. model: the name in answers.

    identity: text that differs when the same request may have another answer: weights and dtype, or a server's model.
    engines: how many take `CaptionSettings.concurrency` items each; servers together count as one.
    """

    model: str
    identity: str
    engines: int

    async def start(self) -> None:
        """Get ready, and set `model` and `identity`. Raises CaptionStopped."""
        ...

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        """Return OpenAI's chat.completion object, with `warnings` if there are any. Cancelling ends the request.

        BadRequestError and EngineError concern this request, CaptionStopped all requests.
        """
        ...

    def notes(self) -> list[str]:
        """Return sentences for the user at the end of the run."""
        ...

    async def close(self) -> None:
        """Cancel all requests and free everything."""
        ...


class ByteBudget:
    """Bytes of memory for files, first come, first served. A file above the total goes alone. For one event loop."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes are free, and hold them inside the context."""
        size = min(size, self._total)
        async with self._turn:
            while self._held + size > self._total:
                self._freed.clear()
                await self._freed.wait()
            self._held += size
        try:
            yield
        finally:
            self._held -= size
            self._freed.set()


class CaptionRun:
    """Captions the items of a feed."""

    def __init__(self, feed: Feed, captioner: Captioner, settings: CaptionSettings, shared: Shared) -> None:
        self._feed = feed
        self._captioner = captioner
        self._settings = settings
        self._shared = shared
        self._budget = ByteBudget(settings.bytes_in_memory)
        self._concurrency = settings.concurrency * captioner.engines
        self._turns = asyncio.Semaphore(self._concurrency)  # of items without a result
        # Each with an event that is set once the result is on disk. None comes last.
        self._results: asyncio.Queue[tuple[Result, asyncio.Event] | None] = asyncio.Queue()
        # By fingerprint, until the record is in the journal.
        self._answering: dict[bytes, asyncio.Task[_Answer]] = {}
        self.in_order = False  # the run has ended, and all finished results are written
        self._pulling = asyncio.Lock()
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="caption-feed")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="caption-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="caption-write")

    async def run(self) -> None:
        """Caption all items. Cancelling ends current requests, and writes the finished ones.

        Raises CaptionStopped if nothing answers any more, OSError if nothing can be written any more.
        """
        writing = asyncio.create_task(self._write_results())
        # half of them may wait for the disk, and the captioner still has as many requests as it can take
        workers = [asyncio.create_task(self._work()) for _ in range(2 * self._concurrency)]
        working: asyncio.Future[Any] = asyncio.gather(*workers)
        try:
            done, _ = await asyncio.wait([working, writing], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._feed.stop()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(working, *workers, return_exceptions=True)
            self._results.put_nowait(None)
            await writing
            self.in_order = True

    def close(self) -> None:
        """End the threads after `run`. Nothing is written after this returns."""
        for executor in (self._puller, self._readers):
            executor.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------- items

    async def _work(self) -> None:
        while True:
            await self._turns.acquire()
            async with self._pulling:
                task = await self._in(self._puller, self._feed.next)
            if task is None:
                self._turns.release()
                return
            if isinstance(task, Failed):
                await self._write(task)
                continue
            try:
                await self._caption(task)
            except BadRequestError as error:
                await self._write(task.failed(error.message, error.code))
            except EngineError as error:
                await self._write(task.failed(str(error), "engine_error"))
            except (VlmserveError, OSError):  # of the run: `_read` converts an item's own
                raise
            except Exception as error:
                logger.exception("%s failed unexpectedly", task.item.id)
                await self._write(task.failed(f"{type(error).__name__}: {error}", "internal_error"))
            finally:
                self._feed.finished(task)

    async def _caption(self, task: CaptionTask) -> None:
        async with self._budget.hold(task.item.size or _UNKNOWN_BYTES):
            opened = await self._in(self._readers, self._open, task)
            if isinstance(opened, Touched):
                await self._write(opened)
                return
            fingerprint = opened.fingerprint
            answering = self._answering.get(fingerprint)
            if answering is not None:  # an equal item is being captioned
                record, _ = await asyncio.shield(answering)
                await self._write(_captioned(task, opened, (like_another(record, task.item), None)))
                return
            answering = self._answering[fingerprint] = asyncio.create_task(self._answer(task, opened))
            try:
                await self._write(_captioned(task, opened, await answering))
            finally:
                del self._answering[fingerprint]

    async def _answer(self, task: CaptionTask, opened: OpenedItem) -> _Answer:
        """Return the record of an equal item in the journal, or of the captioner's answer with its usage."""
        known = await self._in(self._readers, self._shared.journal.record_like, opened.fingerprint)
        if known is not None:
            return like_another(known, task.item), None
        answer = await self._captioner.ask(opened.request)
        return record_of(task.item, task.asked, opened, answer), answer.get("usage") or {}

    def _open(self, task: CaptionTask) -> OpenedItem | Touched:
        """Read an item. Runs in a thread."""
        opened = open_item(
            task.item, task.asked, self._settings, prompts=self._shared.prompts, model=self._captioner.model
        )
        before = self._shared.journal.done_as(task.item.id)
        if before is not None and before[1] == opened.fingerprint:
            return Touched(task=task, trouble=self._shared.output.check(task.item))
        return opened

    # ---------------------------------------------------------------- results

    async def _write(self, result: Result) -> None:
        """Let the next item begin, and return once a result is on disk."""
        self._turns.release()
        written = asyncio.Event()
        self._results.put_nowait((result, written))
        await written.wait()

    async def _write_results(self) -> None:
        while True:
            batch = [await self._results.get()]
            while not self._results.empty() and len(batch) < _MOST_AT_ONCE:
                batch.append(self._results.get_nowait())
            results = [each for each in batch if each is not None]
            await self._in(self._writer, self._commit, [result for result, _ in results])
            for _, written in results:
                written.set()
            if len(results) < len(batch):
                return

    def _commit(self, results: Sequence[Result]) -> None:
        """Write results. Runs in the writer's thread."""
        done = [result for result in results if isinstance(result, Captioned)]
        failed = [result for result in results if isinstance(result, Failed)]
        touched = [result for result in results if isinstance(result, Touched)]
        failed += _no_place(touched)
        seen = [(each.task.item.id, each.task.key) for each in touched if not each.trouble]
        while done or failed or seen:
            room = self._shared.output.room()
            now, done = done[:room], done[room:] if room is not None else []
            state = self._shared.output.write(now) if now else self._shared.journal.state()
            self._shared.journal.add(now, failed, state, touched=seen)
            homeless = _no_place(self._shared.output.written(now))
            if homeless:
                self._shared.journal.add(
                    (), homeless, self._shared.journal.state(), undone=[each.id for each in homeless]
                )
            self._shared.errors.add([*failed, *homeless])
            lost = {each.id for each in homeless}
            self._shared.tally.add([result for result in now if result.task.item.id not in lost])
            self._shared.tally.failed += len(failed) + len(homeless)
            self._shared.tally.skipped += len(seen)
            failed, seen = [], []

    async def _in(self, executor: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)


def _captioned(task: CaptionTask, opened: OpenedItem, answer: _Answer) -> Captioned:
    record, usage = answer
    return Captioned(
        task=task,
        fingerprint=opened.fingerprint,
        record=record,
        usage=usage,
        data=opened.data,
        modality=opened.modality,
    )


def _no_place(touched: Sequence[Touched]) -> list[Failed]:
    return [each.task.failed(each.trouble, "no_place") for each in touched if each.trouble]
