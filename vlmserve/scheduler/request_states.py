"""Which state of the recurrent layers each request has, and which are kept for prompts that begin alike.

A request's state is its own from `begin` to `end`. Snapshots hang on KV slots (see `RecurrentStates`), first on the
request's own and, as these go over to the prefix cache, on that's. They are made within the steps that compute the
tokens before them, so nothing is computed for their sake alone; and only at multiples of `unit` tokens, where a page
and a chunk of the delta rule end, so that who goes on from one gets what an uncut prompt would have got.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from vlmserve.executor.model_worker_batch import StateSnapshot
from vlmserve.memory.recurrent_states import RecurrentStates, StateCopy
from vlmserve.scheduler.req import Req
from vlmserve_common.compute.delta_rule import CHUNK


def snapshot_unit(page_size: int) -> int:
    """Tokens between places where snapshots can be."""
    return math.lcm(page_size, CHUNK)


class RequestStates:
    """pool: who owns which state. unit: see above. snapshots: whether any are to be made.

    interval: tokens between snapshots, rounded up to multiples of the unit. Others are at the end of a prompt, of its
    last picture or video, of those with nothing of the kind for an interval behind them, and of long chunks: a state
    is large, so many close to each other would only push those of other prompts out.
    """

    def __init__(self, pool: RecurrentStates, *, unit: int, interval: int, snapshots: bool) -> None:
        self.pool = pool
        self.unit = unit
        self._interval = -(-interval // unit) * unit
        self._snapshots = snapshots
        self._copies: dict[int, StateCopy] = {}

    @property
    def held(self) -> int:
        """States that are neither free nor snapshots: none, when idle."""
        return self.pool.size - self.pool.available_size()

    def begin(self, req: Req, last_slot: int | None) -> None:
        """A state for a request that goes on behind this KV slot, where a snapshot is; None: from the beginning."""
        copy = self.pool.fork(last_slot)
        assert copy is not None, "there are more states than requests"
        req.state = copy.target
        self._copies.pop(copy.target, None)  # of a request that never ran
        self._copies[copy.target] = copy

    def end(self, req: Req) -> None:
        """A request gives its state up. What steps in flight write to it, whoever gets it overwrites."""
        assert req.state is not None, req.rid
        self.pool.free_state(req.state)
        req.state = None

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Those to be done before the next step, in their order."""
        copies, self._copies = tuple(self._copies.values()), {}
        return copies

    def snapshots(
        self, parts: Iterable[tuple[Req, int, int]], slot_at: Callable[[Req, int], int]
    ) -> tuple[StateSnapshot, ...]:
        """Those to be made by a step that computes tokens [start, end) of these requests. slot_at: the KV slot of a
        request's token."""
        found: dict[int, StateSnapshot] = {}
        if self._snapshots:
            for index, (req, start, end) in enumerate(parts):
                assert req.state is not None, req.rid
                for place in self._places(req, start, end):
                    copy = self.pool.snapshot(slot_at(req, place - 1), req.state)
                    if copy is not None:  # the last one counts, where room is so short that one takes another's place
                        found[copy.target] = StateSnapshot(index=index, tokens=place - start, target=copy.target)
        return tuple(found.values())

    def _places(self, req: Req, start: int, end: int) -> list[int]:
        """Numbers of tokens in (start, end], ascending."""
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
