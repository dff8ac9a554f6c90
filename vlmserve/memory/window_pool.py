"""The slots of layers whose tokens see the last tokens only (sliding windows): a pool of their own."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class WindowPool:
    """Pages of KV of the layers with windows. Each belongs to a page of KV of the other layers, and holds the same
    tokens.

    Requests and the prefix tree know the pages of the other layers only, called pages here. A page has KV in this pool
    while requests hold it: those that have it in their window, or write to it. When no request does, its KV is kept as
    long as the page lasts, or until the pool is short. Then what is worth less goes first, and of that the least
    recently used.

    size: tokens, a multiple of page_size. window: tokens that a token sees, itself included. num_slots: of the other
    layers, dummy page included. Slot 0 .. page_size - 1 of this pool is a dummy page, too.
    """

    def __init__(self, size: int, *, window: int, num_slots: int, page_size: int) -> None:
        self.size, self.window = size, window
        self._page_size = page_size
        self._place = np.zeros(num_slots // page_size, dtype=np.int64)  # of a page's KV in this pool, 0: none
        self._holders = np.zeros(num_slots // page_size, dtype=np.int64)
        self._free = list(range(size // page_size, 0, -1))
        # pages without holders, by what they are worth, the least recently used first
        self._kept: tuple[OrderedDict[int, None], ...] = OrderedDict(), OrderedDict()

    def available_size(self) -> int:
        """Return the tokens that there is room for, if what is kept is dropped."""
        return (len(self._free) + sum(map(len, self._kept))) * self._page_size

    def first_page(self, end: int) -> int:
        """Return the number of the first page of a request that its tokens from number `end` on can see."""
        return max(0, end + 1 - self.window) // self._page_size

    def seen_behind(self, slots: np.ndarray) -> np.ndarray:
        """Return the pages, int64, that a token behind a prefix sees. slots: of the other layers, of whole pages, int64
        [n]."""
        return slots[self.first_page(len(slots)) * self._page_size :: self._page_size] // self._page_size

    def add(self, pages: np.ndarray) -> None:
        """Make room for new pages (int64 [n]), which a request holds. There must be enough."""
        for page in pages.tolist():
            if not self._free:
                self._drop(next(page for kept in self._kept for page in kept))
            self._place[page] = self._free.pop()
        self._holders[pages] = 1

    def hold(self, pages: np.ndarray) -> None:
        """Let one more request hold pages (int64 [n]) that have KV here."""
        for page in pages[self._holders[pages] == 0].tolist():
            self._take_out(page)
        self._holders[pages] += 1

    def let_go(self, pages: np.ndarray, *, worth: int = 1) -> None:
        """Let one request less hold pages (int64 [n]). Where it was the last one, KV that is worth 1 is kept, and so is
        KV that is worth 0, which goes first. It is dropped at once if it is worth -1."""
        self._holders[pages] -= 1
        for page in pages[self._holders[pages] == 0].tolist():
            if worth < 0:
                self._drop(page)
            else:
                self._kept[worth][page] = None

    def resumable(self, slots: np.ndarray) -> int:
        """Return how many tokens of a cached prefix (whole pages; slots of the other layers, int64 [n]) a request can
        go on from: as many as there can be with the whole window before the next token."""
        size = self._page_size
        missing = self._place[slots[::size] // size] == 0
        numbers = np.arange(len(missing))
        behind_missing = np.maximum.accumulate(np.where(missing, numbers + 1, 0))
        first_seen = np.maximum(0, (numbers + 1) * size + 1 - self.window) // size
        good = np.flatnonzero(behind_missing <= first_seen)
        return (int(good[-1]) + 1) * size if len(good) else 0

    def slots(self, slots: np.ndarray) -> np.ndarray:
        """Return the slots in this pool of tokens in slots (int64 [n]) of the other layers; any of the dummy page for
        tokens without KV here."""
        return self._place[slots // self._page_size] * self._page_size + slots % self._page_size

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """Let a request hold pages `new`, the prefix tree's, in place of its own `old` (int64 [n]), as far as it holds
        these. They have the same tokens, and `old` are freed next. KV moves from pages `old` where `new` have none."""
        for ours, theirs in zip(old.tolist(), new.tolist(), strict=True):
            held = self._holders[ours]
            if self._place[ours] and not self._place[theirs]:
                self._place[theirs], self._place[ours] = self._place[ours], 0
                self._holders[theirs], self._holders[ours] = held, 0
                if not held:
                    self._kept[self._take_out(ours)][theirs] = None
            elif held:
                self.hold(np.array([theirs]))

    def free_pages(self, pages: np.ndarray) -> None:
        """Drop the KV of freed pages (int64 [n]), which one request may have held."""
        self._holders[pages] = 0
        for page in pages[self._place[pages] != 0].tolist():
            self._drop(page)

    def _take_out(self, page: int) -> int:
        """Take a page out of those without holders, if it is one. Return what it was worth."""
        worth = int(page in self._kept[1])
        self._kept[worth].pop(page, None)
        return worth

    def _drop(self, page: int) -> None:
        self._take_out(page)
        self._free.append(int(self._place[page]))
        self._place[page] = 0
