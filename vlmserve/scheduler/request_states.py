"""The states of recurrent layers: which one a request has, and which snapshots are kept for prompts that begin alike.

A request's state is its own from `begin` to `end`. Snapshots hang on KV slots, see `RecurrentStates`: first on the
request's own slots, later on the prefix cache's. A step makes them of the tokens that it computes anyway. Snapshots are
made at multiples of `unit` tokens only, where a page and a chunk of the delta rule end: so a request that continues one
gets the same state as an uncut prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from vlmserve.executor.model_worker_batch import StateSnapshot
from vlmserve.memory.recurrent_states import RecurrentStates, StateAdvance, StateCopy
from vlmserve.scheduler.req import Req
from vlmserve_common.compute.delta_rule import CHUNK


def snapshot_unit(page_size: int) -> int:
    """Return the number of tokens between places where snapshots can be."""
    return math.lcm(page_size, CHUNK)


class RequestStates:
    """Gives states to requests, and decides where snapshots are made.

    pool: knows who owns which state. unit: see above. snapshots: whether any are made. interval: tokens between
    snapshots, rounded up to multiples of the unit.

    More snapshots are made at the ends of prompts and of long chunks, and at the end of a picture or video with no
    other one for an interval behind it. A state is large: many snapshots close together would push out those of other
    prompts.
    """

    def __init__(self, pool: RecurrentStates, *, unit: int, interval: int, snapshots: bool) -> None:
        self.pool = pool
        self.unit = unit
        self._interval = -(-interval // unit) * unit
        self._snapshots = snapshots
        self._copies: dict[int, StateCopy] = {}

    @property
    def held(self) -> int:
        """Return how many states are neither free nor snapshots: 0 when idle."""
        return self.pool.size - self.pool.available_size()

    def begin(self, req: Req, last_slot: int | None) -> None:
        """Give a state to a request that continues behind this KV slot, where a snapshot is; None: from the
        beginning."""
        copy = self.pool.fork(last_slot)
        req.state = copy.target
        self._copies.pop(copy.target, None)  # left by a request that never ran
        self._copies[copy.target] = copy

    def take_over(self, req: Req) -> None:
        """Leave a request's new state as it is until somebody else writes to it."""
        assert req.state is not None, req.rid
        del self._copies[req.state]

    def end(self, req: Req) -> None:
        """Take the state of a request. Steps in flight may still write to it; the next owner overwrites that."""
        assert req.state is not None, req.rid
        self.pool.free_state(req.state)
        req.state, req.state_lag = None, 0

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies that must be done before the next step, in their order."""
        copies, self._copies = tuple(self._copies.values()), {}
        return copies

    def advances(
        self, parts: Iterable[tuple[Req, int, int]], slot_at: Callable[[Req, int], int]
    ) -> tuple[StateAdvance, ...]:
        """Return what takes the states of a step's requests behind the guesses of their last step that were right, with
        the snapshots on the way. parts, slot_at: those of `snapshots`."""
        found: dict[int, StateAdvance] = {}
        for req, start, _ in parts:
            if not req.state_lag:
                continue
            assert req.state is not None, req.rid
            assert req.req_pool_idx is not None, req.rid
            first, req.state_lag = start - req.state_lag, 0
            ends = {req.state: start}
            for place in self._places(req, first, start) if self._snapshots else ():
                copy = self.pool.snapshot(slot_at(req, place - 1), req.state)
                if copy is not None:
                    ends[copy.target] = place
            for target, end in ends.items():
                found[target] = StateAdvance(source=req.state, row=req.req_pool_idx, tokens=end - first, target=target)
        return tuple(found.values())

    def snapshots(
        self, parts: Iterable[tuple[Req, int, int]], slot_at: Callable[[Req, int], int]
    ) -> tuple[StateSnapshot, ...]:
        """Return the snapshots that a step makes.

        parts: a request and its tokens [start, end). slot_at: returns the KV slot of a request's token.
        """
        found: dict[int, StateSnapshot] = {}
        if self._snapshots:
            for index, (req, start, end) in enumerate(parts):
                assert req.state is not None, req.rid
                for place in self._places(req, start, end):
                    copy = self.pool.snapshot(slot_at(req, place - 1), req.state)
                    if copy is not None:  # the last one counts: if room is short, one may take another one's place
                        found[copy.target] = StateSnapshot(index=index, tokens=place - start, target=copy.target)
        return tuple(found.values())

    def _places(self, req: Req, start: int, end: int) -> list[int]:
        """Return the numbers of tokens in (start, end] behind which snapshots are made, ascending."""
        first = start // self._interval + 1
        wanted = {place * self._interval for place in range(first, end // self._interval + 1)}
        if start < req.prompt_len:
            # an equal prompt goes on from its last token but one, at the latest
            ends = [req.prompt_len - 1, *self._media_ends(req)]
            ends += [end] if end - start >= self._interval else []
            wanted |= {last // self.unit * self.unit for last in ends}
        return sorted(place for place in wanted if start < place <= end)

    def _media_ends(self, req: Req) -> list[int]:
        ends = req.media.ends
        return [last for last, after in zip(ends, (*ends, math.inf)[1:], strict=True) if after - last >= self._interval]
