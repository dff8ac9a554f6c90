"""A run: inputs in, a few at a time; what became of each into the journal, the list of errors and the tally."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from vlmserve.commands.batch.item import ChatRequest, Failed, Found, Item, RequestItem, digest_of
from vlmserve.commands.client.chat_files import told_modality
from vlmserve.commands.warmup.journal import Journal
from vlmserve.commands.warmup.tally import Tally
from vlmserve.commands.warmup.target import WarmupStopped
from vlmserve_common.errors import BadRequestError, EngineError

if TYPE_CHECKING:
    from vlmserve.commands.warmup.local import LocalTarget
    from vlmserve.commands.warmup.remote import RemoteTarget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WarmupRun:
    """journal: None keeps none. errors: gets a line of JSON for each input that failed; None: they are only logged.

    concurrency: inputs in work at a time, which bounds memory.
    """

    target: LocalTarget | RemoteTarget
    tally: Tally
    journal: Journal | None
    errors: TextIO | None
    concurrency: int

    async def run(self, inputs: Iterator[Found]) -> None:
        """Raises WarmupStopped. Cancelled, it calls off what is in work."""
        pulling = asyncio.Lock()
        tasks = [asyncio.create_task(self._work(inputs, pulling)) for _ in range(self.concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, inputs: Iterator[Found], pulling: asyncio.Lock) -> None:
        while True:
            async with pulling:
                item = await asyncio.to_thread(next, inputs, None)
            if item is None:
                return
            try:
                if isinstance(item, Failed):
                    self._fail(item.id, item.message, item.code)
                else:
                    await self._warm(item)
            except WarmupStopped:
                raise
            except BadRequestError as error:
                self._fail(item.id, error.message, error.code, error.param if isinstance(item, RequestItem) else None)
            except (EngineError, OSError) as error:
                self._fail(item.id, str(error), "engine_error")
            except Exception as error:
                logger.exception("%s failed unexpectedly", item.id)
                self._fail(item.id, f"{type(error).__name__}: {error}", "internal_error")

    async def _warm(self, item: Item) -> None:
        request: ChatRequest | None = None
        if not isinstance(item, RequestItem) and item.path is not None and item.signature is not None:
            identity = f"file {item.path.absolute()} {item.signature}"
        else:
            request = await asyncio.to_thread(_read, item)
            identity = f"content {digest_of([request.messages, request.options]).hex()}"
        if self.journal is not None:
            keys = self.journal.finished(identity)
            if keys is not None and self.target.holds(keys):
                self.tally.skipped += 1
                return
        if request is None:
            request = await asyncio.to_thread(_read, item)
        warmed = await self.target.encode(request)
        self.tally.add(warmed.items)
        if self.journal is not None and all(encoded.saved for encoded in warmed.items):
            self.journal.add(identity, warmed.keys, source=item.id)

    def _fail(self, source: str, message: str, code: str | None, param: str | None = None) -> None:
        self.tally.failed += 1
        if self.errors is None:
            logger.error("%s: %s", source, message)
            return
        line = {"source": source, "param": param, "message": message, "code": code}
        print(json.dumps(line, ensure_ascii=False), file=self.errors, flush=True)


def _read(item: Item) -> ChatRequest:
    """Blocking. Raises BadRequestError."""
    if isinstance(item, RequestItem):
        return item.read()
    data = item.read()
    modality = told_modality(data)
    part = {"type": modality.value, modality.value: data}
    return ChatRequest(messages=[{"role": "user", "content": [part]}], options=item.options)
