"""Which of the items that are found need work, and how they are to be asked."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import blake3

from vlmserve.commands.batch.item import Failed, Found, Item, MediumItem
from vlmserve.commands.caption.errors_file import ErrorsFile
from vlmserve.commands.caption.journal import Journal
from vlmserve.commands.caption.outputs.base import Output
from vlmserve.commands.caption.prompts import Prompts
from vlmserve.commands.caption.result import Tally, Work
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The part of all items whose number, told by their ids, is `index` of `count`."""

    index: int = 0
    count: int = 1

    def has(self, id_: str) -> bool:
        """Whether the item of this id is in it."""
        digest = blake3.blake3(id_.encode("utf-8", "surrogatepass")).digest(8)
        return self.count == 1 or int.from_bytes(digest, "little") % self.count == self.index


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the parts of a run have in common. Everything stays its owner's to close."""

    prompts: Prompts
    journal: Journal
    output: Output
    errors: ErrorsFile
    tally: Tally


class Feed:
    """Pulled by one thread at a time. limit: items looked at, at most. retry_failed: try again what failed before."""

    def __init__(
        self,
        found: Iterator[Found],
        shared: Shared,
        *,
        shard: Shard,
        limit: int | None = None,
        retry_failed: bool = False,
    ) -> None:
        self._found = found
        self._prompts = shared.prompts
        self._journal = shared.journal
        self._output = shared.output
        self._tally = shared.tally
        self._shard = shard
        self._left = limit
        self._retry_failed = retry_failed
        self._lock = threading.Lock()
        self._in_work: dict[str, Work] = {}  # by ids
        self._targets: dict[str, str] = {}  # file -> id
        self._stopped = False

    def next(self) -> Work | Failed | None:
        """The next item that needs work, or that failed as it is; None at the end. Blocks as long as reading does."""
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
            work = self._consider(found)
            if work is not None:
                return work
        return None

    def finished(self, work: Work) -> None:
        """The journal has it, or it failed."""
        with self._lock:
            self._in_work.pop(work.item.id, None)
            if work.target is not None:
                self._targets.pop(work.target, None)

    def stop(self) -> None:
        """`next` has no more from now on."""
        self._stopped = True

    def _consider(self, item: Item) -> Work | Failed | None:
        asked, options = None, {}
        if isinstance(item, MediumItem):
            if self._output.by_path and item.path is not None:
                item = replace(item, id=os.path.abspath(item.path))
            options = dict(item.options)
            try:
                asked = self._prompts.ask(item)
            except BadRequestError as error:
                key = _key(item, {"fields": dict(item.fields), "prompt": item.prompt})
                return self._unless_known(Work(item=item, key=key).failed(error.message, error.code))
        target = self._output.target(item)
        key = _key(item, {"asked": None if asked is None else asked.texts, "options": options})
        work = Work(item=item, key=key, asked=asked, target=target)
        # in this order: what is in work goes to the journal first, and is then forgotten here
        in_work = self._in_work.get(item.id)
        done = self._journal.done_as(item.id)
        in_this_run = in_work is not None or (done is not None and done[2] == self._journal.run)
        if in_this_run and key == (in_work.key if in_work else done and done[0]):
            self._tally.repeated += 1
            return None
        if done is not None and done[0] == key and item.signature is not None:
            trouble = self._output.check(item)
            if trouble is not None:
                return self._unless_known(work.failed(trouble, "no_place"))
            self._tally.skipped += 1
            return None
        if in_this_run:
            why = f"two different items have the id {item.id!r}: give each its own"
            return Failed(id=item.id, message=why, code="same_id")
        if self._is_known(item.id, key):
            return None
        owner = None if target is None else self._targets.get(target)
        refusal = f"{target} is the caption of {owner}" if owner else self._output.refusal(item, target)
        if refusal is not None:
            return work.failed(refusal, "no_place")
        with self._lock:
            self._in_work[item.id] = work
            if target is not None:
                self._targets[target] = item.id
        return work

    def _unless_known(self, failed: Failed) -> Failed | None:
        return None if self._is_known(failed.id, failed.key) else failed

    def _is_known(self, id_: str, key: bytes | None) -> bool:
        """Whether it failed before, and is not to be tried again."""
        known = not self._retry_failed and key is not None and self._journal.has_failed(id_, key)
        self._tally.failed_before += known
        return known


def _key(item: Item, how: Mapping[str, Any]) -> bytes:
    """Of what can be known of an item, and of how it is asked, without reading it."""
    told = json.dumps([item.signature, how], sort_keys=True, default=str)
    return blake3.blake3(told.encode("utf-8", "surrogatepass")).digest(16)
