"""KV of sliding-window layers, which never look further back than `window` tokens."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve_common.errors import EngineError


class SlidingWindow:
    """Pages of a pool of its own that hang on leading pages.

    A page is pinned by requests that have it in their window. What is pinned by nobody goes when room is short, the
    page that was let go of first before others; so a prompt's middle gives its window KV up while its full attention
    stays. A prefix can be resumed where the last `window` tokens before are there.

    allocator: of the window's slots. num_slots: leading slots, dummy page included. window: in tokens.
    """

    def __init__(self, allocator: TokenToKVPoolAllocator, *, num_slots: int, window: int) -> None:
        self.window = window
        self._allocator = allocator
        self._size = allocator.page_size
        self._page_of = np.zeros(num_slots // self._size, dtype=np.int64)  # leading page -> its own; 0: none
        self._pins = np.zeros(num_slots // self._size, dtype=np.int64)
        self._loose: OrderedDict[int, None] = OrderedDict()  # leading pages that nobody pins, in order of that

    def available_size(self) -> int:
        """Tokens that there is room for, free or to be had by eviction."""
        return self._allocator.available_size() + self.evictable_size()

    def evictable_size(self) -> int:
        """Cached tokens that nobody pins."""
        return len(self._loose) * self._size

    def alloc(self, slots: np.ndarray) -> bool:
        """Room for tokens at leading slots (int64 [n]), pinned; pages of these that have room already are the
        request's own last ones, and stay as they are. False, and nothing changed, if there is too little."""
        pages = np.unique(slots // self._size)
        pages = pages[self._page_of[pages] == 0]
        need = len(pages) * self._size
        if need > self.available_size():
            return False
        while self._allocator.available_size() < need:
            self._drop(next(iter(self._loose)))
        if need:
            own = self._allocator.alloc_extend(0, need, -1)
            assert own is not None
            self._page_of[pages] = own[:: self._size] // self._size
            self._pins[pages] = 1
        return True

    def locate(self, slots: np.ndarray) -> np.ndarray:
        """Where the KV of tokens at leading slots lies: int64 [n], in the dummy page for those whose KV is gone."""
        return self._page_of[slots // self._size] * self._size + slots % self._size

    def pin(self, slots: np.ndarray) -> None:
        """Keep the pages of leading slots (int64 [n]) for one more request. EngineError if one is gone."""
        pages = np.unique(slots // self._size)
        if (self._page_of[pages] == 0).any():
            raise EngineError(f"window KV of page {int(pages[self._page_of[pages] == 0][0])} is gone")
        for page in pages[self._pins[pages] == 0].tolist():
            del self._loose[page]
        self._pins[pages] += 1

    def unpin(self, slots: np.ndarray) -> None:
        """A request lets go of pages: they fell out of its window, or it ends. EngineError if nobody pins one."""
        pages = np.unique(slots // self._size)
        if (self._pins[pages] == 0).any():
            raise EngineError(f"window KV of page {int(pages[self._pins[pages] == 0][0])} is pinned by nobody")
        self._pins[pages] -= 1
        self._loose.update(dict.fromkeys(pages[self._pins[pages] == 0].tolist()))

    def resumable(self, slots: np.ndarray, length: int) -> int:
        """The last end of a page within the first `length` tokens with no gap in the `window` tokens before it."""
        firsts = slots[: length - length % self._size : self._size]
        ends = np.arange(1, len(firsts) + 1) * self._size
        gap_ends = np.maximum.accumulate(np.where(self._page_of[firsts // self._size] == 0, ends, 0))
        whole = np.flatnonzero((gap_ends == 0) | (gap_ends <= ends - self.window))
        return int(ends[whole[-1]]) if len(whole) else 0

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """See `CacheGroup`. Who pins `old` pins `new` from here on."""
        for page, other in zip(old.tolist(), new.tolist(), strict=True):
            if not self._page_of[page]:
                continue
            pins, self._pins[page] = self._pins[page], 0
            if self._page_of[other]:
                self._drop(page)
            else:
                self._loose.pop(page, None)
                self._page_of[other], self._page_of[page] = self._page_of[page], 0
            self._pins[other] += pins
            if self._pins[other]:
                self._loose.pop(other, None)
            else:
                self._loose.setdefault(other)

    def free_pages(self, pages: np.ndarray) -> None:
        """Also those that their only request still pins."""
        there = pages[self._page_of[pages] != 0]
        if (self._pins[there] > 1).any():
            raise EngineError(f"page {int(there[self._pins[there] > 1][0])} was freed while requests pin its window KV")
        self._pins[there] = 0
        for page in there.tolist():
            self._drop(page)

    def _drop(self, page: int) -> None:
        self._loose.pop(page, None)
        self._allocator.free(self._page_of[page : page + 1] * self._size)
        self._page_of[page] = 0
