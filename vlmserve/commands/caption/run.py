"""A run: items in, as many at a time as there is room for; what became of them to the output and the journal.

Three kinds of threads besides the event loop's: one pulls items, some read files, one writes. The writer takes all that
is finished at once, so that disks are waited for once for many; what it has written counts from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import blake3

from processors.inputs import Modality
from vlmserve.commands.batch.item import ChatRequest, Failed, RequestItem, digest_of
from vlmserve.commands.caption.budget import ByteBudget
from vlmserve.commands.caption.captioner import Captioner, CaptionStopped
from vlmserve.commands.caption.feed import Feed, Shared
from vlmserve.commands.caption.result import Captioned, Result, Touched, Work, like_another, make_record
from vlmserve.commands.client.chat_files import told_modality
from vlmserve_common.errors import BadRequestError, EngineError, VlmserveError

logger = logging.getLogger(__name__)

_UNKNOWN_BYTES = 1 << 20
_READERS = 16  # which mostly wait, for disks or other hosts
_MOST_AT_ONCE = 256

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """concurrency: items in work at a time. bytes_in_memory: of their files, together.

    options: fields of every request but those that have their own; picture_knobs, video_knobs: of the part that
    brings a medium. fingerprint: of everything that makes captions other ones. seed: of sampling.
    """

    concurrency: int
    bytes_in_memory: int = 1 << 30
    options: Mapping[str, Any] = field(default_factory=dict)
    picture_knobs: Mapping[str, Any] = field(default_factory=dict)
    video_knobs: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: bytes = b""
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """An item with its bytes. known: the record of an item like it."""

    fingerprint: bytes
    request: ChatRequest
    data: bytes | None
    modality: Modality | None
    digest: str | None
    known: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What became of an item. work: None for what failed before it was any. written: set when it is on disk."""

    result: Result
    work: Work | None = None
    written: asyncio.Event | None = None


