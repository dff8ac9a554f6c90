"""Whose prompts get a chunk of the next step, and who gives up a place for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmserve.config.engine_args import EngineArgs
from vlmserve.scheduler.fair_order import FairOrder
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.new_token_ratio import NewTokenRatio
from vlmserve.scheduler.policy import SchedulePolicy
from vlmserve.scheduler.preemption import less_urgent, over_share
from vlmserve.scheduler.prefill_adder import AddReqResult, PrefillAdder
from vlmserve.scheduler.prefix_leaders import PrefixLeaders
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_status import ReqStatus
from vlmserve.scheduler.schedule_batch import RunningBatch
from vlmserve.scheduler.sessions import Sessions
from vlmserve.scheduler.step import StepHandle
from vlmserve.scheduler.step_costs import StepCosts
from vlmserve.scheduler.waiting_queue import WaitingQueue


class Admission:
    """The scheduler's, and at work on its queue, its running batch and its pools.

    retract: lets a request wait again, which is in no list of those that run any more. may_retract: whether that can be
    done now; if not, it is asked for as soon as no step is in flight.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        kv: KVCacheManager,
        queue: WaitingQueue,
        running: RunningBatch,
        sessions: Sessions,
        costs: StepCosts,
        policy: SchedulePolicy,
        ratio: NewTokenRatio,
        encoder_order: FairOrder,
        may_retract: Callable[[], bool],
        retract: Callable[[Req], None],
    ) -> None:
        self._args = args
        self._kv = kv
        self._queue = queue
        self._running = running
        self._sessions = sessions
        self._costs = costs
        self._policy = policy
        self._ratio = ratio
        self._encoder_order = encoder_order
        self._may_retract = may_retract
        self._retract = retract

    def add_prompts(self, decoding: Sequence[Req], in_flight: Sequence[StepHandle]) -> list[Req]:
        """Chunks of prompts, with their slots: who gets them, and how much."""
        queue = self._queue
        in_progress = queue.in_progress
        if not in_progress and not len(queue):
            return []
        running = self._running.reqs
        chunk_size, by_time = self._args.chunked_prefill_size, self._costs.chunk_tokens(decoding=bool(decoding))
        if chunk_size > 0 and by_time is not None:
            chunk_size = min(chunk_size, by_time)
        adder = PrefillAdder(
            self._kv,
            running=running,
            in_progress=in_progress,
            new_token_ratio=self._ratio.value,
            max_prefill_tokens=self._args.max_prefill_tokens,
            chunk_size=chunk_size,
            max_running=self._args.max_running_requests,
            mixed_decode_tokens=len(decoding) if self._args.enable_mixed_chunk else 0,
        )
        leaders = self._prefix_leaders(in_progress, in_flight)

        begun = dict.fromkeys(in_progress)

        def attempt(req: Req) -> bool:
            if req in begun:
                del begun[req]
                result = self._continue_prompt(adder, req)
            else:
                result = self._admit(adder, req, leaders)
            return result in (AddReqResult.CONTINUE, AddReqResult.NOT_READY) and not adder.full

        queue.visit(attempt)
        for req in begun:  # a waiting request without a place holds nobody up whose prompt has begun
            if adder.full:
                break
            self._continue_prompt(adder, req)
        return adder.can_run

    def _prefix_leaders(self, in_progress: Sequence[Req], in_flight: Sequence[StepHandle]) -> PrefixLeaders | None:
        if not self._kv.prefix_cache.shares:
            return None
        leaders = PrefixLeaders(self._kv.matched_len, self._kv.key_of, page_size=self._kv.page_size)
        for req in in_progress:
            leaders.lead(req)
        for step in in_flight:
            for part in step.batch.prompts:
                if not part.req.is_finished and part.completes:  # others are in progress
                    leaders.lead(part.req)
        return leaders

    def _continue_prompt(self, adder: PrefillAdder, req: Req) -> AddReqResult:
        """The next chunk of a prompt in progress; running requests are retracted if it has no slots otherwise."""
        result = adder.add_chunked_req(req)
        while result is AddReqResult.NO_TOKEN:
            if not self._sessions.release_oldest():
                if not len(self._running) or not self._may_retract():
                    break
                self._retract(self._running.retract_decode())
            result = adder.add_chunked_req(req)
        if result is AddReqResult.CONTINUE:
            self._queue.charge(req, req.kv_allocated_len - req.kv_len)
        return result

    def _admit(self, adder: PrefillAdder, req: Req, leaders: PrefixLeaders | None) -> AddReqResult:
        """A waiting request's first chunk; it may take the place of one that runs."""
        if req.prefetch is not None:
            if not req.prefetch.done():
                return self._wait_for(req, ReqStatus.WAITING_FOR_REMOTE_KV)
            req.prefetch = None
            req.media.hold_from(self._kv.matched_len(req))
        if not adder.is_ready(req):
            return self._wait_for(req, ReqStatus.WAITING_FOR_ENCODER)
        if leaders is not None and leaders.must_wait(req):
            return AddReqResult.NOT_READY
        result = adder.add_one_req(req)
        while result is AddReqResult.NO_TOKEN and self._sessions.release_oldest():
            result = adder.add_one_req(req)
        if result in (AddReqResult.NO_ROW, AddReqResult.NO_TOKEN) and self._preempt_for(req):
            return AddReqResult.OTHER  # it comes next
        if result is AddReqResult.NOT_READY:
            return self._wait_for(req, ReqStatus.WAITING_FOR_ENCODER)
        if result is AddReqResult.CONTINUE:
            self._queue.remove(req)
            if req.waited_for_encoder:
                self._encoder_order.encoded(req.media.order)
            req.move_to(ReqStatus.PREFILLING)
            self._queue.set_in_progress(req, True)
            self._queue.charge(req, req.kv_allocated_len - req.kv_len)
        return result

    def _wait_for(self, req: Req, status: ReqStatus) -> AddReqResult:
        req.waited_for_encoder |= status is ReqStatus.WAITING_FOR_ENCODER
        self._queue.block(req, status)
        return AddReqResult.NOT_READY

    def _preempt_for(self, req: Req) -> bool:
        """Whether a running request gives its place up for one that waits, now or when no step is in flight."""
        running = self._running.reqs
        if self._policy.preempts:
            victim = less_urgent(req, running)
        else:
            victim = over_share(req, running, self._args.max_running_requests)
        if victim is None:
            return False
        if self._may_retract():
            self._running.remove(victim)
            self._retract(victim)
        return True


def may_be_tried(req: Req) -> bool:
    """Whether what a blocked request waits for is there, as far as is known."""
    if req.status is ReqStatus.WAITING_FOR_GRAMMAR:
        return not req.grammar_compiles
    return req.prefetch.done() if req.prefetch is not None else PrefillAdder.is_ready(req)
