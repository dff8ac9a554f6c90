"""A run: sources in, a few at a time; what became of each into the journal, the list of errors and the tally."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from vlmserve.warmup.journal import Journal
from vlmserve.warmup.progress import Progress, Tally
from vlmserve.warmup.requests import SourceReader
from vlmserve.warmup.sources import RequestLine, Source
from vlmserve.warmup.target import WarmupStopped
from vlmserve_common.errors import BadRequestError, EngineError

if TYPE_CHECKING:
    from vlmserve.warmup.local import LocalTarget
    from vlmserve.warmup.remote import RemoteTarget

logger = logging.getLogger(__name__)

_SHOW_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class WarmupRun:
    """journal: None keeps none. errors: gets a line of JSON for each source that failed; None: they are only logged.

    concurrency: sources in work at a time, which bounds memory.
    """

    target: LocalTarget | RemoteTarget
    reader: SourceReader
    tally: Tally
    progress: Progress
    journal: Journal | None
    errors: TextIO | None
    concurrency: int

    async def run(self, sources: Sequence[Source]) -> None:
        """Raises WarmupStopped. Cancelled, it calls off what is in work."""
        left = iter(sources)
        tasks = [asyncio.create_task(self._work(left)) for _ in range(self.concurrency)]
        showing = asyncio.create_task(self._show())
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, showing):
                task.cancel()
            await asyncio.gather(*tasks, showing, return_exceptions=True)

    async def _show(self) -> None:
        while True:
            self.progress.show()
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
        opened = await asyncio.to_thread(self.reader.open, source)
        if self.journal is not None:
            keys = self.journal.finished(opened.identity)
            if keys is not None and self.target.holds(keys):
                self.tally.skipped += 1
                return
        warmed = await self.target.encode(await asyncio.to_thread(opened.read))
        self.tally.add(warmed.items)
        if self.journal is not None and all(item.saved for item in warmed.items):
            self.journal.add(opened.identity, warmed.keys, source=source.place or source.name)

    def _fail(self, source: Source, message: str, code: str | None, param: str | None = None) -> None:
        self.tally.failed += 1
        if self.errors is None:
            logger.error("%s: %s", source.place or source.name, message)
            return
        line = {
            "source": source.name,
            "place": source.place,
            "param": param if isinstance(source, RequestLine) else None,
            "message": message,
            "code": code,
        }
        print(json.dumps(line, ensure_ascii=False), file=self.errors, flush=True)
