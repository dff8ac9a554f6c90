"""Both ends of a hand-over, on the scheduler's side: which requests it is about, and whose slots are whose meanwhile.

A decode server computes a prompt's last token itself, in a step that it makes anyway. So all that is handed over is
what a prefix cache holds: KV of the tokens before, and the recurrent state behind them. Sampling, grammars, penalties,
logprobs and drafts know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol
from uuid import uuid4

import numpy as np

from vlmserve.disaggregation.messages import Arrived, Complete, Computed, Failed, Order
from vlmserve.ipc.messages import (
    AbortReq,
    HandoverStats,
    InputEmbeds,
    SamplingParams,
    SchedulerOutput,
    TokenizedGenerateReqInput,
)
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.schedule_batch import ScheduleBatch
from vlmserve_common.process.wake_up import Mailbox


class Sender(Protocol):
    """The link of a prefill server to its decode servers, see `KVSender`."""

    @property
    def fd(self) -> int: ...
    def take(self) -> list[TokenizedGenerateReqInput | AbortReq]: ...
    def noting(self, send: Callable[[SchedulerOutput], None]) -> Callable[[SchedulerOutput], None]: ...
    def is_room(self, rid: str) -> bool: ...
    def start_of(self, room: str) -> int: ...
    def tell(self, message: Computed | Complete | Failed) -> None: ...


class Receivers(Protocol):
    """The links of a decode server to prefill servers, see `KVReceivers`."""

    @property
    def up(self) -> bool: ...
    def order(self, order: Order, reply: Mailbox[Arrived]) -> None: ...
    def cancel(self, room: str) -> None: ...


class HandedPrompts:
    """Prompts that this server computes for others. group: of attention, whose ranks hold the KV."""

    def __init__(self, kv: KVCacheManager, sender: Sender, *, group: int) -> None:
        self._kv, self._sender, self._group = kv, sender, group
        self._told: dict[str, int] = {}  # tokens of each room that the other server knows of
        self._held: set[str] = set()

    @property
    def holds(self) -> bool:
        """Whether slots are kept for others to read."""
        return bool(self._held)

    def stats(self) -> HandoverStats:
        """Return figures of this moment."""
        return HandoverStats(inflight=len(self._held))

    def is_read(self, req: Req) -> bool:
        """Return True if others may be reading a request's slots: it must keep them, or fail."""
        return req.rid in self._told

    def computed(self, req: Req) -> None:
        """Tell of the tokens that a step has computed. Their slots must be final: without a prefix cache all are, with
        one the whole pages in it."""
        if self._sender.is_room(req.rid):
            shares = self._kv.prefix_cache.shares
            self._tell(req, req.protected_len if shares else req.kv_committed_len)

    def complete(self, req: Req) -> bool:
        """Tell that a prompt is computed. Returns whether the request is a room's: then it keeps its slots and state
        until the scheduler is told to end it."""
        if not self._sender.is_room(req.rid):
            return False
        self._tell(req, req.kv_committed_len)
        state = -1 if req.state is None else req.state
        self._sender.tell(
            Complete(room=req.rid, end=req.kv_committed_len, state=state, cached_tokens=req.cached_tokens)
        )
        self._held.add(req.rid)
        return True

    def ended(self, req: Req) -> None:
        """Forget a request that ends."""
        self._told.pop(req.rid, None)
        self._held.discard(req.rid)

    def _tell(self, req: Req, end: int) -> None:
        start = self._told.get(req.rid, self._sender.start_of(req.rid))
        if end > start:
            slots = self._kv.slots(req, start, end)
            self._sender.tell(Computed(room=req.rid, group=self._group, start=start, slots=slots))
            self._told[req.rid] = end


