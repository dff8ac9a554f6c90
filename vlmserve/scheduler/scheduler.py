"""Decides which tokens are computed next, for whom and in which slots, and keeps account of every request.

A `Scheduler` never waits. The event loop (`vlmserve.engine.loop`) asks it for a step with `get_next_batch_to_run`,
which advances the lengths of the step's requests as if it had been computed. Later the loop hands it the results with
`process_batch_result`. No decision waits for the tokens of the last step: only the worker has to know them. If a token
ends an answer, the scheduler learns it when the next step is under way, and drops the request's part of that step.

A step is prompt chunks (by `PrefillAdder`), or a token for each running request (more if some are guessed, see
`drafts`), or both with mixed chunks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vision.cache.stats import PoolStats
from vision.encoder_pool import EncoderPool
from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.model_worker_batch import ModelWorkerResult
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenOutput,
    FinishReason,
    Guesses,
    HandoverStats,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.models.attention.base import ForwardMode
from vlmserve.scheduler.admission import PromptAdmission, may_be_tried
from vlmserve.scheduler.decode_gap import GapRule
from vlmserve.scheduler.estimates import NewTokenRatio, StepCosts
from vlmserve.scheduler.grammar.grammar_queue import GrammarQueue
from vlmserve.scheduler.guessing import Guesser
from vlmserve.scheduler.handover import HandedPrompts, RemotePrompts
from vlmserve.scheduler.intake import Intake
from vlmserve.scheduler.kv_cache_manager import KVCacheManager, Sessions
from vlmserve.scheduler.meter import SchedulerMeter, check_pools
from vlmserve.scheduler.outputs import PartResult, error, part_results, refused, token_output
from vlmserve.scheduler.policy import make_policy
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_life import ReqStatus
from vlmserve.scheduler.req_media import FairOrder
from vlmserve.scheduler.schedule_batch import RunningBatch, ScheduleBatch
from vlmserve.scheduler.waiting_queue import WaitingQueue
from vlmserve_common.errors import EngineError

log = logging.getLogger(__name__)

_OUTPUT_COST = 2.0
"""A generated token counts as so many prompt tokens in a flow's turns, as in the paper that `waiting_queue` names."""


_PROMPT_STEPS = 4
"""Where answers gain by it, so many steps of prompts come one after the other before the encoder's turn."""


class Due(NamedTuple):
    """The state that one turn leaves to the next.

    decode: prompts or a slice of encoding took the last gap between decode steps, so the next step is one.
    sliced: a slice did. no_slice: the next gap belongs to prompts.
    prompts: how many steps in a row had prompts. gap: decoding waits for slices of encoding.
    drain: a request must give up slots that steps in flight still write to. No step is decided before they have come.
    urgent: the encoder's key of embeddings that all requests wait for, if they do.
    """

    decode: bool = False
    sliced: bool = False
    no_slice: bool = False
    prompts: int = 0
    gap: bool = False
    drain: bool = False
    urgent: bytes | None = None


