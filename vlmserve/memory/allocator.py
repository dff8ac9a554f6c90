"""Hands out KV slots, in pages, so that a request's slots stay in few contiguous runs.

Attention reads a contiguous run of slots without a gather, so the place of a page matters. A free page is in a *room*
or in *open* space. A room begins right behind the last page of a request and is kept for its growth. Another request
may use it only if open space is too small. Then the largest room gives up its far half, as often as needed.

A request first grows in place, into its room and the open pages behind. If it cannot, it takes the shortest open run
that holds its new pages and its room, else the longest run, else several.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from vlmserve_common.errors import EngineError

_START_BITS = 40
_START_MASK = (1 << _START_BITS) - 1


class PageExtents:
    """A set of pages as disjoint runs (start, length), found by place or by length. Runs that touch are merged.

    Finding a run is O(log n) in the number of runs. Changing one also moves the tail of a sorted list of integers:
    microseconds at the 50 000 runs that a pool of 100 000 pages can have at the worst.
    """

    def __init__(self) -> None:
        self._length: dict[int, int] = {}  # start -> length
        self._start: dict[int, int] = {}  # end -> start
        self._by_length: list[int] = []  # length << _START_BITS | start, sorted
        self.total = 0

    def length_at(self, start: int) -> int:
        """Return the length of the run that begins at `start`, 0 if none does."""
        return self._length.get(start, 0)

    def add(self, start: int, length: int) -> None:
        """Add pages [start, start + length), none of which is in the set; 0 pages are nothing."""
        if not length:
            return
        before = self._start.get(start)
        if before is not None:
            length += self.remove(before)
            start = before
        length += self.remove(start + length)
        self._length[start] = length
        self._start[start + length] = start
        insort(self._by_length, length << _START_BITS | start)
        self.total += length

    def remove(self, start: int) -> int:
        """Take out the run that begins at `start`; return its length, 0 if there is none."""
        length = self._length.pop(start, 0)
        if length:
            del self._start[start + length]
            del self._by_length[bisect_left(self._by_length, length << _START_BITS | start)]
            self.total -= length
        return length

    def take_front(self, start: int, count: int) -> int:
        """Take up to `count` pages off the front of the run that begins at `start`; return how many there were."""
        length = self._length.get(start, 0)
        if not 0 < count < length:
            return self.remove(start) if count > 0 else 0
        del self._length[start]
        start_left, length_left = start + count, length - count
        self._length[start_left] = length_left
        self._start[start + length] = start_left
        del self._by_length[bisect_left(self._by_length, length << _START_BITS | start)]
        insort(self._by_length, length_left << _START_BITS | start_left)
        self.total -= count
        return count

    def largest(self) -> tuple[int, int]:
        """Return (start, length) of a longest run; (0, 0) if the set is empty."""
        return self._decode(self._by_length[-1]) if self._by_length else (0, 0)

    def best_fit(self, count: int) -> tuple[int, int] | None:
        """Return (start, length) of the first among the shortest runs of at least `count` pages; None if there is
        none."""
        index = bisect_left(self._by_length, count << _START_BITS)
        return self._decode(self._by_length[index]) if index < len(self._by_length) else None

    @staticmethod
    def _decode(code: int) -> tuple[int, int]:
        return code & _START_MASK, code >> _START_BITS


class TokenToKVPoolAllocator:
    """The allocator of a `KVCache`'s slots.

    Slots 0..page_size-1 are a dummy page that padded rows may write to; it is never handed out. The usable slots are
    page_size .. page_size + size - 1. A page belongs to one holder at a time; the allocator only knows that it is held.

    size: usable slots (tokens), a multiple of page_size. on_free: called with the pages
    (int64 [n]) that are about to be free, and that snapshots of states may hang on.
    """

    def __init__(self, size: int, page_size: int) -> None:
        self.size = size
        self.page_size = page_size
        self._open = PageExtents()
        self._rooms = PageExtents()
        self._open.add(1, size // page_size)
        self._held = np.zeros(1 + size // page_size, dtype=np.bool_)
        self.on_free: Callable[[np.ndarray], None] | None = None

    def available_size(self) -> int:
        """Free tokens, in whole pages."""
        return (self._open.total + self._rooms.total) * self.page_size

    def pages_needed(self, prefix_len: int, seq_len: int) -> int:
        """Return the new pages that a request takes to grow from prefix_len to seq_len tokens."""
        return -(-seq_len // self.page_size) - -(-prefix_len // self.page_size)

    def tokens_needed(self, prefix_len: int, seq_len: int) -> int:
        """Return `pages_needed` in tokens: how much smaller `available_size` becomes."""
        return self.pages_needed(prefix_len, seq_len) * self.page_size

    def alloc_extend(self, prefix_len: int, seq_len: int, last_loc: int, room: int = 0) -> np.ndarray | None:
        """Allocate slots int64 [seq_len - prefix_len] for a request's tokens prefix_len..seq_len-1.

        last_loc: slot of token prefix_len - 1, or -1 if prefix_len is 0. If prefix_len does not end a page, that page
        must be the request's own: its rest is filled first. room: tokens by which the request is expected to grow; a
        wish, not a promise. Returns None, and changes nothing, if there are too few free pages.
        """
        size = self.page_size
        need = self.pages_needed(prefix_len, seq_len)
        if need > self._open.total + self._rooms.total:
            return None
        rest = -prefix_len % size  # of its last page
        runs = [np.arange(last_loc + 1, last_loc + 1 + rest, dtype=np.int64)] if rest else []
        if need:
            room_pages = self.pages_needed(seq_len, seq_len + room)
            for start, count in self._take(need, room_pages, last_loc // size + 1 if prefix_len else None):
                self._held[start : start + count] = True
                runs.append(np.arange(start * size, (start + count) * size, dtype=np.int64))
        slots = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return slots[: seq_len - prefix_len]

    def alloc_next_page(self, last_loc: int, room: int) -> int | None:
        """Allocate a request's next page, if possible behind slot `last_loc` that ends its last one. Return its first
        slot; None, and room, are as in `alloc_extend`."""
        size = self.page_size
        after = last_loc // size + 1
        if self._rooms.take_front(after, 1):  # the page that was kept for it
            page = after
            self._keep_room(page + 1, room // size)
        else:
            if not self._open.total + self._rooms.total:
                return None
            page = self._take(1, room // size, after)[0][0]
        self._held[page] = True
        return page * size

    def free(self, slots: np.ndarray) -> None:
        """Free every page that one of `slots` (int [n], any order) lies in, whole.

        Raises EngineError, and changes nothing, if one of these pages is not held.
        """
        if not len(slots):
            return
        pages = np.unique(slots // self.page_size)
        if pages[0] < 1 or pages[-1] >= len(self._held):
            bad = int(pages[0] if pages[0] < 1 else pages[-1]) * self.page_size
            raise EngineError(f"freed slot {bad}: outside of {self.page_size}..{self.page_size + self.size - 1}")
        held = self._held[pages]
        if not held.all():
            raise EngineError(f"freed page {int(pages[~held][0])}, which nobody holds (freed twice?)")
        if self.on_free is not None:
            self.on_free(pages)
        self._held[pages] = False
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        starts = pages[np.concatenate(([0], cuts))].tolist()
        ends = (pages[np.concatenate((cuts - 1, [len(pages) - 1]))] + 1).tolist()
        for start, end in zip(starts, ends, strict=True):
            # a room behind a freed page has no owner
            self._open.add(start, end - start + self._rooms.remove(end))

    def truncate(self, prefix_len: int, slots: np.ndarray) -> None:
        """Undo `alloc_extend(prefix_len, ...)`, or the end of it: take back a request's tokens behind the first
        prefix_len. `slots` (int [n]) are those tokens' slots.

        Pages that become empty are freed. A page that keeps tokens stays the request's own, and its rest is filled
        first when the request grows again. The pages behind are its room, as before.
        """
        pages = slots[-prefix_len % self.page_size :] // self.page_size
        if not len(pages):
            return
        first, last = int(pages[0]), int(pages[-1])
        room = last + 1 - first + self._rooms.length_at(last + 1)
        self.free(slots[-prefix_len % self.page_size :])
        # another request's run may have ended where this one begins; then no room begins here
        if prefix_len and self._open.length_at(first):
            self._keep_room(first, room)

    def release_room(self, last_loc: int) -> None:
        """Open the room behind slot `last_loc` (-1: none): its request will not grow any more."""
        if last_loc >= 0:
            end = last_loc // self.page_size + 1
            self._open.add(end, self._rooms.remove(end))

    def _take(self, need: int, room: int, after: int | None) -> list[tuple[int, int]]:
        """Take `need` free pages, beginning at page `after` if possible, and put up to `room` pages behind the last one
        aside. Return runs (start, count)."""
        runs = []
        if after is not None:
            grown = self._rooms.take_front(after, need)
            grown += self._open.take_front(after + grown, need - grown)
            if grown:
                runs.append((after, grown))
                need -= grown
        while need:
            start, length = self._find(need, room)
            count = self._open.take_front(start, min(need, length))
            assert count, "the caller has counted the free pages"
            runs.append((start, count))
            need -= count
        start, count = runs[-1]
        self._keep_room(start + count, room)
        return runs

    def _find(self, need: int, room: int) -> tuple[int, int]:
        """Find the open run (start, length) for `need` pages, and shrink rooms of other requests as far as it pays."""
        want = need + room
        while (longest := self._open.largest()[1]) < want and self._rooms.total:
            start, length = self._rooms.largest()
            if longest >= need and (length + 1) // 2 <= longest:
                break
            self._rooms.remove(start)
            self._rooms.add(start, length // 2)
            self._open.add(start + length // 2, length - length // 2)
        return self._open.best_fit(want) or self._open.largest()

    def _keep_room(self, at: int, room: int) -> None:
        have = self._rooms.length_at(at)
        if have < room:
            self._rooms.add(at + have, self._open.take_front(at + have, room - have))
