"""Which of the items that are found need work, and how they are to be asked."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import blake3

from vlmserve.caption.item import Found, Item, MediumItem, Unreadable
from vlmserve.caption.journal import Failed, Journal
from vlmserve.caption.outputs.base import Output
from vlmserve.caption.prompts import Asked, Prompts
from vlmserve.caption.tally import Tally
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """An item to be captioned. key, target: see `journal.Done`. asked: None for a request, which asks by itself."""

    item: Item
    key: bytes
    asked: Asked | None
    target: str | None


class Feed:
    """Pulled by one thread at a time. limit: items looked at, at most. retry_failed: try again what failed before."""

    def __init__(
        self,
        found: Iterator[Found],
        *,
        prompts: Prompts,
        journal: Journal,
        output: Output,
        tally: Tally,
        shard: Shard,
        limit: int | None = None,
        retry_failed: bool = False,
    ) -> None:
        self._found = found
        self._prompts = prompts
        self._journal = journal
        self._output = output
        self._tally = tally
        self._shard = shard
        self._left = limit
        self._retry_failed = retry_failed
        self._lock = threading.Lock()
        self._ids: dict[str, bytes] = {}  # of what is in work: id -> key
        self._targets: dict[str, str] = {}  # file -> id
        self._stopped = False

    def next(self) -> Work | Failed | None:
        """The next item that needs work, or that failed as it is; None at the end. Blocks as long as reading does."""
        while not self._stopped and self._left != 0:
            found = next(self._found, None)
            if found is None:
                return None
            if isinstance(found, Unreadable):
                return Failed(id=found.id, key=None, message=found.message, code=found.code)
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
            self._ids.pop(work.item.id, None)
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
                return self._unless_known(item, key, error.message, error.code)
        key = _key(item, {"asked": _texts(asked), "options": options})
        # in this order: what is in work goes to the journal first, and is then forgotten here
        in_work = self._ids.get(item.id)
        done = self._journal.done_as(item.id)
        in_this_run = in_work is not None or (done is not None and done[2] == self._journal.run)
        if in_this_run and key == (in_work or (done and done[0])):
            self._tally.repeated += 1
            return None
        if done is not None and done[0] == key and item.signature is not None:
            trouble = self._output.check(item)
            if trouble is not None:
                return self._unless_known(item, key, trouble, "no_place")
            self._tally.skipped += 1
            return None
        if in_this_run:
            why = f"two different items have the id {item.id!r}: give each its own"
            return Failed(id=item.id, key=None, message=why, code="same_id")
        if not self._retry_failed and self._journal.has_failed(item.id, key):
            self._tally.failed_before += 1
            return None
        target = self._output.target(item)
        owner = None if target is None else self._targets.get(target)
        refusal = f"{target} is the caption of {owner}" if owner else self._output.refusal(item, target)
        if refusal is not None:
            return self._unless_known(item, key, refusal, "no_place")
        with self._lock:
            self._ids[item.id] = key
            if target is not None:
                self._targets[target] = item.id
        return Work(item=item, key=key, asked=asked, target=target)

    def _unless_known(self, item: Item, key: bytes, message: str, code: str | None) -> Failed | None:
        if not self._retry_failed and self._journal.has_failed(item.id, key):
            self._tally.failed_before += 1
            return None
        return Failed(id=item.id, key=key, message=message, code=code)


def _key(item: Item, how: Mapping[str, Any]) -> bytes:
    """Of what can be known of an item, and of how it is asked, without reading it."""
    told = json.dumps([item.signature, how], sort_keys=True, default=str)
    return blake3.blake3(told.encode("utf-8", "surrogatepass")).digest(16)


def _texts(asked: Asked | None) -> list[str] | None:
    return None if asked is None else [asked.prompt, asked.prefix, asked.suffix]
