"""Continuous batching: which tokens are computed next, for whom, in which slots.

One loop with a queue of steps in flight. Each turn decides a step (`get_next_batch_to_run`), which advances the lengths
of its requests as if it had been computed, launches it (`run_batch`), and takes what came of the oldest one
(`process_batch_result`). With one step in flight that is the plain loop; with two, a step is decided while the one
before is computed. Nothing that a step needs to be decided waits for the last one's tokens: which these are only the
worker has to know. That a token ended an answer is learnt when the next step is under way; what that computed for the
request is dropped.

A step is prompt chunks (by `PrefillAdder`), or a token for each running request (and more where they are guessed, see
`drafts`), or both with mixed chunks. An encoder
in this process works in slices between steps, on the same queue of the device.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from vision.encoder_pool import EncoderPool
from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.device_queue import DeviceQueue, Work
from vlmserve.executor.model_worker_batch import RECENT_TOKENS, ModelWorkerResult
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenOutput,
    ExpertStats,
    FinishReason,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.models.attention.base import ForwardMode
from vlmserve.scheduler.admission import Admission, may_be_tried
from vlmserve.scheduler.drafts import Drafter
from vlmserve.scheduler.fair_order import FairOrder
from vlmserve.scheduler.grammar.grammar_queue import GrammarQueue
from vlmserve.scheduler.intake import Intake
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.meter import SchedulerMeter
from vlmserve.scheduler.new_token_ratio import NewTokenRatio
from vlmserve.scheduler.outputs import error, refused, token_output
from vlmserve.scheduler.policy import SchedulePolicy
from vlmserve.scheduler.pool_check import check_pools
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_status import ReqStatus
from vlmserve.scheduler.schedule_batch import RunningBatch, ScheduleBatch
from vlmserve.scheduler.sessions import Sessions
from vlmserve.scheduler.step import ModelWorker, StepHandle
from vlmserve.scheduler.step_costs import StepCosts
from vlmserve.scheduler.step_results import PartResult, part_results
from vlmserve.scheduler.waiting_queue import WaitingQueue
from vlmserve_common.errors import DeviceLostError, EngineError

log = logging.getLogger(__name__)

_OUTPUT_COST = 2.0
"""What a generated token counts in a flow's turns, where a prompt token counts 1 (as in the paper; see there)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What the first half of a turn did: whether it launched a step, and whether anything else changed."""

    step: bool
    other: bool


