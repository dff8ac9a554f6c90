"""The feed of a run: it decides which items need a caption, and renders their prompts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import blake3

from vlmserve.commands.batch.item import Failed, Found, Item, MediumItem
from vlmserve.commands.caption.journal import CaptionJournal, ErrorsFile
from vlmserve.commands.caption.outputs.base import Output
from vlmserve.commands.caption.prompts import Prompts
from vlmserve.commands.caption.result import CaptionTally, CaptionTask
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemShard:
    """One of `count` parts of all items. An item's id decides its part."""

    index: int = 0
    count: int = 1

    def has(self, id_: str) -> bool:
        """Return True if the item of this id is in the part."""
        digest = blake3.blake3(id_.encode("utf-8", "surrogatepass")).digest(8)
        return self.count == 1 or int.from_bytes(digest, "little") % self.count == self.index


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The objects that a feed and its run share. Their owner closes them."""

    prompts: Prompts
    journal: CaptionJournal
    output: Output
    errors: ErrorsFile
    tally: CaptionTally


class Feed:
    """Yields tasks to one thread at a time. limit: most items. retry_failed: try failed items again."""

    def __init__(
        self,
        found: Iterator[Found],
        shared: Shared,
        *,
        shard: ItemShard,
        limit: int | None = None,
        retry_failed: bool = False,
    ) -> None:
        self._found = found
        self._shared = shared
        self._shard = shard
        self._left = limit
        self._retry_failed = retry_failed
        self._lock = threading.Lock()
        self._in_work: dict[str, CaptionTask] = {}  # by ids
        self._targets: dict[str, str] = {}  # file -> id
        self._stopped = False

    def next(self) -> CaptionTask | Failed | None:
        """Return the next task, or an item that failed already; None at the end. Blocks while inputs are read."""
        while not self._stopped and self._left != 0:
            found = next(self._found, None)
            if found is None:
                return None
            if isinstance(found, Failed):
                return found
            if not self._shard.has(found.id):
                continue
            if self._left is not None:
                self._left -= 1
            task = self._consider(found)
            if task is not None:
                return task
        return None

    def finished(self, task: CaptionTask) -> None:
        """Forget a task: the journal has it, or it failed."""
        with self._lock:
            self._in_work.pop(task.item.id, None)
            if task.target is not None:
                self._targets.pop(task.target, None)

    def stop(self) -> None:
        """End the feed: `next` returns None from now on."""
        self._stopped = True

    def _consider(self, item: Item) -> CaptionTask | Failed | None:
        asked, options = None, {}
        if isinstance(item, MediumItem):
            if self._shared.output.by_path and item.path is not None:
                item = replace(item, id=os.path.abspath(item.path))
            options = dict(item.options)
            try:
                asked = self._shared.prompts.ask(item)
            except BadRequestError as error:
                key = _key(item, {"fields": dict(item.fields), "prompt": item.prompt})
                return self._unless_known(CaptionTask(item=item, key=key).failed(error.message, error.code))
        target = self._shared.output.target(item)
        key = _key(item, {"asked": None if asked is None else asked.texts, "options": options})
        task = CaptionTask(item=item, key=key, asked=asked, target=target)
        # in this order: a finished task is in the journal before it is forgotten here
        in_work = self._in_work.get(item.id)
        done = self._shared.journal.done_as(item.id)
        in_this_run = in_work is not None or (done is not None and done[2] == self._shared.journal.run)
        if in_this_run and key == (in_work.key if in_work else done and done[0]):
            self._shared.tally.repeated += 1
            return None
        if done is not None and done[0] == key and item.signature is not None:
            trouble = self._shared.output.check(item)
            if trouble is not None:
                return self._unless_known(task.failed(trouble, "no_place"))
            self._shared.tally.skipped += 1
            return None
        if in_this_run:
            why = f"two different items have the id {item.id!r}: give each its own"
            return Failed(id=item.id, message=why, code="same_id")
        if self._is_known(item.id, key):
            return None
        owner = None if target is None else self._targets.get(target)
        refusal = f"{target} is the caption of {owner}" if owner else self._shared.output.refusal(item, target)
        if refusal is not None:
            return task.failed(refusal, "no_place")
        with self._lock:
            self._in_work[item.id] = task
            if target is not None:
                self._targets[target] = item.id
        return task

    def _unless_known(self, failed: Failed) -> Failed | None:
        return None if self._is_known(failed.id, failed.key) else failed

    def _is_known(self, id_: str, key: bytes | None) -> bool:
        """Return True if the item failed before, and is not to be tried again."""
        known = not self._retry_failed and key is not None and self._shared.journal.has_failed(id_, key)
        self._shared.tally.failed_before += known
        return known


def _key(item: Item, how: Mapping[str, Any]) -> bytes:
    """Return the key of an item that is not read, and of its prompt and options."""
    told = json.dumps([item.signature, how], sort_keys=True, default=str)
    return blake3.blake3(told.encode("utf-8", "surrogatepass")).digest(16)
