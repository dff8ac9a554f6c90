"""Admission: which prompts get a chunk of the next step, and which running request gives its place up for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vlmserve.config.engine_args import EngineArgs
from vlmserve.scheduler.estimates import NewTokenRatio, StepCosts
from vlmserve.scheduler.handover import RemotePrompts
from vlmserve.scheduler.kv_cache_manager import KVCacheManager, Sessions
from vlmserve.scheduler.policy import SchedulePolicy, less_urgent, over_share
from vlmserve.scheduler.prefill_adder import AddReqResult, PrefillAdder
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_life import ReqStatus
from vlmserve.scheduler.req_media import FairOrder
from vlmserve.scheduler.schedule_batch import RunningBatch, ScheduleBatch
from vlmserve.scheduler.waiting_queue import WaitingQueue

_MIN_SHARED = 32
_STRETCH = 0.25
"""A chunk may be longer by this share if it ends the prompt: one more step would read all weights for little."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class PromptAdmission:
    """Chooses the prompts of a step from the scheduler's queue.

    retract: makes a request wait again that is in no list of running requests any more. remote: of requests whose
    prompts other servers compute.
    """

    args: EngineArgs
    kv: KVCacheManager
    queue: WaitingQueue
    running: RunningBatch
    sessions: Sessions
    costs: StepCosts
    policy: SchedulePolicy
    ratio: NewTokenRatio
    encoder_order: FairOrder
    retract: Callable[[Req], None]
    remote: RemotePrompts | None = None

    def add_prompts(self, decoding: Sequence[Req], in_flight: Sequence[ScheduleBatch]) -> tuple[list[Req], bool]:
        """Give requests slots for a chunk of their prompts. Returns these requests, and whether a running request is to
        give its place up as soon as the batches in flight have come.

        Prompts in progress and waiting requests are tried in the order of the queue, until budgets are used up.
        """
        queue = self.queue
        in_progress = queue.in_progress
        if not in_progress and not len(queue):
            return [], False
        adder = self._make_adder(decoding, in_progress)
        leaders = self._prefix_leaders(in_progress, in_flight)
        begun = dict.fromkeys(in_progress)
        drain = False

        def attempt(req: Req) -> bool:
            nonlocal drain
            if req in begun:
                del begun[req]
                result = self._continue_prompt(adder, req, in_flight)
            else:
                result = self._admit(adder, req, leaders, in_flight)
            drain |= result is AddReqResult.DRAIN
            return result in (AddReqResult.CONTINUE, AddReqResult.NOT_READY) and not adder.full

        queue.visit(attempt)
        for req in begun:  # prompts in progress go on, even if a waiting request before them has found no place
            if adder.full:
                break
            if req.awaits_kv:
                continue
            drain |= self._continue_prompt(adder, req, in_flight) is AddReqResult.DRAIN
        return adder.can_run, drain

    def _make_adder(self, decoding: Sequence[Req], in_progress: Sequence[Req]) -> PrefillAdder:
        chunk_size, by_time = self.args.chunked_prefill_size, self.costs.chunk_tokens(beside=bool(decoding))
        mixed = len(decoding) if self.args.enable_mixed_chunk else 0
        stretch = 0
        if chunk_size > 0 and by_time is not None:
            stretch = max(min(int(by_time * _STRETCH), chunk_size - by_time - mixed), 0)
            chunk_size = min(chunk_size, by_time + mixed)
        return PrefillAdder(
            self.kv,
            running=self.running.reqs,
            in_progress=in_progress,
            new_token_ratio=self.ratio.value,
            max_prefill_tokens=self.args.max_prefill_tokens,
            chunk_size=chunk_size,
            stretch=stretch,
            max_running=self.args.max_running_requests,
            mixed_decode_tokens=mixed,
            max_adapters=self.args.max_loras_per_batch,
        )

    def _prefix_leaders(self, in_progress: Sequence[Req], in_flight: Sequence[ScheduleBatch]) -> PrefixLeaders | None:
        if not self.kv.prefix_cache.shares:
            return None
        leaders = PrefixLeaders(self.kv)
        for req in in_progress:
            leaders.lead(req)
        for batch in in_flight:
            for part in batch.prompts:
                if not part.req.is_finished and part.completes:  # others are in progress
                    leaders.lead(part.req)
        return leaders

    def _continue_prompt(self, adder: PrefillAdder, req: Req, in_flight: Sequence[ScheduleBatch]) -> AddReqResult:
        """Add the next chunk of a prompt in progress. If there are no slots for it, running requests are retracted."""
        result = adder.add_chunked_req(req)
        while result is AddReqResult.NO_TOKEN:
            if not self.sessions.release_oldest():
                if not len(self.running):
                    break
                if in_flight:
                    return AddReqResult.DRAIN
                self.retract(self.running.retract_decode())
            result = adder.add_chunked_req(req)
        if result is AddReqResult.CONTINUE:
            self.queue.charge(req, req.kv_allocated_len - req.kv_len)
        return result

    def _admit(
        self, adder: PrefillAdder, req: Req, leaders: PrefixLeaders | None, in_flight: Sequence[ScheduleBatch]
    ) -> AddReqResult:
        """Add the first chunk of a waiting request, which may take the place of a running one."""
        if req.prefetch is not None:
            if not req.prefetch.done():
                return self._wait_for(req, ReqStatus.WAITING_FOR_REMOTE_KV)
            req.prefetch = None
            req.media.hold_from(self.kv.matched_len(req))
        if not adder.is_ready(req):
            return self._wait_for(req, ReqStatus.WAITING_FOR_ENCODER)
        if leaders is not None and leaders.follow(req):
            return AddReqResult.NOT_READY
        remote = self.remote is not None and self.remote.wants(req)
        result = adder.add_one_req(req, remote=remote)
        while result is AddReqResult.NO_TOKEN and self.sessions.release_oldest():
            result = adder.add_one_req(req, remote=remote)
        if result in (AddReqResult.NO_ROW, AddReqResult.NO_TOKEN) and (victim := self._victim_for(req)) is not None:
            if in_flight:
                return AddReqResult.DRAIN
            self.running.remove(victim)
            self.retract(victim)
            return AddReqResult.OTHER  # the waiting request comes next
        if result is AddReqResult.NOT_READY:
            return self._wait_for(req, ReqStatus.WAITING_FOR_ENCODER)
        if result is AddReqResult.CONTINUE:
            self.queue.remove(req)
            if req.waited_for_encoder:
                self.encoder_order.encoded(req.media.order)
            req.move_to(ReqStatus.PREFILLING)
            self.queue.set_in_progress(req, True)
            self.queue.charge(req, req.kv_allocated_len - req.kv_len)
            if self.remote is not None and remote and req not in adder.can_run:
                self.remote.begin(req, in_flight)
        return result

    def _wait_for(self, req: Req, status: ReqStatus) -> AddReqResult:
        req.waited_for_encoder |= status is ReqStatus.WAITING_FOR_ENCODER
        self.queue.block(req, status)
        return AddReqResult.NOT_READY

    def _victim_for(self, req: Req) -> Req | None:
        if self.policy.preempts:
            return less_urgent(req, self.running.reqs)
        return over_share(req, self.running.reqs, self.args.max_running_requests)


