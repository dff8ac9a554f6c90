"""Continuous batching: which tokens are computed next, for whom, in which slots.

One loop with a queue of steps in flight. Each turn decides a step (`get_next_batch_to_run`), which advances the lengths
of its requests as if it had been computed, launches it (`run_batch`), and takes what came of the oldest one
(`process_batch_result`). With one step in flight that is the plain loop; with two, a step is decided while the one
before is computed. Nothing that a step needs to be decided waits for the last one's tokens: which these are only the
worker has to know. That a token ended an answer is learnt when the next step is under way; what that computed for the
request is dropped.

A step is prompt chunks (by `PrefillAdder`), or a token for each running request, or both with mixed chunks. An encoder
in this process works in slices between steps, on the same queue of the device.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any, TypeVar

import numpy as np

from vision.encoder_pool import EncoderPool
from vlmserve.attention.base import ForwardMode
from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.device_queue import DeviceQueue, Work
from vlmserve.executor.model_worker_batch import ModelWorkerResult
from vlmserve.memory.media_keys import MediaKeyTable, radix_key
from vlmserve.messages import (
    AbortReq,
    BatchTokenOutput,
    FinishReason,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from vlmserve.scheduler.fair_order import FairOrder
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.meter import SchedulerMeter
from vlmserve.scheduler.new_token_ratio import NewTokenRatio
from vlmserve.scheduler.outputs import error, refused, token_output
from vlmserve.scheduler.policy import SchedulePolicy
from vlmserve.scheduler.preemption import less_urgent, over_share
from vlmserve.scheduler.prefill_adder import AddReqResult, PrefillAdder
from vlmserve.scheduler.prefix_leaders import PrefixLeaders
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_media import ReqMedia, num_patches
from vlmserve.scheduler.req_status import ReqStatus
from vlmserve.scheduler.req_times import ReqTimes
from vlmserve.scheduler.schedule_batch import RunningBatch, ScheduleBatch
from vlmserve.scheduler.sessions import Sessions
from vlmserve.scheduler.step import ModelWorker, StepHandle
from vlmserve.scheduler.step_costs import StepCosts
from vlmserve.scheduler.waiting_queue import WaitingQueue
from vlmserve_common.errors import EngineError
from vlmserve_common.process.wake_up import WakeUp

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_OUTPUT_COST = 2.0
"""What a generated token counts in a flow's turns, where a prompt token counts 1 (as in the paper; see there)."""