class RemotePrompts:
    """Requests of this server whose prompts others compute. group: of attention, which the requests belong to.

    A request has its slots before its prompt is ordered. The order waits until no step in flight can write to these
    slots for their owner before. A request that ends keeps its slots until nothing is written to them any more.
    """

    def __init__(self, kv: KVCacheManager, receivers: Receivers, *, group: int) -> None:
        self._kv, self._receivers, self._group = kv, receivers, group
        self._name, self._numbers = uuid4().hex, count()
        self._arrived: Mailbox[Arrived] = Mailbox()
        self._reqs: dict[str, Req] = {}  # by room
        self._given: list[tuple[Req, list[ScheduleBatch]]] = []  # not ordered yet, with what was in flight
        self._prompts = self._tokens = self._failed = 0

    @property
    def fd(self) -> int:
        """Readable when `take` has something."""
        return self._arrived.fd

    @property
    def busy(self) -> bool:
        """Whether a request waits for its KV, or holds slots that are still written to."""
        return bool(self._reqs or self._given)

    def stats(self) -> HandoverStats:
        """Return figures of this moment."""
        return HandoverStats(
            transferring=len(self._reqs) + len(self._given),
            prompts_total=self._prompts,
            tokens_total=self._tokens,
            failed_total=self._failed,
        )

    def wants(self, req: Req) -> bool:
        """Return True if a request's prompt is to be computed elsewhere, where there is a server for it. Logprobs of a
        prompt, a mean over it, and a last token that is a picture's need the prompt here."""
        if req.computed_here or not self._receivers.up:
            return False
        if req.prompt_scores is not None or req.matchable_len < req.fill_len - 1:
            return False
        if req.input_embeds is not None and req.output_ids:
            return False
        return not any(end >= req.fill_len for end in req.media.ends)

    def begin(self, req: Req, in_flight: Sequence[ScheduleBatch]) -> None:
        """Order the KV that a request has slots for, once the steps in flight have come."""
        req.awaits_kv = True
        if self._kv.states is not None:
            self._kv.states.take_over(req)
        req.times.prefill_began()
        self._given.append((req, list(in_flight)))
        self.order_due(in_flight)

    def order_due(self, in_flight: Sequence[ScheduleBatch]) -> None:
        """Order what no longer waits for steps in flight."""
        waiting = []
        for req, batches in self._given:
            if any(batch in in_flight for batch in batches):
                waiting.append((req, batches))
                continue
            room = f"{self._name}-{next(self._numbers)}"
            self._reqs[room] = req
            order = Order(
                request=_prompt(req, room),
                start=req.kv_len,
                own_slots=self._kv.slots(req, req.kv_len, req.kv_allocated_len),
                own_state=-1 if req.state is None else req.state,
                group=self._group,
            )
            self._receivers.order(order, self._arrived)
        self._given = waiting

    def cancel(self, req: Req) -> bool:
        """Give up waiting for a request that ends. Returns whether it must keep its slots until `take` brings it."""
        if not req.awaits_kv:
            return False
        given = [entry for entry in self._given if entry[0] is not req]
        if len(given) < len(self._given):
            self._given, req.awaits_kv = given, False
            return False
        self._receivers.cancel(next(room for room, one in self._reqs.items() if one is req))
        return True

    def take(self) -> list[tuple[Req, Arrived]]:
        """Return the requests whose KV has come, or does not come; nothing writes to their slots any more."""
        found = []
        for arrived in self._arrived.take():
            req = self._reqs.pop(arrived.room)
            req.awaits_kv = False
            if arrived.failure is None and not req.is_finished:
                self._prompts, self._tokens = self._prompts + 1, self._tokens + req.kv_allocated_len - req.kv_len
                req.kv_len = req.kv_allocated_len
                self._kv.commit(req, req.kv_len)
                self._kv.share(req)
                if not req.output_ids:
                    req.cached_tokens = max(req.cached_tokens, arrived.cached_tokens)
            self._failed += arrived.failure is not None and not req.is_finished
            found.append((req, arrived))
        return found


def _prompt(req: Req, room: str) -> TokenizedGenerateReqInput:
    """Return all tokens of a request but the last one, as a prompt without an answer."""
    end = req.fill_len - 1
    media, embeds = req.mm_inputs, req.input_embeds
    return TokenizedGenerateReqInput(
        rid=room,
        input_ids=np.ascontiguousarray(req.fill_ids(0, end)),
        mm_inputs=None if media is None else replace(media, mrope_positions=req.given_positions(0, end)),
        input_embeds=None if embeds is None else InputEmbeds(rows=embeds.rows[:end], digests=embeds.digests[:end]),
        sampling_params=SamplingParams(max_new_tokens=0),
        client=req.client,
        group=req.group,
        cache_salt=req.namespace.decode(),
        adapter=req.adapter,
        unattended=req.unattended,
    )
