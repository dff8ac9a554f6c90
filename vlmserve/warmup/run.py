"""A run: sources in, a few at a time; what became of each into the journal, the list of errors and the tally."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import TextIO

from vlmserve.warmup.journal import Journal
from vlmserve.warmup.progress import Progress, Tally
from vlmserve.warmup.requests import SourceReader
from vlmserve.warmup.sources import RequestLine, Source
from vlmserve.warmup.target import Target, WarmupStopped
from vlmserve_common.errors import BadRequestError, EngineError

logger = logging.getLogger(__name__)

_SHOW_EVERY_S = 0.1


class WarmupRun:
    """journal: None keeps none. errors: gets a line of JSON for each source that failed; None: they are only logged.

    concurrency: sources in work at a time, which bounds memory.
    """

    def __init__(
        self,
        target: Target,
        reader: SourceReader,
        *,
        tally: Tally,
        progress: Progress,
        journal: Journal | None,
        errors: TextIO | None,
        concurrency: int,
    ) -> None:
        self._target = target
        self._reader = reader
        self._tally = tally
        self._progress = progress
        self._journal = journal
        self._errors = errors
        self._concurrency = concurrency

    async def run(self, sources: Sequence[Source]) -> None:
        """Raises WarmupStopped. Cancelled, it calls off what is in work."""
        left = iter(sources)
        tasks = [asyncio.create_task(self._work(left)) for _ in range(self._concurrency)]
        showing = asyncio.create_task(self._show())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, showing):
                task.cancel()
            await asyncio.gather(*tasks, showing, return_exceptions=True)

    async def _show(self) -> None:
        while True:
            self._progress.show()
            await asyncio.sleep(_SHOW_EVERY_S)

    async def _work(self, left: Iterator[Source]) -> None:
        for source in left:
            try:
                await self._warm(source)
            except WarmupStopped:
                raise
            except BadRequestError as error:
                self._fail(source, error.message, error.code, error.param)
            except (EngineError, OSError) as error:
                self._fail(source, str(error), "engine_error")
            except Exception as error:
                logger.exception("%s failed unexpectedly", source.name)
                self._fail(source, f"{type(error).__name__}: {error}", "internal_error")

    async def _warm(self, source: Source) -> None:
        opened = await asyncio.to_thread(self._reader.open, source)
        if self._journal is not None:
            keys = self._journal.finished(opened.identity)
            if keys is not None and self._target.holds(keys):
                self._tally.skipped += 1
                return
        warmed = await self._target.encode(await asyncio.to_thread(opened.read))
        self._tally.add(warmed.items)
        if self._journal is not None and all(item.saved for item in warmed.items):
            self._journal.add(opened.identity, warmed.keys, source=source.place or source.name)

    def _fail(self, source: Source, message: str, code: str | None, param: str | None = None) -> None:
        self._tally.failed += 1
        if self._errors is None:
            logger.error("%s: %s", source.place or source.name, message)
            return
        line = {
            "source": source.name,
            "place": source.place,
            "param": param if isinstance(source, RequestLine) else None,
            "message": message,
            "code": code,
        }
        print(json.dumps(line, ensure_ascii=False), file=self._errors, flush=True)
