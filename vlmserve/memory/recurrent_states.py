"""States of recurrent layers (linear attention, Mamba, gated delta nets): one for each request, and snapshots."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

BLANK = 0
"""The state that a prompt begins with. It is never handed out or written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCopy:
    """A copy of a state (convolution and recurrence of all recurrent layers), done on the model's thread before the
    next forward pass. Copies are done in order, so steps planned before a copy have been computed by then."""

    source: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateAdvance:
    """State `target` becomes state `source` behind the first `tokens` tokens, above 0, of a request's last step, which
    checked guesses. row: the request's. Done behind all copies, at once with others: sources are read first."""

    source: int
    row: int
    tokens: int
    target: int


class RecurrentStates:
    """The owners of states. Requests own those of `fork`, until `free_state`; the pool owns its snapshots.

    A recurrent state belongs to a whole prefix and cannot be cut. It exists only where a copy was kept, at the end of a
    chunk. Such a snapshot is attached to the KV slot of its prefix's last token, which ends a page. A held slot stands
    for one token of one prefix, in the prefix tree or in a request, so the pool knows neither of them. When a page is
    freed, its snapshot is dropped. If states are short, snapshots are dropped, the least recently used first.

    num_states: without `BLANK`; states are 1 .. num_states. num_slots: KV slots, dummy page included.
    """

    def __init__(self, num_states: int, *, num_slots: int, page_size: int) -> None:
        self.size = num_states
        self._page_size = page_size
        self._free = list(range(num_states, 0, -1))
        self._state_at = np.zeros(num_slots, dtype=np.int64)  # slot -> snapshot, BLANK: none
        self._snapshots: OrderedDict[int, None] = OrderedDict()  # their slots, the least recently used first

    def available_size(self) -> int:
        """Return the states that are free, or would be after dropping snapshots."""
        return len(self._free) + len(self._snapshots)

    def fork(self, slot: int | None) -> StateCopy:
        """Give a state to a request that goes on behind the snapshot at `slot` (None: that begins). Return the copy
        that fills it. There must be a state for each request."""
        source = BLANK if slot is None else int(self._state_at[slot])
        assert slot is None or source != BLANK, f"no snapshot behind slot {slot}"
        if slot is not None:
            del self._snapshots[slot]  # it is not given up for its own copy
        target = self._alloc()
        if slot is not None:
            self._snapshots[slot] = None
        assert target is not None, "there are more states than requests"
        return StateCopy(source=source, target=target)

    def free_state(self, state: int) -> None:
        """Take a request's state back."""
        self._free.append(state)

    def snapshot(self, slot: int, state: int) -> StateCopy | None:
        """Keep a copy of a request's state for the prefix that ends with `slot`. None if there is a snapshot already,
        which counts as used, or no room."""
        assert (slot + 1) % self._page_size == 0, f"slot {slot} does not end a page"
        if self._state_at[slot] != BLANK:
            self._snapshots.move_to_end(slot)
            return None
        target = self._alloc()
        if target is None:
            return None
        self._state_at[slot] = target
        self._snapshots[slot] = None
        return StateCopy(source=state, target=target)

    def resumable(self, slots: np.ndarray) -> int:
        """Return how many tokens of a cached prefix (KV slots int64 [n]) a request can go on from: the end of the last
        snapshot."""
        kept = np.flatnonzero(self._state_at[slots])
        return int(kept[-1]) + 1 if len(kept) else 0

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """Move snapshots from pages `old` to pages `new` (int64 [n]) where these have none. A moved one counts as used.
        A request is about to use `new`, the prefix tree's, in place of its own `old`, which hold the same tokens and
        are freed next."""
        for slot, other in zip(self._ends(old).tolist(), self._ends(new).tolist(), strict=True):
            if slot in self._snapshots and self._state_at[other] == BLANK:
                del self._snapshots[slot]
                self._snapshots[other] = None
                self._state_at[other], self._state_at[slot] = self._state_at[slot], BLANK

    def free_pages(self, pages: np.ndarray) -> None:
        """Drop the snapshots of freed pages (int64 [n])."""
        ends = self._ends(pages)
        for slot in ends[self._state_at[ends] != BLANK].tolist():
            self._drop(slot)

    def _alloc(self) -> int | None:
        if not self._free and self._snapshots:
            self._drop(next(iter(self._snapshots)))
        return self._free.pop() if self._free else None

    def _ends(self, pages: np.ndarray) -> np.ndarray:
        return (pages + 1) * self._page_size - 1

    def _drop(self, slot: int) -> None:
        del self._snapshots[slot]
        self._free.append(int(self._state_at[slot]))  # the pool's until now
        self._state_at[slot] = BLANK
