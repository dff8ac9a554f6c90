"""Answers the lines of batches beside the requests, and goes on where the last server was.

A batch is a task: count its lines -> answer them, each journaled before the next takes its place -> write its files ->
tell that it has ended. Each step may be cut off at any point, and done again: lines that are journaled are left out, a
file that is there is not written twice. So there is one answer to each line, whatever happens.

Lines of all batches share a few slots, in turns, and begin only while requests leave the engine room.

A batch pauses while the disk or the file store has no room for its lines or files, and while a store elsewhere is not
reached. It says why, and tries again. The state of such a batch may be ahead of the journal's; `BatchRunner.seen` has
it.

Several servers may share a journal. Each one renews the leases of its batches, stops what another one took from it, and
takes what nobody works on: batches of servers that ended or died.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel

from vlmserve.api.batches.journal import (
    LEASE_S,
    Batch,
    BatchJournal,
    LeaseLostError,
    Line,
    add_up,
    count_lines,
    read_lines,
    write_file,
)
from vlmserve.api.body import checked_within
from vlmserve.api.chat import whole_chat
from vlmserve.api.completions import whole_completion
from vlmserve.api.errors import describe
from vlmserve.api.file_store import FileStore
from vlmserve.api.pooling.embeddings import whole_embeddings
from vlmserve.api.pooling.protocol import EmbeddingRequest
from vlmserve.api.request_id import new_id
from vlmserve.api.responses.api import ResponsesApi
from vlmserve.api.responses.protocol import ResponsesRequest
from vlmserve.api.score import whole_scores
from vlmserve.api.served_model import ServedModel
from vlmserve.api.stores.rows import STORE_ERRORS, StoreUnavailableError, is_full
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.completion_answers import CompletionRequest
from vlmserve.frontend.openai.protocol import ChatCompletionRequest, ScoreRequest
from vlmserve.frontend.requests import Caller
from vlmserve_common.errors import BadRequestError, EngineUnavailableError, first_line
from vlmserve_common.logs import request_id
from vlmserve_common.process.threads import Threads

Answer: TypeAlias = Callable[[dict[str, Any], Caller], Awaitable[Mapping[str, Any]]]
"""Takes a request's body and its caller, and returns the answer's body. Raises what `errors` describes."""

_Model = TypeVar("_Model", bound=BaseModel)


def batch_endpoints(served: ServedModel, responses: ResponsesApi, threads: Threads) -> dict[str, Answer]:
    """Return the endpoints that lines may ask, by their paths. threads: check the bodies."""

    def endpoint(
        kind: str, model: type[_Model], answer: Callable[[_Model, str, Caller], Awaitable[Mapping[str, Any]]]
    ) -> Answer:
        async def call(raw: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
            body = await threads.run(checked_within, raw, model, served.settings)
            served.check_name(body.model)  # type: ignore[attr-defined]
            return await answer(body, new_id(kind), caller)

        return call

    return {
        "/v1/chat/completions": endpoint("chatcmpl", ChatCompletionRequest, lambda *asked: whole_chat(served, *asked)),
        "/v1/completions": endpoint("cmpl", CompletionRequest, lambda *asked: whole_completion(served, *asked)),
        "/v1/responses": endpoint("resp", ResponsesRequest, responses.whole),
        "/v1/embeddings": endpoint("embd", EmbeddingRequest, lambda *asked: whole_embeddings(served, *asked)),
        "/v1/score": endpoint("score", ScoreRequest, lambda *asked: whole_scores(served, *asked)),
    }


_P = ParamSpec("_P")
_T = TypeVar("_T")
logger = logging.getLogger(__name__)

_LOOK_S = 0.05  # how often a line that waits for room looks for it
_LEASES_S = 5.0  # between two looks at the leases, of which one lasts for several
_NEXT_S = 0.5  # before a server takes one more batch, so that others have their part
_AGAIN_S = 1.0  # between two tries where the engine was full, or away for a moment
_LAST = 2**31 - 1  # priority
_WRITE_AGAIN_S = 30.0  # between two tries to write where there was no room
_REACH_AGAIN_S = 2.0  # between two tries to reach a store
_NO_ROOM = (BadRequestError, *STORE_ERRORS)  # of the store's limits, of the disk


def make_runner(
    served: ServedModel, journal: BatchJournal, endpoints: Mapping[str, Answer], threads: Threads
) -> BatchRunner:
    """Make the runner of a served model."""
    settings, manager = served.settings, served.manager
    most = settings.engine.max_running_requests
    return BatchRunner(
        journal,
        served.files,
        endpoints,
        settings,
        threads,
        has_room=lambda: manager.unavailable is None and manager.num_pending < most,
        is_gone=lambda: manager.is_gone,
    )


class BatchRunner:
    """Runs batches in one event loop. If the scheduler knows priorities, lines come last.

    threads: go through the files of batches. has_room: the engine could take another request at once. is_gone: the
    engine has failed for good. sleep: waits until there may be room.
    """

    def __init__(
        self,
        journal: BatchJournal,
        files: FileStore,
        endpoints: Mapping[str, Answer],
        settings: ServerSettings,
        threads: Threads,
        *,
        has_room: Callable[[], bool],
        is_gone: Callable[[], bool],
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._journal = journal
        self._files = files
        self._endpoints = endpoints
        self._settings = settings
        self._threads = threads
        self._has_room = has_room
        self._is_gone = is_gone
        self._clock = clock
        self._sleep = sleep
        self._slots = asyncio.Semaphore(settings.batch_concurrency)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of owners who wait for slots
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, Batch] = {}  # of batches that have not ended in the journal
        self._waits: dict[str, tuple[str, str]] = {}  # why batches wait for room: code and message
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with the batches that nobody works on, now and later."""
        self._looking = asyncio.get_running_loop().create_task(self._look())

    def run(self, batch: Batch) -> None:
        """Begin a batch, or go on with it."""
        self._states[batch.id] = batch
        task = self._tasks[batch.id] = asyncio.get_running_loop().create_task(self._run(batch))
        task.add_done_callback(self._forget)

    def seen(self, batch: Batch) -> Batch:
        """Return the state of a batch as clients see it. batch: as the journal has it."""
        now = self._states.get(batch.id, batch)
        return replace(now, problem=now.problem or self._waits.get(batch.id))

    async def cancel(self, batch: Batch) -> Batch:
        """Begin no further line of a batch, and drop those under way. Answers that are there stay, but a batch that
        waits for room, or finds none now, ends without its files."""
        waits = batch.id in self._waits
        if self._journal.replicated or batch.id not in self._states:  # perhaps another server works on it
            await self._journal.threads.run(self._journal.take, batch.owner, batch.id)
        task = self._tasks.get(batch.id)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        now = self._states.get(batch.id)
        if now is None:
            now = await self._journal.threads.run(self._journal.find, batch.owner, batch.id)
        if batch.id in self._tasks or now.has_ended:  # another request cancelled it, too, or it came to its end
            return now
        if now.outcome is None or waits:
            now = replace(now, status="cancelling", cancelling_at=int(self._clock()), outcome="cancelled")
        self.run(now)
        try:
            await self._journal.threads.run(self._journal.put, now)  # the first in the row, before those of the task
        except _NO_ROOM as error:
            logger.warning("batch %s is cancelled, which cannot be written yet: %s", batch.id, error)
        return now

    async def stop(self) -> None:
        """Drop the lines under way. Another server, or the next, goes on with them."""
        tasks = [*self._tasks.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave()

    async def _look(self) -> None:
        """Renew leases and take free batches, again and again where there are other servers.

        When a store was away, leases are over that nobody could renew. Nothing is taken until those were.
        """
        takes_from = 0.0
        while True:
            seconds = _LEASES_S
            try:
                ours = set(self._states)
                for lost in ours - await self._journal.threads.run(self._journal.renew):
                    if lost in self._tasks:
                        self._tasks[lost].cancel()
                    self._left(lost)
                if time.monotonic() >= takes_from and not self._is_gone() and await self._take_free():
                    seconds = _NEXT_S
                if not self._journal.replicated:
                    return
            except Exception as error:
                level = logging.DEBUG if time.monotonic() < takes_from else logging.WARNING  # once for many tries
                logger.log(level, "the leases of batches cannot be renewed now: %s", first_line(error))
                takes_from = time.monotonic() + LEASE_S
            await self._sleep(seconds)

    async def _take_free(self) -> bool:
        """Take a batch, and return whether there was one; without other servers, take all of them."""
        while batch := await self._journal.threads.run(self._journal.claim):
            logger.info("batch %s goes on: %s", batch.id, batch.status)
            self.run(batch)
            if self._journal.replicated:
                return True
        return False

    def _left(self, batch_id: str) -> None:
        """Forget a batch that another server works on."""
        self._states.pop(batch_id, None)
        logger.info("batch %s goes on at another server", batch_id)

    async def _leave(self) -> None:
        """Let other servers go on with the batches, before the leases are over."""
        with suppress(*STORE_ERRORS):
            await self._journal.threads.run(self._journal.release)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks = {name: one for name, one in self._tasks.items() if one is not task}

    async def _run(self, batch: Batch) -> None:
        request_id.set(batch.id)
        try:
            batch = await self._written(
                batch.id, lambda: self._go_on(self._states[batch.id]), errors=(StoreUnavailableError,)
            )
        except LeaseLostError:
            self._left(batch.id)
        except EngineUnavailableError as error:
            logger.info("batch %s waits for the next server: %s", batch.id, error)
            await self._leave()
        except Exception:
            logger.exception("batch %s stopped; the next server goes on with it", batch.id)
        else:
            del self._states[batch.id]
            logger.info("batch %s: %s, %d answered, %d failed", batch.id, batch.status, batch.completed, batch.failed)
            with suppress(*_NO_ROOM):  # the next batch that ends has them forgotten, too
                await self._journal.threads.run(self._journal.forget_lines)

    async def _go_on(self, batch: Batch) -> Batch:
        if batch.outcome is None:
            batch = await self._answer_all(batch)
        if batch.status not in ("finalizing", "cancelling"):
            batch = replace(batch, status="finalizing", finalizing_at=int(self._clock()))
            await self._put(batch)
        return await self._finish(batch)

    async def _answer_all(self, batch: Batch) -> Batch:
        try:
            if batch.status == "validating":
                batch = await self._count(batch)
            async with asyncio.timeout(max(0.0, batch.expires_at - self._clock())):
                await self._answer_lines(batch)
        except TimeoutError:
            await self._expire_rest(batch)
            return replace(batch, outcome="expired")
        except BadRequestError as error:
            return replace(batch, outcome="failed", problem=(error.code or "invalid_request", str(error)))
        return replace(batch, outcome="completed")

    async def _count(self, batch: Batch) -> Batch:
        def count() -> int:
            _, file = self._files.open(batch.owner, batch.input_file_id)
            with file:
                return count_lines(file, self._settings.max_batch_lines)

        total = await self._threads.run(count)
        batch = replace(batch, status="in_progress", in_progress_at=int(self._clock()), total=total)
        await self._put(batch)
        return batch

    async def _put(self, batch: Batch) -> None:
        self._states[batch.id] = batch
        await self._written(batch.id, lambda: self._journaled(self._journal.put, batch))

    async def _journaled(self, write: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Write to the journal, even if this task is cancelled meanwhile: an answer that is there stays."""
        writing = asyncio.ensure_future(self._journal.threads.run(write, *args, **kwargs))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait((writing,))
            raise

    async def _written(
        self, batch_id: str, write: Callable[[], Awaitable[_T]], errors: tuple[type[Exception], ...] = _NO_ROOM
    ) -> _T:
        """Write something, as soon as there is room for it and its store is reached."""
        try:
            while True:
                try:
                    return await write()
                except errors as error:
                    code, why = _described(error)
                    seconds = _REACH_AGAIN_S if isinstance(error, StoreUnavailableError) else _WRITE_AGAIN_S
                    if batch_id not in self._waits:
                        logger.warning("batch %s waits: %s", batch_id, why)
                    self._waits[batch_id] = code, f"the batch waits: {why}"
                await self._sleep(seconds)
        finally:
            self._waits.pop(batch_id, None)

    async def _answer_lines(self, batch: Batch) -> None:
        lines = await self._threads.run(self._lines_left, batch)
        try:
            async with asyncio.TaskGroup() as group:
                while (line := await self._threads.run(next, lines, None)) is not None:
                    await self._room(batch.owner)
                    task = group.create_task(self._answer_line(batch, line))
                    task.add_done_callback(lambda _: self._slots.release())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _room(self, owner: str) -> None:
        """Wait for a slot, and for room in the engine. Owners take turns, however many batches they have."""
        async with self._turns.setdefault(owner, asyncio.Lock()):
            await self._slots.acquire()
        try:
            while not self._has_room():
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            self._slots.release()
            raise

    def _lines_left(self, batch: Batch) -> Iterator[Line]:
        done = self._journal.done(batch.id)
        _, file = self._files.open(batch.owner, batch.input_file_id)

        def left() -> Iterator[Line]:
            with file:
                lines = read_lines(
                    file,
                    batch.endpoint,
                    most_bytes=int(self._settings.max_body_mib * 2**20),
                    most_values=self._settings.max_json_values,
                )
                yield from (line for line in lines if line.number not in done)

        return left()

    async def _answer_line(self, batch: Batch, line: Line) -> None:
        if line.problem is not None:
            row = _unanswered(batch, line, *line.problem)
        else:
            assert line.body is not None
            name = new_id("batch_req")
            status, body = await self._ask(batch, line.body, name)
            response = {"status_code": status, "request_id": name, "body": body}
            row = (line.number, status == 200, _record(batch, line, response=response))
        await self._written(batch.id, lambda: self._journaled(self._journal.add_lines, batch.id, [row]))

    async def _ask(self, batch: Batch, body: dict[str, Any], name: str) -> tuple[int, Mapping[str, Any]]:
        request_id.set(name)
        priority = _LAST if self._settings.engine.schedule_policy == "priority" else 0
        caller = Caller(
            client=f"{batch.client} batch",
            owner=batch.owner,
            tenant=batch.tenant,
            priority=priority,
            unattended=True,
        )
        while True:  # until the batch's time is over
            try:
                return 200, await self._endpoints[batch.endpoint](body, caller)
            except BadRequestError as error:
                if error.status != 429:
                    return describe(error)
            except EngineUnavailableError:
                if self._is_gone():
                    raise
            except StoreUnavailableError as error:
                logger.info("a line waits: %s", error)
            except Exception as error:
                return describe(error)
            await asyncio.sleep(_AGAIN_S)

    async def _expire_rest(self, batch: Batch) -> None:
        def expire() -> None:
            what = f"the batch's {batch.completion_window} were over before this line was answered"
            lines = [_unanswered(batch, line, "batch_expired", what) for line in self._lines_left(batch)]
            self._journal.add_lines(batch.id, lines)

        await self._written(batch.id, lambda: self._threads.run(expire))

    async def _finish(self, batch: Batch) -> Batch:
        """Write the files, which may wait for room, and mark the batch as ended."""
        assert batch.outcome is not None
        completed, failed = await self._journal.threads.run(self._journal.counts, batch.id)
        usage = await self._threads.run(add_up, self._journal.lines(batch.id, good=True))
        ids: dict[str, Any] = {}
        for kind, count in (("output", completed), ("error", failed)):
            if count:
                ids |= await self._write_file(batch, kind)
        batch = replace(
            batch,
            status=batch.outcome,
            ended_at=int(self._clock()),
            completed=completed,
            failed=failed,
            usage=usage,
            **ids,
        )
        await self._put(batch)
        return batch

    async def _write_file(self, batch: Batch, kind: str) -> dict[str, Any]:
        """Write a file, and return fields for the batch: the file's id, or a problem. A cancelled batch waits for no
        room."""

        def write() -> Awaitable[str]:
            return self._threads.run(write_file, self._files, self._journal, batch, kind)

        name = f"{kind}_file_id"
        if batch.outcome != "cancelled":
            return {name: await self._written(batch.id, write)}
        try:
            return {name: await write()}
        except _NO_ROOM as error:
            why = f"cancelled without its {kind} file, for which there is no room: {_described(error)[1]}"
            logger.warning("batch %s is %s", batch.id, why)
            return {"problem": (f"{kind}_file_lost", f"the batch is {why}")}


def _described(error: Exception) -> tuple[str, str]:
    """Return the code and the message of a lack of room."""
    if isinstance(error, BadRequestError):
        return error.code or "storage_full", str(error)
    if isinstance(error, StoreUnavailableError):
        return "store_unavailable", str(error)
    what = "is full" if is_full(error) else f"cannot be written ({error})"
    return "storage_full", f"the server's disk {what} (setting --file-store-dir)"


def _record(batch: Batch, line: Line, **found: Any) -> dict[str, Any]:
    return {"id": f"{batch.id}_{line.number}", "custom_id": line.custom_id, "response": None, "error": None, **found}


def _unanswered(batch: Batch, line: Line, code: str, message: str) -> tuple[int, bool, dict[str, Any]]:
    error = {"code": code, "message": message, "line": line.number}
    return line.number, False, _record(batch, line, error=error)