class Scheduler:
    """Owns every request from arrival to its last token. Single-threaded.

    max_req_len: the most tokens of prompt and answer of one request together. guesser: of requests that decode. send:
    gets the outputs of requests that end early. encoder_order: the order that all schedulers over one encoder share;
    None: this scheduler is alone. handed, remote: of a prefill server and of a decode server.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        max_req_len: int,
        eos_token_ids: frozenset[int],
        kv: KVCacheManager,
        encoder: EncoderPool,
        media_keys: MediaKeyTable,
        grammars: GrammarQueue | None = None,
        send: Callable[[SchedulerOutput], None],
        guesser: Guesser | None = None,
        encoder_order: FairOrder | None = None,
        handed: HandedPrompts | None = None,
        remote: RemotePrompts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._args = args
        self._guesser = guesser or Guesser(None, most=0, adapts=False)
        self._clock = clock
        self._decoded_at: float | None = None  # when the last step came, if it was of decoding alone
        self._send = send
        self._handed, self.remote = handed, remote
        self.due = Due()
        self.meter = SchedulerMeter()
        self.kv = kv
        policy = make_policy(args.schedule_policy, match=kv.matched_len, path=kv.matched_path, seed=args.random_seed)
        self.waiting_queue = WaitingQueue(policy)
        self.running_batch = RunningBatch(kv)
        self.encoder = encoder
        self.sessions = Sessions(
            kv.prefix_cache,
            max_sessions=args.max_sessions,
            timeout_s=args.session_timeout_s,
            clock=clock,
            windows=kv.windows,
        )
        self.intake = Intake(
            args=args,
            max_req_len=max_req_len,
            eos_token_ids=eos_token_ids,
            kv=kv,
            encoder=encoder,
            policy=policy,
            media_keys=media_keys,
            grammars=grammars,
            encoder_order=encoder_order or FairOrder(),
            clock=clock,
            remote=remote,
            sessions=self.sessions,
        )
        self._reqs: dict[str, Req] = {}
        self._ratio = NewTokenRatio(args.schedule_conservativeness)
        self._costs = StepCosts(
            GapRule(slowdown=args.decode_slowdown, ceiling_s=args.max_time_between_tokens_s),
            max_step_s=args.max_step_s,
            page_size=args.page_size,
        )
        self._admission = PromptAdmission(
            args=args,
            kv=kv,
            queue=self.waiting_queue,
            running=self.running_batch,
            sessions=self.sessions,
            costs=self._costs,
            policy=policy,
            ratio=self._ratio,
            encoder_order=self.intake.encoder_order,
            retract=self._retract,
            remote=remote,
        )
        self._steps = self._prompt_tokens = self._generated = 0
        self._finished = self._aborted = self._retracted = 0

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
        if req.grammar_compiles:  # at once: trying it would use up one of a step's tries
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
        self._end(req, reason)
        self._aborted += 1
        self._send(BatchTokenOutput(outputs=(token_output(req, ()),)))

    def _end(self, req: Req, reason: FinishReason) -> None:
        """Forget a request, wherever it is, and release all that it holds. Its results in flight are dropped."""
        self.waiting_queue.leave(req)
        if req.status is ReqStatus.DECODING:
            self.running_batch.remove(req)
        req.finish(reason)
        req.media.release()
        if self.due.urgent is not None:  # this request may have been the last one to hold it
            self.due = self.due._replace(urgent=None)
        self.intake.release(req)
        if self._handed is not None:
            self._handed.ended(req)
        if self.remote is not None and self.remote.cancel(req):
            pass  # its slots are still written to: `_take_remote` releases them
        elif req.req_pool_idx is not None:
            goes_on = req.session_id and reason.type in ("stop", "length")
            key = req.radix_key(req.kv_committed_len) if goes_on else None
            self.kv.release(req)
            if key is not None:
                self.sessions.keep(req.session_id, key, req.namespace)
        del self._reqs[req.rid]

    # ------------------------------------------------------------ deciding

    def take_ready(self, *, encoded: bool, failures: Mapping[bytes, str]) -> bool:
        """Take embeddings, prefixes read from disk, and grammars that have come since the last turn. Returns whether
        embeddings have come, or could not be made.

        encoded: whether the encoder has brought anything. failures: why something could not be encoded, by its key.
        """
        if encoded:
            self.meter.encoder_moved()
        failed = self._fail_unencodable(failures)
        self.sessions.expire()
        self.intake.take_fetched()
        for req, failure in self.intake.take_grammars():
            self._cut_off(req, failure)
        self.waiting_queue.unblock(may_be_tried)
        return self._take_remote() or encoded or failed

    def _take_remote(self) -> bool:
        """Take KV that has come from other servers. Returns whether any has, or does not come. What nobody else can
        compute is computed here."""
        found = [] if self.remote is None else self.remote.take()
        for req, arrived in found:
            failure = arrived.failure
            if req.is_finished:
                self.kv.release(req)
            elif failure is not None and failure.status < 500:
                self._cut_off(req, error(failure.status, failure.message, param=failure.param))
            elif failure is not None:
                log.warning("the prompt of %s is computed here: %s", req.rid, failure.message)
                req.computed_here = True
                self._retract(req)
        return bool(found)

    def get_next_batch_to_run(
        self, in_flight: Sequence[ScheduleBatch] = (), *, encodes: bool = True
    ) -> ScheduleBatch | None:
        """Decide a step, and advance lengths as if it had been computed. None: nothing can be computed now, or steps in
        flight have to come first.

        Prompts and decoding share a step, or take turns.
        in_flight: batches that have not been processed, oldest first. encodes: whether this scheduler's prompts take
        turns with slices of encoding, too.
        """
        if self.remote is not None:
            self.remote.order_due(in_flight)
        if self.due.drain and in_flight:
            return None
        decoding, prompts, drain = self._decodable(), list[Req](), False
        if len(self.running_batch):
            self._costs.set_gap(self.waiting_queue.loads(self.running_batch.reqs, self._args.max_running_requests))
        forced = bool(decoding) and self.due.decode
        if not forced:
            retracted = self._retracted
            prompts, drain = self._admission.add_prompts(decoding, in_flight)
            if self._retracted != retracted:
                decoding = self._decodable()
        mixed = self._args.enable_mixed_chunk
        gap = not prompts and not drain and self._leaves_gap(decoding, encodes=encodes)
        if (prompts and not mixed) or (drain and not prompts) or gap:
            decoding = []
        if decoding:
            decoding = self._prepare_for_decode(decoding, in_flight, alone=not prompts)
            drain |= not prompts and not decoding
        found = bool(prompts or decoding)
        batch = self._make_batch(prompts, decoding) if found else None
        if decoding:
            self._costs.decoded()
        steps = self.due.prompts + 1 if prompts else 0
        most = _PROMPT_STEPS if self._costs.patient else 1
        alternate = not mixed or (encodes and self.encoder.has_work and len(self.running_batch) > 0 and steps >= most)
        decode = bool(prompts) and alternate and not drain  # once drained, the place is taken first
        no_slice = forced and self.due.sliced and self.waiting_queue.has_ready_prompt()
        self.due = Due(
            decode=decode,
            no_slice=no_slice,
            prompts=steps,
            gap=gap,
            drain=drain,
            urgent=None if found else self.due.urgent,
        )
        return batch

    def _leaves_gap(self, decoding: Sequence[Req], *, encodes: bool) -> bool:
        """Return True if requests that could decode leave more time to the encoder first."""
        if not (decoding and encodes and self._costs.patient and self._costs.gap_s > 0):
            return False
        return self.encoder.takes_turns and self.encoder.has_work

    def _decodable(self) -> list[Req]:
        """Return the requests that may get a token of the next step.

        The stages of a pipeline compute steps of different requests: the first stage does not know tokens in flight. So
        requests without a token in flight are split into as many steps as there are stages.
        """
        reqs, stages = self.running_batch.decodable, self._args.pp_size
        if stages == 1:
            return reqs
        return [req for req in reqs if not req.in_flight][: -(-len(reqs) // stages)]

    def _prepare_for_decode(self, reqs: list[Req], in_flight: Sequence[ScheduleBatch], *, alone: bool) -> list[Req]:
        """Allocate slots for the next token of each of these requests. Returns the requests that got one.

        If slots are short, sessions are let go first. Then no request gets a slot beside prompts, or while steps are in
        flight. After that requests are retracted, and at last prompts in progress wait again.
        """
        running = self.running_batch
        while not running.check_decode_mem(reqs):
            if self.sessions.release_oldest():
                continue
            if not alone or in_flight:
                return []
            in_progress = [req for req in self.waiting_queue.in_progress if not req.awaits_kv]
            if len(running) > 1:
                self._retract(running.retract_decode())
            elif in_progress:
                self._retract(in_progress[-1])
            elif self.remote is not None and self.remote.busy:  # they will have their KV, or give their slots up
                return []
            else:
                raise EngineError(f"no KV slot is left for the only running request, {reqs[0].rid}")
            reqs = self._decodable()
        if alone:
            self._ratio.decay()
        self.kv.extend_by_one(reqs)
        if self.guesses:
            self._guesser.propose(reqs)
            for req in reqs:
                if req.drafts and not self.kv.extend(req, len(req.drafts)):
                    req.drafts = ()
        return reqs

    @property
    def guesses(self) -> bool:
        """Whether the next step may have guesses. Such steps do not overlap."""
        return self._guesser.guesses(self.running_batch.reqs)

    def _make_batch(self, prompts: Sequence[Req], decoding: Sequence[Req]) -> ScheduleBatch:
        """Make a step of requests that have their slots. A prompt that it completes decodes from here on."""
        sampling, beside = self.running_batch.sampling, len(self.running_batch) > 0
        allowed_s = self._costs.allowed_s(beside=beside)
        mode, guesses = _mode(prompts, decoding), self.guesses
        batch = ScheduleBatch(self.kv, mode, prompts, decoding, sampling, allowed_s=allowed_s, guesses=guesses)
        for part in batch.prompts:
            if part.completes:
                self.waiting_queue.set_in_progress(part.req, False)
                part.req.move_to(ReqStatus.DECODING)
                self.running_batch.merge(part.req)
        self._steps += 1
        self.meter.step(batch)
        return batch

    def next_slice_s(self, batch: ScheduleBatch | None) -> float:
        """Return for how many seconds the encoder may work before the next step, and note that it does; 0 for no work.

        batch: the step before. Beside requests that decode, prompts and slices take turns: no two of them come between
        two tokens.
        """
        decoding = len(self.running_batch) > 0
        if decoding and (self.due.no_slice or (batch is not None and batch.prompt_tokens)):
            return 0.0
        if decoding and not self._costs.patient and self.encoder.takes_turns:
            self.due = self.due._replace(decode=True, sliced=True)
        return self._costs.take_slice_s(decoding=decoding)

    def encoded(self, seconds: float) -> None:
        """Note that a slice of encoding took so long."""
        self._decoded_at = None
        if not self.is_idle():  # otherwise it encoded ahead of time
            self._costs.encoded(seconds)
        self.meter.encoded(seconds)

    def rest(self, *, held_bytes: int) -> bool:
        """Look for the reason when nothing could be decided and nothing is in flight. Returns whether another turn may
        get on.

        An idle scheduler checks its pools. held_bytes: see `check_pools`.
        """
        if not self.is_idle():
            return self._resolve_stall()
        self.due = Due()
        self._decoded_at = None
        self._ratio.reset()
        if self._args.check_pools_when_idle:
            self.check_pools(held_bytes=held_bytes)
        return False

    # ------------------------------------------------------------ giving places up

    def _retract(self, req: Req) -> None:
        """Let a request wait again that is in no list of running requests any more. Its tokens are kept, its KV stays
        cached until it is evicted, and its answer does not change."""
        if self._handed is not None and self._handed.is_read(req):
            self._cut_off(req, error(503, "KV slots ran out before its prompt was computed"))
            return
        if req.status is ReqStatus.PREFILLING:
            self.waiting_queue.set_in_progress(req, False)
        else:
            self._retracted += 1
            self._ratio.raise_after_retraction(self.running_batch.reqs)
            log.info("retracted %s: %d requests go on", req.rid, len(self.running_batch))
        self.kv.release(req)
        req.namespace = self.intake.namespace_of(req)  # its KV may have been of older weights
        self.meter.preempted(req)
        req.move_to(ReqStatus.RETRACTED)
        self.waiting_queue.add(req)

    def retract_all(self) -> None:
        """Let all requests wait again. No step may be in flight."""
        for req in self.running_batch.reqs:
            self.running_batch.remove(req)
            self._retract(req)
        for req in self.waiting_queue.in_progress:
            self._retract(req)

    def weights_changed(self, epoch: bytes) -> None:
        """Go on with other weights. What was cached under the old ones is out of reach: KV by its namespace, which
        begins with the epoch, and embeddings by their keys. KV of requests under way stays, and is found by nobody."""
        self.flush_cache()
        self.intake.epoch = epoch
        self.due = Due()
        for req in self._reqs.values():
            if req.status.is_queued:
                req.namespace = self.intake.namespace_of(req)
                if not req.output_ids:
                    req.begin_scores()
            if req.prefetch is None and req.status is not ReqStatus.TRANSFERRING:
                req.media.renew(req.kv_committed_len)

    def _resolve_stall(self) -> bool:
        """Find out why no request can be computed: they wait for the encoder, or block each other. Returns whether
        another turn may get on."""
        if self.due.gap:  # the encoder had work when it was asked
            return True
        tried, self.due = self.due.urgent, self.due._replace(urgent=None)
        if self.encoder.working or self.intake.is_fetching or self._waits_for_servers:
            return False
        # Nothing runs, so the first request in line lacks either embeddings, for which there is no room, or KV slots.
        in_progress = self.waiting_queue.in_progress
        first = in_progress[0] if in_progress else self.waiting_queue.first()
        urgent = first.media.first_unready()
        self.due = self.due._replace(urgent=urgent)
        if urgent is None and in_progress:
            self._retract(in_progress[-1])
        elif urgent is None or tried is not None:
            raise EngineError(f"{len(self.waiting_queue)} requests wait, and none can be computed")
        return True

    def _fail_unencodable(self, failures: Mapping[bytes, str]) -> bool:
        if not failures:
            return False
        found = [(req, key) for req in self._reqs.values() if (key := req.media.holds(failures.keys()))]
        for req, key in found:
            log.warning("%s fails: a picture or video of it could not be encoded", req.rid)
            self._cut_off(req, error(500, f"a picture or video could not be encoded: {failures[key]}"))
        return bool(found)

    # ------------------------------------------------------------ results

    def fail_batch(self, batch: ScheduleBatch, failure: BaseException) -> None:
        """End the requests of a step that raised. Other requests go on."""
        for part in batch.reqs:
            if not part.req.is_finished:
                why = failure if isinstance(failure, EngineError) else type(failure).__name__
                self._cut_off(part.req, error(500, f"internal error: {why}"))

    def process_batch_result(self, batch: ScheduleBatch, result: ModelWorkerResult) -> list[TokenOutput]:
        """Take the results of a step: commit KV, append tokens, share prefixes, end answers. Returns the outputs to
        send."""
        parts_s = self._costs.observe(
            prompt_tokens=batch.prompt_tokens,
            decoding=len(batch.decoding),
            allowed_s=batch.allowed_s,
            joined=sum(part.completes for part in batch.prompts),
            seconds=result.compute_s,
        )
        self.meter.computed(*parts_s, decoding=len(batch.decoding))
        before, self._decoded_at = self._decoded_at, None if batch.prompt_tokens else self._clock()
        brought_tokens = 0
        outputs: list[TokenOutput] = []
        for brought in part_results(batch, result):
            part, req = brought.part, brought.part.req
            if req.is_finished:  # while the step was in flight
                continue
            self.kv.commit(req, part.end - part.tokens_sampled + len(brought.tokens))
            if part.drafts:
                self._drop_drafts(req, len(part.drafts) + 1 - len(brought.tokens))
            brought_tokens += len(brought.tokens)
            if part.start < req.prompt_len:
                req.media.hold_from(part.end)
                self.kv.share(req)
                if self._handed is not None:
                    self._handed.computed(req)
            if brought.prompt is not None:
                assert req.prompt_scores is not None
                req.prompt_scores.take(part.scored[0], brought.prompt)
            if req.pooled is not None and brought.hidden is not None:
                req.pooled.take(part.hidden, brought.hidden)
            if not part.completes:
                continue
            if not part.output_index:
                self.meter.first_token(req)
            if brought.failure is not None:
                self._cut_off(req, error(500, brought.failure))
                continue
            outputs.append(self._take_tokens(req, brought))
        if before is not None and self._decoded_at is not None:
            reqs = len(batch.decoding)
            seconds = self._decoded_at - before
            self._guesser.stepped(seconds, guessed=batch.guesses, reqs=reqs, tokens=brought_tokens)
        return outputs

    def _drop_drafts(self, req: Req, wrong: int) -> None:
        self.kv.truncate(req, req.kv_committed_len)
        count, right = len(req.drafts), len(req.drafts) - wrong
        guesses = Guesses(steps=1, tokens=count, right_at=(1,) * right + (0,) * wrong)
        req.guesses = req.guesses.plus(guesses)
        self.meter.checked(guesses)
        self._guesser.checked(req, right)
        req.state_lag = len(req.drafts) + 1 - wrong
        req.drafts = ()
        req.in_flight -= wrong

    def _take_tokens(self, req: Req, brought: PartResult) -> TokenOutput:
        reason = None if brought.tokens else FinishReason(type="length")
        for token in brought.tokens:  # only the last one can end it
            req.in_flight -= 1
            reason = req.append_output(token)
            self._generated += 1
            self.waiting_queue.charge(req, _OUTPUT_COST)
        if reason is not None and self._handed is not None and self._handed.complete(req):
            self.running_batch.remove(req)
            req.move_to(ReqStatus.TRANSFERRING)
            req.media.release()
        elif reason is not None:
            self._costs.answered(len(req.output_ids))
            self._end(req, reason)
            self._finished += 1
        hidden = brought.hidden if req.pooled is None else req.pooled.vector()
        return token_output(req, brought.tokens, brought.logprobs, hidden)

    # ------------------------------------------------------------ state

    def adapters_in_use(self) -> set[str]:
        """Return the digests of the adapters that requests have."""
        return {req.adapter.digest for req in self._reqs.values() if req.adapter is not None}

    def is_idle(self) -> bool:
        """Return True if there is no request, and no slot that another server's KV is written to."""
        return not self._reqs and not (self.remote is not None and self.remote.busy)

    @property
    def wait_handles(self) -> list[int]:
        """Return file descriptors of which one becomes readable when another turn has something to do."""
        intake = [self.intake.wait_handle] if self.intake.is_fetching else []
        return intake + ([self.remote.fd] if self.remote is not None and self.remote.busy else [])

    @property
    def _waits_for_servers(self) -> bool:
        """Whether slots are going to be free, or to have their KV, when other servers get on."""
        return (self.remote is not None and self.remote.busy) or (self._handed is not None and self._handed.holds)

    def behind_all_media(self) -> int:
        """Return an order for the encoder that is behind all requests so far."""
        return self.intake.encoder_order.behind_all()

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request uses, sessions included. Returns how many tokens they had."""
        self.sessions.release_all()
        return self.kv.prefix_cache.reset()

    def check_pools(self, *, held_bytes: int) -> None:
        """Check an idle scheduler for lost memory, see `meter.check_pools`. held_bytes: embeddings held by error."""
        states, windows = self.kv.states, self.kv.windows
        check_pools(
            self.stats(),
            held_bytes=held_bytes,
            sessions=len(self.sessions),
            held_states=states.held if states is not None else 0,
            held_windows=windows.size - windows.available_size() if windows is not None else 0,
        )

    def stats(self) -> SchedulerStats:
        """Return figures of this moment, without those of the encoder."""
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
            encoder=PoolStats(),
            finished_total=self._finished,
            aborted_total=self._aborted,
            retracted_total=self._retracted,
            forward_steps_total=self._steps,
            steps=steps,
            handover=other.stats() if (other := self._handed or self.remote) is not None else HandoverStats(),
        )


def _mode(prompts: Sequence[Req], decoding: Sequence[Req]) -> ForwardMode:
    if not decoding:
        return ForwardMode.EXTEND
    return ForwardMode.MIXED if prompts or any(req.drafts for req in decoding) else ForwardMode.DECODE
