"""States of recurrent layers (linear attention, Mamba, gated delta nets): one for each request, and snapshots."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from vlmserve_common.errors import EngineError

BLANK = 0
"""The state that a prompt begins with. It is never handed out or written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCopy:
    """A copy of a state (convolution and recurrence of all recurrent layers), done on the model's thread before the
    next forward pass. Copies are done in order, so steps planned before a copy have been computed by then."""

    source: int
    target: int


class RecurrentStates:
    """The owners of states. Requests own those of `alloc_state` and `fork`, until `free_state`; the pool owns its
    snapshots.

    A recurrent state belongs to a whole prefix and cannot be cut. It exists only where a copy was kept, at the end of a
    chunk. Such a snapshot is attached to the leading slot of its prefix's last token, which ends a page. If states are
    short, unlocked snapshots are dropped, the least recently used first.

    num_states: without `BLANK`; states are 1 .. num_states. num_slots: leading slots, dummy page included.
    """

    def __init__(self, num_states: int, *, num_slots: int, page_size: int) -> None:
        self.size = num_states
        self._page_size = page_size
        self._free = list(range(num_states, 0, -1))
        self._held: set[int] = set()
        self._state_at = np.zeros(num_slots, dtype=np.int64)  # leading slot -> snapshot, BLANK: none
        self._locks: dict[int, int] = {}  # of leading slots
        self._unlocked: OrderedDict[int, None] = OrderedDict()  # leading slots, the least recently used first

    def available_size(self) -> int:
        """Return the states that are free, or would be after dropping snapshots."""
        return len(self._free) + len(self._unlocked)

    def evictable_size(self) -> int:
        """Return the snapshots that are not locked. When idle, these and the free states are all states."""
        return len(self._unlocked)

    def alloc_state(self) -> int | None:
        """Allocate a state, with any content, for a request; None if all are in use."""
        if not self._free and self._unlocked:
            self._drop(next(iter(self._unlocked)))
        if not self._free:
            return None
        state = self._free.pop()
        self._held.add(state)
        return state

    def free_state(self, state: int) -> None:
        """Take a request's state back. EngineError if no request owns it."""
        if state not in self._held:
            raise EngineError(f"state {state} of {self.size} is not a request's")
        self._held.remove(state)
        self._free.append(state)

    def fork(self, slot: int | None) -> StateCopy | None:
        """Allocate a state for a request that goes on behind leading slot `slot` (None: that begins). Return the copy
        that fills it; None if all are in use. EngineError without a snapshot there."""
        source = BLANK
        if slot is not None:
            self.lock(slot)  # it counts as used, and is not given up for its own copy
            source = int(self._state_at[slot])
        target = self.alloc_state()
        if slot is not None:
            self.unlock(slot)
        return None if target is None else StateCopy(source=source, target=target)

    def snapshot(self, slot: int, state: int) -> StateCopy | None:
        """Keep a copy of a request's state for the prefix that ends with leading slot `slot`, which the prefix tree
        owns. None if there is a snapshot already, which counts as used, or no room."""
        if (slot + 1) % self._page_size:
            raise EngineError(f"a snapshot behind slot {slot}, which does not end a page of {self._page_size}")
        if self._state_at[slot] != BLANK:
            self.lock(slot)
            self.unlock(slot)
            return None
        target = self.alloc_state()
        if target is None:
            return None
        self._held.remove(target)
        self._state_at[slot] = target
        self._unlocked[slot] = None
        return StateCopy(source=state, target=target)

    def lock(self, slot: int) -> None:
        """Keep a snapshot until as many calls of `unlock`. EngineError if there is none."""
        if self._state_at[slot] == BLANK:
            raise EngineError(f"no snapshot behind slot {slot}")
        self._unlocked.pop(slot, None)
        self._locks[slot] = self._locks.get(slot, 0) + 1

    def unlock(self, slot: int) -> None:
        """Undo `lock`; it counts as used now. EngineError if it is not locked."""
        if slot not in self._locks:
            raise EngineError(f"the snapshot behind slot {slot} was unlocked more often than it was locked")
        self._locks[slot] -= 1
        if not self._locks[slot]:
            del self._locks[slot]
            self._unlocked[slot] = None

    def resumable(self, slots: np.ndarray, length: int) -> int:
        """Return the end of the last snapshot within the first `length` tokens."""
        kept = np.flatnonzero(self._state_at[slots[:length]])
        return int(kept[-1]) + 1 if len(kept) else 0

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """Move snapshots from pages `old` to pages `new`. A moved one counts as used; a locked one stays."""
        for slot, other in zip(self._ends(old).tolist(), self._ends(new).tolist(), strict=True):
            if slot in self._unlocked and self._state_at[other] == BLANK:
                del self._unlocked[slot]
                self._unlocked[other] = None
                self._state_at[other], self._state_at[slot] = self._state_at[slot], BLANK

    def free_pages(self, pages: np.ndarray) -> None:
        """Drop the snapshots of freed pages. EngineError, and nothing changed, if one is locked."""
        ends = self._ends(pages)
        slots = ends[self._state_at[ends] != BLANK].tolist()
        locked = [slot for slot in slots if slot in self._locks]
        if locked:
            raise EngineError(f"slot {locked[0]} was freed while the snapshot behind it is locked")
        for slot in slots:
            self._drop(slot)

    def _ends(self, pages: np.ndarray) -> np.ndarray:
        return (pages + 1) * self._page_size - 1

    def _drop(self, slot: int) -> None:
        del self._unlocked[slot]
        self._free.append(int(self._state_at[slot]))  # the pool's until now
        self._state_at[slot] = BLANK