class CaptionRun:
    """One run."""

    def __init__(self, feed: Feed, captioner: Captioner, settings: RunSettings, shared: Shared) -> None:
        self._feed = feed
        self._captioner = captioner
        self._settings = settings
        self._prompts = shared.prompts
        self._journal = shared.journal
        self._output = shared.output
        self._errors = shared.errors
        self._tally = shared.tally
        self._budget = ByteBudget(settings.bytes_in_memory)
        self._outcomes: asyncio.Queue[_Outcome] = asyncio.Queue(settings.concurrency)
        # Records by fingerprints: of what is in work, and of what went to the journal last.
        self._records: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        self._last_written: deque[bytes] = deque()
        self.in_order = False  # the run has ended, and has written all that was finished
        self._pulling = asyncio.Lock()
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="caption-feed")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="caption-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="caption-write")

    async def run(self) -> None:
        """Until all items are finished. Cancelled, it calls off what is in work and writes what is finished.

        Raises CaptionStopped when nobody answers any more, OSError when nothing can be written any more.
        """
        writing = asyncio.create_task(self._write_outcomes())
        workers = [asyncio.create_task(self._work()) for _ in range(self._settings.concurrency)]
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
            await self._end_writing(writing)
            self.in_order = True

    def close(self) -> None:
        """After `run`, however it ended: nobody writes any more when this returns."""
        for executor in (self._puller, self._readers):
            executor.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------- items

    async def _work(self) -> None:
        while True:
            async with self._pulling:
                work = await self._in(self._puller, self._feed.next)
            if work is None:
                return
            if isinstance(work, Failed):
                await self._outcomes.put(_Outcome(result=work))
                continue
            try:
                await self._caption(work)
            except (CaptionStopped, OSError):  # an item's own are told by `_read`
                raise
            except BadRequestError as error:
                await self._fail(work, error.message, error.code)
            except EngineError as error:
                await self._fail(work, str(error), "engine_error")
            except VlmserveError:
                raise  # the journal's
            except Exception as error:
                logger.exception("%s failed unexpectedly", work.item.id)
                await self._fail(work, f"{type(error).__name__}: {error}", "internal_error")

    async def _fail(self, work: Work, message: str, code: str | None) -> None:
        await self._outcomes.put(_Outcome(result=work.failed(message, code), work=work))

    async def _caption(self, work: Work) -> None:
        async with self._budget.hold(work.item.size or _UNKNOWN_BYTES):
            opened = await self._in(self._readers, self._open, work)
            if isinstance(opened, Touched):
                await self._outcomes.put(_Outcome(result=opened, work=work))
                return
            record, usage = await self._record(work, opened)
            keep = self._output.needs_media
            result = Captioned(
                work=work,
                fingerprint=opened.fingerprint,
                record=record,
                usage=usage,
                data=opened.data if keep else None,
                modality=opened.modality,
            )
            written = asyncio.Event() if keep else None  # its bytes count until then
            await self._outcomes.put(_Outcome(result=result, work=work, written=written))
            if written is not None:
                await written.wait()

    async def _record(self, work: Work, opened: _Opened) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
        """What is known of an item like this one, or what the captioner says, and what that took."""
        if opened.known is not None:
            return like_another(opened.known, work.item), None
        other = self._records.get(opened.fingerprint)  # in work, or written since it was opened
        if other is not None:
            return like_another(await asyncio.shield(other), work.item), None
        future = self._records[opened.fingerprint] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._captioner.ask(opened.request)
        except BaseException as error:
            del self._records[opened.fingerprint]
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
                future.exception()  # nobody need have waited
            raise
        asked = work.asked
        said = [choice["message"]["content"] or "" for choice in answer["choices"]]
        record = make_record(
            work.item,
            answer,
            said if asked is None else [asked.whole(text) for text in said],
            digest=opened.digest,
            prompt=None if asked is None else asked.prompt,
        )
        future.set_result(record)
        return record, answer.get("usage") or {}

    def _open(self, work: Work) -> _Opened | Touched:
        """Read an item; in a thread."""
        item, settings = work.item, self._settings
        options = {**settings.options}
        data = modality = digest = None
        if isinstance(item, RequestItem):
            request = _read(item.read)
            options |= request.options
            request = replace(request, options=options)
            content = digest_of(request.messages)
        else:
            assert work.asked is not None
            data = _read(item.read)
            modality = told_modality(data)
            digest = blake3.blake3(data).hexdigest()
            content = bytes.fromhex(digest)
            options |= item.options
            own = options.get("mm_processor_kwargs") or {}
            knobs = settings.video_knobs if modality is Modality.VIDEO else settings.picture_knobs
            knobs = {name: value for name, value in knobs.items() if name not in own}
            request = self._prompts.request(work.asked.prompt, data, modality, knobs=knobs, options=options)
        around = [] if work.asked is None else work.asked.texts
        fingerprint = blake3.blake3(settings.fingerprint + content + digest_of([options, around])).digest()
        before = self._journal.done_as(item.id)
        if before is not None and before[1] == fingerprint:
            return Touched(work=work, trouble=self._output.check(item))
        if "seed" not in options:  # the same for the same item, whatever is in work beside it
            seed = (int.from_bytes(fingerprint[:7], "little") + settings.seed) % 2**63
            request = replace(request, options={**options, "seed": seed})
        known = self._journal.record_like(fingerprint)
        return _Opened(
            fingerprint=fingerprint, request=request, data=data, modality=modality, digest=digest, known=known
        )

    # ---------------------------------------------------------------- outcomes

    async def _write_outcomes(self) -> None:
        """Until cancelled, or all workers have ended and all is written."""
        while True:
            batch = [await self._outcomes.get()]
            while not self._outcomes.empty() and len(batch) < _MOST_AT_ONCE:
                batch.append(self._outcomes.get_nowait())
            try:
                await self._in(self._writer, self._commit, [outcome.result for outcome in batch])
            finally:
                for outcome in batch:
                    self._forget(outcome)
                    self._outcomes.task_done()

    async def _end_writing(self, writing: asyncio.Task[None]) -> None:
        """All workers have ended: write what they have left."""
        if not writing.done():
            joined = asyncio.create_task(self._outcomes.join())
            await asyncio.wait([joined, writing], return_when=asyncio.FIRST_COMPLETED)
            joined.cancel()
            writing.cancel()
        result = (await asyncio.gather(writing, return_exceptions=True))[0]
        if isinstance(result, Exception):
            raise result

    def _commit(self, results: Sequence[Result]) -> None:
        """In the writer's thread."""
        done = [result for result in results if isinstance(result, Captioned)]
        failed = [result for result in results if isinstance(result, Failed)]
        touched = [result for result in results if isinstance(result, Touched)]
        failed += _no_place(touched)
        seen = [(each.work.item.id, each.work.key) for each in touched if not each.trouble]
        while done or failed or seen:
            room = self._output.room()
            now, done = done[:room], done[room:] if room is not None else []
            state = self._output.write(now) if now else self._journal.state()
            self._journal.add(now, failed, state, touched=seen)
            homeless = _no_place(self._output.written(now))
            if homeless:
                self._journal.add((), homeless, self._journal.state(), undone=[each.id for each in homeless])
            self._errors.add([*failed, *homeless])
            lost = {each.id for each in homeless}
            self._tally.add([result for result in now if result.work.item.id not in lost])
            self._tally.failed += len(failed) + len(homeless)
            self._tally.skipped += len(seen)
            failed, seen = [], []

    def _forget(self, outcome: _Outcome) -> None:
        result = outcome.result
        if outcome.work is not None:
            self._feed.finished(outcome.work)
        if isinstance(result, Captioned) and result.usage is not None:
            self._last_written.append(result.fingerprint)
            if len(self._last_written) > _MOST_AT_ONCE + self._settings.concurrency:
                self._records.pop(self._last_written.popleft(), None)
        if outcome.written is not None:
            outcome.written.set()

    async def _in(self, executor: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)


def _no_place(touched: Sequence[Touched]) -> list[Failed]:
    return [each.work.failed(each.trouble, "no_place") for each in touched if each.trouble]


def _read(read: Callable[[], _T]) -> _T:
    """Errors of reading are the item's."""
    try:
        return read()
    except OSError as error:
        raise BadRequestError(f"cannot read it: {error.strerror or error}", code="unreadable") from None