def may_be_tried(req: Req) -> bool:
    """Return True if the grammar, embeddings or prefix that a blocked request waits for have come, as far as is
    known."""
    if req.status is ReqStatus.WAITING_FOR_GRAMMAR:
        return not req.grammar_compiles
    return req.prefetch.done() if req.prefetch is not None else PrefillAdder.is_ready(req)


class PrefixLeaders:
    """Finds waiting requests whose prefix another request is computing, while one step is decided.

    Requests may share tokens that are not cached yet, such as the `n` answers to one picture. From `_MIN_SHARED` tokens
    on (a page, if that is more), the first request leads. The others wait and find its prefix in the cache.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._shared = max(_MIN_SHARED, kv.page_size)
        # keys with equal uncached tokens from an equal offset on, which are then compared as a whole
        self._leaders: dict[tuple[bytes, int, bytes], list[np.ndarray]] = {}

    def lead(self, req: Req) -> None:
        """Let a prompt lead that is being computed. Other requests find the whole pages that it has committed."""
        key = req.radix_key(min(req.fill_len, req.prompt_len))
        self._join(req.namespace, key, req.kv_committed_len // self._kv.page_size * self._kv.page_size)

    def follow(self, req: Req) -> bool:
        """Let a waiting request follow another one, or else lead from now on. Returns whether it follows."""
        key, cached = self._kv.key_of(req), self._kv.matched_len(req)
        return len(key) - cached >= self._shared and not self._join(req.namespace, key, cached)

    def _join(self, namespace: bytes, key: np.ndarray, cached: int) -> bool:
        group = self._leaders.setdefault((namespace, cached, key[cached : cached + self._shared].tobytes()), [])
        if any(np.array_equal(leader[:cached], key[:cached]) for leader in group):
            return False
        group.append(key)
        return True