class Scheduler:
    """Owns every request from arrival to its last token. Single-threaded: call `handle` and `step` in turn.

    max_req_len: tokens of prompt and answer of one request together, at most. device: where steps and slices of
    encoding are computed, and how many are in flight.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        max_req_len: int,
        eos_token_ids: frozenset[int],
        kv: KVCacheManager,
        worker: ModelWorker,
        device: DeviceQueue,
        encoder: EncoderPool,
        policy: SchedulePolicy,
        new_token_ratio: NewTokenRatio,
        media_keys: MediaKeyTable,
        sessions: Sessions,
        send: Callable[[SchedulerOutput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._args = args
        self._clock = clock
        self.meter = SchedulerMeter()
        self._max_req_len = max_req_len
        self._eos_token_ids = eos_token_ids
        self.kv = kv
        self.waiting_queue = WaitingQueue(policy)
        self.running_batch = RunningBatch(kv)
        self.encoder = encoder
        self.sessions = sessions
        self.encoder_order = FairOrder()
        self.arrivals = 0  # requests that have come so far
        self._reqs: dict[str, Req] = {}
        self._worker = worker
        self._device = device
        self._policy = policy
        self._ratio = new_token_ratio
        self._costs = StepCosts(slowdown=args.max_decode_slowdown, max_step_s=args.max_step_s, page_size=args.page_size)
        self._media_keys = media_keys
        self._send = send
        self._in_flight: deque[StepHandle | Work[bool]] = deque()
        self._must_drain = False
        self._fetches: list[Future[Any]] = []
        self._wake_up = WakeUp()  # when one of them is done
        self._steps = 0
        self._decode_is_due = False
        self._slice_is_due = False
        self._urgent: bytes | None = None
        self._prompt_tokens = self._cached_tokens = self._generated = 0
        self._finished = self._aborted = self._retracted = 0

    # ------------------------------------------------------------ messages

    def handle(self, message: TokenizedGenerateReqInput | AbortReq, *, also_waiting: int = 0) -> None:
        """Take one message. A request that can never run is answered with an error at once.

        also_waiting: how many requests wait besides those that are here.
        """
        if isinstance(message, AbortReq):
            self._abort(message)
            return
        refusal = self._refusal(message) or self.queue_is_full(also_waiting=also_waiting)
        if refusal is not None:
            self._send(BatchTokenOutput(outputs=(refused(message, refusal),)))
            return
        room = self._max_req_len - len(message.input_ids)
        wanted = message.sampling_params.max_new_tokens
        order = 0
        if message.mm_inputs is not None:
            patches = 0 if message.choice else num_patches(message.mm_inputs)  # the other choices have the same ones
            order = self.encoder_order.tag(message.client, patches, self.arrivals)
        req = Req(
            message,
            key_ids=radix_key(message.input_ids, message.mm_inputs, self._media_keys),
            media=ReqMedia(message.mm_inputs, self.encoder, order=order),
            max_new_tokens=room if wanted is None else min(wanted, room),
            eos_token_ids=self._eos_token_ids,
            arrival=self.arrivals,
            times=ReqTimes(self._clock),
        )
        self.arrivals += 1
        if self._media_keys.is_large:
            self._trim_media_keys(req)
        self._prompt_tokens += req.prompt_len
        req.prefetch = self._begin_prefetch(req)
        if message.mm_inputs is not None and req.prefetch is None:
            req.media.hold_from(self.kv.matched_len(req))
        self._reqs[req.rid] = req
        self.waiting_queue.arrive(req)
        self.meter.arrived(req)

    def _begin_prefetch(self, req: Req) -> Future[Any] | None:
        """What of its prefix is on disk only is read while it waits."""
        future = self.kv.prefix_cache.prefetch(self.kv.key_of(req), req.namespace)
        if future is not None:
            self._fetches.append(future)
            future.add_done_callback(lambda _: self._wake_up.call())
        return future

    def _take_fetched(self) -> None:
        if self._fetches:
            self._wake_up.take()
            self._fetches = [future for future in self._fetches if not future.done()]
            self.kv.prefix_cache.take_fetched()

    def _refusal(self, message: TokenizedGenerateReqInput) -> FinishReason | None:
        length, limit = len(message.input_ids), self._max_req_len
        if message.rid in self._reqs:
            return error(400, f"a request with the id {message.rid!r} is under way")
        if length == 0:
            return error(400, "the prompt is empty")
        if length >= limit:
            return error(
                400,
                f"the prompt has {length} tokens and there is room for {limit} tokens of prompt and answer together "
                "(settings: --max-model-len, --max-total-tokens)",
            )
        if message.priority and not self._policy.preempts:
            return error(
                400,
                f"priority is {message.priority}, and priorities are for servers with --schedule-policy priority; this "
                f"one has {self._args.schedule_policy}",
            )
        return None

    def queue_is_full(self, *, also_waiting: int = 0) -> FinishReason | None:
        """Why no more requests are taken now; None if they are. also_waiting: as for `handle`."""
        waiting = len(self.waiting_queue) + also_waiting
        if waiting < self._args.max_queued_requests:
            return None
        return error(429, f"{waiting} requests are waiting already (setting: --max-queued-requests)")

    def _abort(self, message: AbortReq) -> None:
        req = self._reqs.get(message.rid)
        if req is None:
            return
        if message.finished:
            self._end(req, FinishReason(type="stop"))
            self._finished += 1
        else:
            self._cut_off(req, FinishReason(type="abort"))

    def _cut_off(self, req: Req, reason: FinishReason) -> None:
        """End a request before its time, and say so."""
        self._end(req, reason)
        self._aborted += 1
        self._send(BatchTokenOutput(outputs=(token_output(req, ()),)))

    def _end(self, req: Req, reason: FinishReason) -> None:
        """Forget a request, wherever it is, and all that it holds. What steps in flight bring it is dropped."""
        self.waiting_queue.leave(req)
        if req.status is ReqStatus.DECODING:
            self.running_batch.remove(req)
        req.finish(reason)
        req.media.release()
        if req.req_pool_idx is not None:
            key = req.radix_key(req.kv_committed_len)
            self.kv.release(req)
            if req.session_id and reason.type in ("stop", "length"):
                self.sessions.keep(req.session_id, key, req.namespace)
        del self._reqs[req.rid]

    # ------------------------------------------------------------ the loop

    def step(self, *, encoder_is_shared: bool = False) -> bool:
        """One turn of the loop; False if there is nothing to do now. When idle, that comes after checking the pools;
        otherwise see `wait_handles`.

        encoder_is_shared: others hold embeddings, too, so that those held say nothing of requests.
        """
        encoded = self._advance_encoder()
        self.sessions.expire()
        self._take_fetched()
        self.waiting_queue.unblock(_may_be_tried)
        batch = self.get_next_batch_to_run()
        if batch is not None:
            self._urgent = None
            self._in_flight.append(self.run_batch(batch))
        sliced = self._encode_slice(batch)
        if self._in_flight and (batch is None or self._steps_in_flight >= self._device.depth):
            self._take_oldest()
        elif batch is None and not encoded and not sliced:
            return self._nothing_to_do(encoder_is_shared)
        return True

    @property
    def _steps_in_flight(self) -> int:
        return sum(isinstance(work, StepHandle) for work in self._in_flight)

    def _take_oldest(self) -> None:
        """Wait for the oldest step and what was launched before it, and process its result."""
        while self._in_flight:
            oldest = self._in_flight[0]
            try:
                result = oldest.result()
            except Exception as failure:
                self._in_flight.popleft()
                assert isinstance(oldest, StepHandle), "the encoder tells its failures by its results"
                rids = ", ".join(part.req.rid for part in oldest.batch.reqs)
                log.exception(
                    "step %d failed; its %d requests are answered with an error: %s",
                    oldest.number,
                    len(oldest.batch),
                    rids,
                )
                self._fail(oldest.batch, failure)
                return
            self._in_flight.popleft()  # not before: an interrupted wait leaves it to the next turn
            if isinstance(oldest, StepHandle):
                assert isinstance(result, ModelWorkerResult)
                self.process_batch_result(oldest.batch, result)
                return

    def _nothing_to_do(self, encoder_is_shared: bool) -> bool:
        if not self.is_idle():
            return self._resolve_stall()
        self._urgent = None
        self._ratio.reset()
        if self._args.check_pools_when_idle:
            self.check_pools(encoder_is_shared=encoder_is_shared)
        return False

    def wait_handles(self) -> list[int]:
        """After `step` said False: file descriptors one of which becomes readable when it has something to do again,
        without a message. None if only a message can change that."""
        handles = self.encoder.wait_handles() if self.encoder.busy else []
        return [*handles, self._wake_up.fd] if self._fetches else handles

    def step_or_wait(self) -> None:
        """`step`, for those who have no messages to attend to: if requests wait for the encoder, wait with them."""
        if not self.step() and not self.is_idle():
            wait(self.wait_handles())

    def is_idle(self) -> bool:
        """Whether no request is waiting, being computed or decoding, and no step in flight."""
        return not self._reqs and not self._in_flight

    def on_device(self, run: Callable[[], _T]) -> _T:
        """Have something done where steps are computed, after those in flight."""
        return self._device.submit(run).result()

    def drain(self) -> None:
        """Take what is in flight, and launch nothing."""
        while self._in_flight:
            self._take_oldest()

    def close(self) -> None:
        """End the device's thread, the encoder's workers, and the disk's."""
        self._device.close()
        self.encoder.close()
        self.kv.close()
        self._wake_up.close()

    # ------------------------------------------------------------ deciding

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Decide a step, and advance lengths as if it had been computed. None: nothing can be computed now, or what is
        in flight has to come first.

        Prompts and decoding share a step, or take turns. Where an encoder works in this process, it takes turns with
        the prompts beside those who decode.
        """
        if self._must_drain and self._in_flight:
            return None
        self._must_drain = False
        decoding = self.running_batch.decodable
        prompts: list[Req] = []
        if not (decoding and (self._decode_is_due or self._slice_is_due)):
            retracted = self._retracted
            prompts = self._add_prompts(decoding)
            if self._retracted != retracted:
                decoding = self.running_batch.decodable
            if self._must_drain and not prompts:  # somebody's place is taken as soon as nothing is in flight
                return None
        mixed = self._args.enable_mixed_chunk
        self._decode_is_due = bool(prompts) and not mixed
        if prompts and not mixed:
            decoding = []
        if decoding:
            decoding = self._prepare_for_decode(decoding, alone=not prompts)
        if not prompts and not decoding:
            return None
        sampling, beside = self.running_batch.sampling, len(self.running_batch) > 0
        batch = ScheduleBatch(self.kv, _mode(prompts, decoding), prompts, decoding, sampling, beside=beside)
        for part in batch.prompts:
            if part.output_index is not None:  # its last chunk: it decodes from here on
                self.waiting_queue.set_in_progress(part.req, False)
                part.req.move_to(ReqStatus.DECODING)
                self.running_batch.merge(part.req)
        return batch

    def _add_prompts(self, decoding: Sequence[Req]) -> list[Req]:
        """Chunks of prompts, with their slots: who gets them, and how much."""
        queue = self.waiting_queue
        in_progress = queue.in_progress
        if not in_progress and not len(queue):
            return []
        running = self.running_batch.reqs
        chunk_size, by_time = self._args.chunked_prefill_size, self._costs.chunk_tokens(decoding=bool(decoding))
        if chunk_size > 0 and by_time is not None:
            chunk_size = min(chunk_size, by_time)
        adder = PrefillAdder(
            self.kv,
            running=running,
            in_progress=in_progress,
            new_token_ratio=self._ratio.value,
            max_prefill_tokens=self._args.max_prefill_tokens,
            chunk_size=chunk_size,
            max_running=self._args.max_running_requests,
            mixed_decode_tokens=len(decoding) if self._args.enable_mixed_chunk else 0,
        )
        leaders = self._prefix_leaders(in_progress)

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

    def _prefix_leaders(self, in_progress: Sequence[Req]) -> PrefixLeaders | None:
        if not self.kv.prefix_cache.shares:
            return None
        leaders = PrefixLeaders(self.kv.matched_len, self.kv.key_of, page_size=self.kv.page_size)
        for req in in_progress:
            leaders.lead(req)
        for work in self._in_flight:
            if isinstance(work, StepHandle):
                for part in work.batch.prompts:
                    if not part.req.is_finished and part.output_index is not None:  # others are in progress
                        leaders.lead(part.req)
        return leaders

    def _continue_prompt(self, adder: PrefillAdder, req: Req) -> AddReqResult:
        """The next chunk of a prompt in progress; running requests are retracted if it has no slots otherwise."""
        result = adder.add_chunked_req(req)
        while result is AddReqResult.NO_TOKEN:
            if not self.sessions.release_oldest():
                if not len(self.running_batch) or not self._may_retract():
                    break
                self._retract(self.running_batch.retract_decode())
            result = adder.add_chunked_req(req)
        if result is AddReqResult.CONTINUE:
            self.waiting_queue.charge(req, req.kv_allocated_len - req.kv_len)
        return result

    def _admit(self, adder: PrefillAdder, req: Req, leaders: PrefixLeaders | None) -> AddReqResult:
        """A waiting request's first chunk; it may take the place of one that runs."""
        if req.prefetch is not None:
            if not req.prefetch.done():
                return self._wait_for(req, ReqStatus.WAITING_FOR_REMOTE_KV)
            req.prefetch = None
            req.media.hold_from(self.kv.matched_len(req))
        if not adder.is_ready(req):
            return self._wait_for(req, ReqStatus.WAITING_FOR_ENCODER)
        if leaders is not None and leaders.must_wait(req):
            return AddReqResult.NOT_READY
        result = adder.add_one_req(req)
        while result is AddReqResult.NO_TOKEN and self.sessions.release_oldest():
            result = adder.add_one_req(req)
        if result in (AddReqResult.NO_ROW, AddReqResult.NO_TOKEN) and self._preempt_for(req):
            return AddReqResult.OTHER  # it comes next
        if result is AddReqResult.NOT_READY:
            return self._wait_for(req, ReqStatus.WAITING_FOR_ENCODER)
        if result is AddReqResult.CONTINUE:
            self.waiting_queue.remove(req)
            if req.waited_for_encoder:
                self.encoder_order.encoded(req.media.order)
            req.move_to(ReqStatus.PREFILLING)
            self.waiting_queue.set_in_progress(req, True)
            self.waiting_queue.charge(req, req.kv_allocated_len - req.kv_len)
        return result

    def _wait_for(self, req: Req, status: ReqStatus) -> AddReqResult:
        req.waited_for_encoder |= status is ReqStatus.WAITING_FOR_ENCODER
        self.waiting_queue.block(req, status)
        return AddReqResult.NOT_READY

    def _prepare_for_decode(self, reqs: list[Req], *, alone: bool) -> list[Req]:
        """Slots for the next token of each running request; who gets one. If slots are short, requests are retracted,
        and, if there is nothing else in the step, prompts in progress wait again."""
        running = self.running_batch
        while not running.check_decode_mem(reqs):
            if self.sessions.release_oldest():
                continue
            if not alone:
                return []
            if not self._may_retract():
                return []
            in_progress = self.waiting_queue.in_progress
            if len(running) > 1:
                self._retract(running.retract_decode())
            elif in_progress:
                self._retract(in_progress[-1])
            else:
                raise EngineError(f"no KV slot is left for the only running request, {reqs[0].rid}")
            reqs = running.decodable
        if alone:
            self._ratio.decay()
        self.kv.extend_by_one(reqs)
        return reqs

    # ------------------------------------------------------------ giving places up

    def _may_retract(self) -> bool:
        """Only what no step in flight computes for is taken back: before, these have to come."""
        self._must_drain = bool(self._in_flight)
        return not self._must_drain

    def _preempt_for(self, req: Req) -> bool:
        """Whether a running request gives its place up for one that waits, now or when no step is in flight."""
        running = self.running_batch.reqs
        if self._policy.preempts:
            victim = less_urgent(req, running)
        else:
            victim = over_share(req, running, self._args.max_running_requests)
        if victim is None:
            return False
        if self._may_retract():
            self.running_batch.remove(victim)
            self._retract(victim)
        return True

    def _retract(self, req: Req) -> None:
        """Let a request wait again, which is in no list of those that run any more. Its tokens stay known, its KV stays
        cached until evicted, and it will go on as if nothing had happened."""
        if req.status is ReqStatus.PREFILLING:
            self.waiting_queue.set_in_progress(req, False)
        else:
            self._retracted += 1
            self._ratio.raise_after_retraction(self.running_batch.reqs)
            log.info("retracted %s: %d requests go on", req.rid, len(self.running_batch))
        self.kv.release(req)
        self.meter.preempted(req)
        req.move_to(ReqStatus.RETRACTED)
        self.waiting_queue.add(req)

    def _resolve_stall(self) -> bool:
        """When no request can be computed: the encoder is to wait for, or requests block each other. Whether another
        step may get on."""
        tried, self._urgent = self._urgent, None
        if self.encoder.working or self._fetches:
            return False
        # With nothing running, the first in line lacks either embeddings, for which there is no room, or KV slots.
        in_progress = self.waiting_queue.in_progress
        first = in_progress[0] if in_progress else self.waiting_queue.first()
        self._urgent = first.media.first_unready()
        if self._urgent is None and in_progress:
            self._retract(in_progress[-1])
        elif self._urgent is None or tried is not None:
            raise EngineError(f"{len(self.waiting_queue)} requests wait, and none can be computed")
        return True

    # ------------------------------------------------------------ the encoder

    def _advance_encoder(self) -> bool:
        """Take what has been encoded, and start what there is room for; whether anything changed."""
        changed = self.encoder.advance(urgent=self._urgent)
        if changed:
            self.meter.encoder_moved()
        failures = self.encoder.take_failures()
        return self._fail_unencodable(failures) or changed

    def _encode_slice(self, batch: ScheduleBatch | None) -> bool:
        """Launch a slice of encoding where it is done in this process, but for beside a step of prompts and decoding:
        then it is due after the next one."""
        decoding = len(self.running_batch) > 0
        self._slice_is_due = False
        if not self.encoder.has_work:
            return False
        if batch is not None and batch.prompt_tokens and decoding:
            self._slice_is_due = True
            return False
        self._in_flight.append(self._device.submit(self.encoder.work, self._costs.slice_s(decoding=decoding)))
        return True

    def _fail_unencodable(self, failures: dict[bytes, str]) -> bool:
        """End the requests that need a picture which could not be encoded; whether there are any."""
        if not failures:
            return False
        found = [(req, key) for req in self._reqs.values() if (key := req.media.holds(failures.keys()))]
        for req, key in found:
            log.warning("%s fails: a picture or video of it could not be encoded", req.rid)
            self._cut_off(req, error(500, f"a picture or video could not be encoded: {failures[key]}"))
        return bool(found)

    # ------------------------------------------------------------ running

    def run_batch(self, batch: ScheduleBatch) -> StepHandle:
        """Launch a step. It is sampled as soon as it is computed, unless that depends on tokens in flight."""
        self._steps += 1
        self.meter.step(batch)
        try:
            return StepHandle(self._device, self._worker, batch, self._steps)
        except BaseException as failure:  # interrupted: nothing of the step may stay behind
            self._fail(batch, failure)
            raise

    def _fail(self, batch: ScheduleBatch, failure: BaseException) -> None:
        """End the requests of a step that raised; the others go on."""
        for part in batch.reqs:
            if not part.req.is_finished:
                self._cut_off(part.req, error(500, f"internal error: {type(failure).__name__}"))

    def process_batch_result(self, batch: ScheduleBatch, result: ModelWorkerResult) -> None:
        """Take what a step brought: KV is committed, tokens are appended, prefixes shared, answers ended."""
        self._costs.observe(
            prompt_tokens=batch.prompt_tokens,
            decoding=len(batch.decoding),
            beside=batch.beside,
            seconds=result.compute_s,
        )
        outputs: list[TokenOutput] = []
        tokens = result.next_token_ids.tolist()
        sampled = 0
        for part in batch.reqs:
            req, at = part.req, sampled
            sampled += part.output_index is not None
            if req.is_finished:  # while the step was in flight
                continue
            self.kv.commit(req, part.end)
            if part.start < req.prompt_len:
                req.media.hold_from(part.end)
                self.kv.share(req)
            if part.output_index is None:
                continue
            req.in_flight -= 1
            token = tokens[at]
            if not part.output_index:
                self._cached_tokens += req.cached_tokens
                self.meter.first_token(req)
            reason = req.append_output(token)
            self._generated += 1
            self.waiting_queue.charge(req, _OUTPUT_COST)
            if reason is not None:
                self._end(req, reason)
                self._finished += 1
            logprobs = None
            if req.num_logprobs is not None:
                logprobs = req.logprobs_of(token, result.logprobs[at], result.top_ids[at], result.top_logprobs[at])
            outputs.append(token_output(req, (token,), None if logprobs is None else (logprobs,)))
        if outputs:
            self._send(BatchTokenOutput(outputs=tuple(outputs)))
        for work in self._in_flight:
            if isinstance(work, StepHandle):  # the tokens that the next step is sampled by have come
                work.sample()
                break

    # ------------------------------------------------------------ state

    def _trim_media_keys(self, newcomer: Req) -> None:
        """Forget media that neither a cached prefix nor a request holds."""
        live = self.kv.prefix_cache.live_keys()
        for req in [newcomer, *self._reqs.values()]:
            live.update(np.unique(req.key_ids[req.key_ids < 0]).tolist())
        self._media_keys.retain(live)

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request uses, those of sessions, too; returns how many tokens they had."""
        self.sessions.release_all()
        return self.kv.prefix_cache.reset()

    def check_pools(self, *, encoder_is_shared: bool = False) -> None:
        """When idle: free + cached-and-unlocked = total, for KV slots, the request pool and, unless it is shared, the
        encoder's memory; else EngineError."""
        stats = self.stats()
        problems = []
        if stats.kv_locked_tokens and not len(self.sessions):
            problems.append(f"{stats.kv_locked_tokens} KV slots are locked")
        free, total = stats.kv_free_tokens, stats.kv_total_tokens
        cached = stats.kv_cached_tokens + stats.kv_locked_tokens
        if free + cached != total:
            problems.append(f"{free} free + {cached} cached KV slots are not {total}")
        if stats.req_pool_free != stats.req_pool_total:
            problems.append(f"{stats.req_pool_free} of {stats.req_pool_total} places in the request pool are free")
        held = self.encoder.cache.device.held_bytes
        if held and not encoder_is_shared:
            problems.append(f"{held} bytes of embeddings are held")
        if problems:
            raise EngineError("idle, but " + "; ".join(problems))

    def stats(self) -> SchedulerStats:
        """Plain figures of this moment."""
        allocator, cache, req_pool = self.kv.allocator, self.kv.prefix_cache, self.kv.req_pool
        return SchedulerStats(
            num_running_reqs=len(self._reqs) - len(self.waiting_queue),
            num_waiting_reqs=len(self.waiting_queue),
            kv_total_tokens=allocator.size,
            kv_free_tokens=allocator.available_size(),
            kv_cached_tokens=cache.evictable_size(),
            kv_locked_tokens=cache.protected_size(),
            req_pool_total=req_pool.size,
            req_pool_free=req_pool.available_size(),
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            generation_tokens_total=self._generated,
            encoder=self.encoder.stats(),
            finished_total=self._finished,
            aborted_total=self._aborted,
            retracted_total=self._retracted,
            forward_steps_total=self._steps,
            steps=self.meter.stats(),
        )


def _may_be_tried(req: Req) -> bool:
    """Whether what a blocked request waits for is there, as far as is known."""
    return req.prefetch.done() if req.prefetch is not None else PrefillAdder.is_ready(req)


def _mode(prompts: Sequence[Req], decoding: Sequence[Req]) -> ForwardMode:
    if not decoding:
        return ForwardMode.EXTEND
    return ForwardMode.MIXED if prompts else ForwardMode.DECODE