class Scheduler:
    """Owns every request from arrival to its last token. Single-threaded: call `handle` and `step` in turn.

    max_req_len: tokens of prompt and answer of one request together, at most. device: where steps and slices of
    encoding are computed, and how many are in flight. drafter: guesses tokens of those who decode. expert_stats:
    how evenly experts are spread. encoder_order: of all schedulers that share the encoder; by default, there is one.

    urgent: a key of the encoder's that nobody gets on without, if there is one.
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
        grammars: GrammarQueue | None = None,
        send: Callable[[SchedulerOutput], None],
        drafter: Drafter | None = None,
        expert_stats: Callable[[], ExpertStats] = ExpertStats,
        encoder_order: FairOrder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._args = args
        self._drafter = drafter
        self.meter = SchedulerMeter()
        self.kv = kv
        self.waiting_queue = WaitingQueue(policy)
        self.running_batch = RunningBatch(kv)
        self.encoder = encoder
        self.sessions = sessions
        self.intake = Intake(
            args,
            max_req_len=max_req_len,
            eos_token_ids=eos_token_ids,
            kv=kv,
            encoder=encoder,
            policy=policy,
            media_keys=media_keys,
            grammars=grammars,
            encoder_order=encoder_order,
            clock=clock,
        )
        self._reqs: dict[str, Req] = {}
        self._worker = worker
        self._expert_stats = expert_stats
        assert args.pp_size > 1 or device.depth <= RECENT_TOKENS, "workers forget what they sampled longer ago"
        self._device = device
        self._ratio = new_token_ratio
        self._costs = StepCosts(slowdown=args.max_decode_slowdown, max_step_s=args.max_step_s, page_size=args.page_size)
        self._admission = Admission(
            args,
            kv=kv,
            queue=self.waiting_queue,
            running=self.running_batch,
            sessions=sessions,
            costs=self._costs,
            policy=policy,
            ratio=new_token_ratio,
            encoder_order=self.intake.encoder_order,
            may_retract=self._may_retract,
            retract=self._retract,
        )
        self._send = send
        self._in_flight: deque[StepHandle | Work[bool]] = deque()
        self._must_drain = False
        self._steps = 0
        self._decode_is_due = False
        self._slice_is_due = False
        self.urgent: bytes | None = None
        self._prompt_tokens = self._generated = 0
        self._finished = self._aborted = self._retracted = 0

    def wrap_worker(self, wrap: Callable[[ModelWorker], ModelWorker]) -> None:
        """Have steps computed by `wrap` of what computes them now, while none is in flight."""
        assert not self._in_flight
        self._worker = wrap(self._worker)

    # ------------------------------------------------------------ messages

    def handle(self, message: TokenizedGenerateReqInput | AbortReq) -> None:
        """Take one message. A request that can never run is answered with an error at once."""
        if isinstance(message, AbortReq):
            self._abort(message)
            return
        refusal = self.intake.refusal(message, self._reqs)
        if refusal is not None:
            self._send(BatchTokenOutput(outputs=(refused(message, refusal),)))
            return
        req = self.intake.make(message, self._reqs.values())
        self._prompt_tokens += req.prompt_len
        self._reqs[req.rid] = req
        self.waiting_queue.arrive(req)
        if req.grammar_compiles:  # not found out by trying: so many are tried in a step, and others come behind them
            self.waiting_queue.block(req, ReqStatus.WAITING_FOR_GRAMMAR)
        self.meter.arrived(req)

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
        self.urgent = None  # it may have been the last one that held it
        self.intake.release(req)
        if req.req_pool_idx is not None:
            goes_on = req.session_id and reason.type in ("stop", "length")
            key = req.radix_key(req.kv_committed_len) if goes_on else None
            self.kv.release(req)
            if key is not None:
                self.sessions.keep(req.session_id, key, req.namespace)
        del self._reqs[req.rid]

    # ------------------------------------------------------------ the loop

    def step(self, *, encoder_is_shared: bool = False) -> bool:
        """One turn of the loop; False if there is nothing to do now. When idle, that comes after checking the pools;
        otherwise see `wait_handles`.

        encoder_is_shared: others hold embeddings, too, so that those held say nothing of requests.
        """
        encoded = self.encoder.advance(urgent=self.urgent)
        launched = self.launch(encoded=encoded, failures=self.encoder.take_failures())
        return self.finish(launched, encoder_is_shared=encoder_is_shared)

    def launch(self, *, encoded: bool, failures: dict[bytes, str], may_encode: bool = True) -> Launched:
        """The first half of a turn, which waits for nothing. encoded, failures: what the encoder's `advance` and
        `take_failures` said. may_encode: whether a slice of encoding may be launched."""
        if encoded:
            self.meter.encoder_moved()
        encoded = self._fail_unencodable(failures) or encoded
        self.sessions.expire()
        self.intake.take_fetched()
        for req, failure in self.intake.take_grammars():
            self._cut_off(req, failure)
        self.waiting_queue.unblock(may_be_tried)
        batch = self.get_next_batch_to_run()
        if batch is not None:
            self.urgent = None
            self._in_flight.append(self.run_batch(batch))
        sliced = self._encode_slice(batch, may_encode=may_encode)
        return Launched(step=batch is not None, other=encoded or sliced)

    def finish(self, launched: Launched, *, encoder_is_shared: bool = False) -> bool:
        """The second half: take the oldest step, if it is time. Arguments and result: those of `step`."""
        if self._in_flight and (not launched.step or len(self._steps_in_flight) >= self._depth):
            self._take_oldest()
        elif not launched.step and not launched.other:
            return self._nothing_to_do(encoder_is_shared)
        return True

    @property
    def _steps_in_flight(self) -> list[StepHandle]:
        return [work for work in self._in_flight if isinstance(work, StepHandle)]

    @property
    def _depth(self) -> int:
        return self._device.depth if len(self.running_batch) >= self._device.least_reqs else 1

    def _submit(self, reqs: int) -> Callable[..., Work[Any]]:
        """How work for so many requests goes to the device."""
        overlaps = reqs >= self._device.least_reqs or self._in_flight
        return self._device.submit if overlaps else self._device.here

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
                if isinstance(failure, DeviceLostError):
                    raise
                return
            self._in_flight.popleft()  # not before: an interrupted wait leaves it to the next turn
            if isinstance(oldest, StepHandle):
                assert isinstance(result, ModelWorkerResult)
                self.process_batch_result(oldest.batch, result)
                return

    def _nothing_to_do(self, encoder_is_shared: bool) -> bool:
        if not self.is_idle():
            return self._resolve_stall()
        self.urgent = None
        self._ratio.reset()
        if self._args.check_pools_when_idle:
            self.check_pools(encoder_is_shared=encoder_is_shared)
        return False

    def wait_handles(self) -> list[int]:
        """After `step` said False: file descriptors one of which becomes readable when it has something to do again,
        without a message. None if only a message can change that."""
        handles = self.encoder.wait_handles() if self.encoder.busy else []
        return [*handles, self.intake.wait_handle] if self.intake.is_fetching else handles

    def step_or_wait(self) -> None:
        """`step`, for those who have no messages to attend to: if requests wait for the encoder, wait with them."""
        if not self.step() and not self.is_idle():
            wait(self.wait_handles())

    @property
    def num_waiting(self) -> int:
        """Requests that are not computed yet."""
        return len(self.waiting_queue)

    def is_idle(self) -> bool:
        """Whether no request is waiting, being computed or decoding, and no step in flight."""
        return not self._reqs and not self._in_flight

    def drain(self) -> None:
        """Take what is in flight, and launch nothing."""
        while self._in_flight:
            self._take_oldest()

    def behind_all_media(self) -> int:
        """An order for the encoder behind that of all requests so far."""
        return self.intake.encoder_order.behind_all()

    def close_kv(self, timeout_s: float) -> int:
        """See `KVCacheManager.close`."""
        return self.kv.close(timeout_s)

    def close(self) -> None:
        """End the device's thread, the encoder's workers, and the disk's."""
        self._device.close()
        self.encoder.close()
        self.kv.close()
        self.intake.close()

    # ------------------------------------------------------------ deciding

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Decide a step, and advance lengths as if it had been computed. None: nothing can be computed now, or what is
        in flight has to come first.

        Prompts and decoding share a step, or take turns. Where an encoder works in this process, it takes turns with
        the prompts beside those who decode.
        """
        if self._must_drain and self._in_flight:
            return None
        if not all(step.is_launched for step in self._steps_in_flight):
            return None
        self._must_drain = False
        decoding = self._decodable()
        prompts: list[Req] = []
        if not (decoding and (self._decode_is_due or self._slice_is_due)):
            retracted = self._retracted
            prompts = self._admission.add_prompts(decoding, self._steps_in_flight)
            if self._retracted != retracted:
                decoding = self._decodable()
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
            if part.completes:  # its last chunk: it decodes from here on, if it is to
                self.waiting_queue.set_in_progress(part.req, False)
                part.req.move_to(ReqStatus.DECODING)
                self.running_batch.merge(part.req)
        return batch

    def _decodable(self) -> list[Req]:
        """Who may get a token of the next step. The stages of a pipeline have steps of different requests: none whose
        token is in flight, which the first stage does not know, and of the others one group of as many as stages."""
        reqs, stages = self.running_batch.decodable, self._args.pp_size
        if stages == 1:
            return reqs
        return [req for req in reqs if not req.in_flight][: -(-len(reqs) // stages)]

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
            reqs = self._decodable()
        if alone:
            self._ratio.decay()
        self.kv.extend_by_one(reqs)
        if self._drafter is not None:
            self._draft(reqs, self._drafter)
        return reqs

    def _draft(self, reqs: Sequence[Req], drafter: Drafter) -> None:
        """Guess more tokens of each request, as far as there are slots for them."""
        for req in reqs:
            drafts = drafter.propose(req)[: req.remaining_new_tokens - 1] if req.may_draft else ()
            if drafts and self.kv.extend(req, len(drafts)):
                req.drafts = drafts

    # ------------------------------------------------------------ giving places up

    def _may_retract(self) -> bool:
        """Only what no step in flight computes for is taken back: before, these have to come."""
        self._must_drain = bool(self._in_flight)
        return not self._must_drain

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
        tried, self.urgent = self.urgent, None
        if self.encoder.working or self.intake.is_fetching:
            return False
        # With nothing running, the first in line lacks either embeddings, for which there is no room, or KV slots.
        in_progress = self.waiting_queue.in_progress
        first = in_progress[0] if in_progress else self.waiting_queue.first()
        self.urgent = first.media.first_unready()
        if self.urgent is None and in_progress:
            self._retract(in_progress[-1])
        elif self.urgent is None or tried is not None:
            raise EngineError(f"{len(self.waiting_queue)} requests wait, and none can be computed")
        return True

    # ------------------------------------------------------------ the encoder

    def _encode_slice(self, batch: ScheduleBatch | None, *, may_encode: bool) -> bool:
        """Launch a slice of encoding where it is done in this process, but for beside a step of prompts and decoding:
        then it is due after the next one."""
        decoding = len(self.running_batch) > 0
        self._slice_is_due = False
        if not may_encode or not self.encoder.has_work:
            return False
        if batch is not None and batch.prompt_tokens and decoding:
            self._slice_is_due = True
            return False
        submit, seconds = self._submit(len(self.running_batch)), self._costs.slice_s(decoding=decoding)
        self._in_flight.append(submit(self.encoder.work, seconds))
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
            return StepHandle(self._submit(len(batch)), self._worker, batch, self._steps)
        except BaseException as failure:  # interrupted: nothing of the step may stay behind
            self._fail(batch, failure)
            raise

    def _fail(self, batch: ScheduleBatch, failure: BaseException) -> None:
        """End the requests of a step that raised; the others go on."""
        for part in batch.reqs:
            if not part.req.is_finished:
                why = failure if isinstance(failure, EngineError) else type(failure).__name__
                self._cut_off(part.req, error(500, f"internal error: {why}"))

    def process_batch_result(self, batch: ScheduleBatch, result: ModelWorkerResult) -> None:
        """Take what a step brought: KV is committed, tokens are appended, prefixes shared, answers ended."""
        self._costs.observe(
            prompt_tokens=batch.prompt_tokens,
            decoding=len(batch.decoding),
            beside=batch.beside,
            seconds=result.compute_s,
        )
        outputs: list[TokenOutput] = []
        for brought in part_results(batch, result):
            part, req = brought.part, brought.part.req
            if req.is_finished:  # while the step was in flight
                continue
            self.kv.commit(req, part.end - part.tokens_sampled + len(brought.tokens))
            if part.drafts:
                self._drop_drafts(req, len(part.drafts) + 1 - len(brought.tokens))
            if part.start < req.prompt_len:
                req.media.hold_from(part.end)
                self.kv.share(req)
            if brought.prompt is not None:
                assert req.prompt_scores is not None
                req.prompt_scores.take(part.scored[0], brought.prompt)
            if not part.completes:
                continue
            if not part.output_index:
                self.meter.first_token(req)
            if brought.failure is not None:
                self._cut_off(req, error(500, brought.failure))
                continue
            outputs.append(self._take_tokens(req, brought))
        for step in self._steps_in_flight[:1]:  # the tokens that it is sampled by have come
            step.sample()
        if outputs:  # while that is done
            self._send(BatchTokenOutput(outputs=tuple(outputs)))

    def _drop_drafts(self, req: Req, wrong: int) -> None:
        """A request's guesses have come, and so many of its tokens in flight are not to be."""
        self.kv.truncate(req, req.kv_committed_len)
        self.meter.drafted(len(req.drafts), wrong)
        req.drafts = ()
        req.in_flight -= wrong

    def _take_tokens(self, req: Req, brought: PartResult) -> TokenOutput:
        """The tokens that a step made of a request's last ones, or its end, if it is to have none."""
        reason = None if brought.tokens else FinishReason(type="length")
        for token in brought.tokens:  # only the last one can end it
            req.in_flight -= 1
            reason = req.append_output(token)
            self._generated += 1
            self.waiting_queue.charge(req, _OUTPUT_COST)
        if reason is not None:
            self._end(req, reason)
            self._finished += 1
        return token_output(req, brought.tokens, brought.logprobs, brought.hidden)

    # ------------------------------------------------------------ state

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request uses, those of sessions, too; returns how many tokens they had."""
        self.sessions.release_all()
        return self.kv.prefix_cache.reset()

    def check_pools(self, *, encoder_is_shared: bool = False) -> None:
        """See `pool_check`. encoder_is_shared: see `step`."""
        held = 0 if encoder_is_shared else self.encoder.cache.device.held_bytes
        states = self.kv.states
        check_pools(
            self.stats(),
            held_bytes=held,
            sessions=len(self.sessions),
            held_states=states.held if states is not None else 0,
        )

    def stats(self) -> SchedulerStats:
        """Plain figures of this moment."""
        allocator, cache, req_pool = self.kv.allocator, self.kv.prefix_cache, self.kv.req_pool
        steps = self.meter.stats()
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
            cached_tokens_total=steps.prefix_hits_total,
            generation_tokens_total=self._generated,
            encoder=self.encoder.stats(),
            finished_total=self._finished,
            aborted_total=self._aborted,
            retracted_total=self._retracted,
            forward_steps_total=self._steps,
            steps=steps,
            experts=self._expert_stats(),
        )


def _mode(prompts: Sequence[Req], decoding: Sequence[Req]) -> ForwardMode:
    if not decoding:
        return ForwardMode.EXTEND
    return ForwardMode.MIXED if prompts or any(req.drafts for req in decoding) else ForwardMode.DECODE
