"""Continuous batching: which tokens are computed next, for whom, in which slots.

A step is a prompt step (chunks of new requests, by `PrefillAdder`) or a decode step (one token for each running
request), or both at once with mixed chunks. While requests are running, prompt and decode steps alternate, so a long
prompt delays nobody for longer than one chunk.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Protocol

import numpy as np

from vision.encoder_pool import EncoderPool
from vlmserve.attention.base import ForwardMode
from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, ModelWorkerResult
from vlmserve.memory.media_keys import MediaKeyTable, radix_key
from vlmserve.messages import (
    AbortReq,
    BatchTokenOutput,
    FinishReason,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenLogprobs,
    TokenOutput,
)
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.new_token_ratio import NewTokenRatio
from vlmserve.scheduler.policy import SchedulePolicy
from vlmserve.scheduler.prefill_adder import AddReqResult, PrefillAdder
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_media import ReqMedia
from vlmserve.scheduler.schedule_batch import ScheduleBatch
from vlmserve_common.errors import EngineError

log = logging.getLogger(__name__)


class ModelWorker(Protocol):
    """Whatever computes a step: the `ModelRunner`, a process that holds one, or a test's fake."""

    def forward(self, batch: ModelWorkerBatch) -> ModelWorkerResult: ...


class Scheduler:
    """Owns every request from arrival to its last token. Single-threaded: call `handle` and `step` in turn.

    max_req_len: tokens of prompt and answer of one request together, at most.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        max_req_len: int,
        eos_token_ids: frozenset[int],
        kv: KVCacheManager,
        worker: ModelWorker,
        encoder: EncoderPool,
        policy: SchedulePolicy[Req],
        new_token_ratio: NewTokenRatio,
        media_keys: MediaKeyTable,
        send: Callable[[SchedulerOutput], None],
    ) -> None:
        self._args = args
        self._max_req_len = max_req_len
        self._eos_token_ids = eos_token_ids
        self.kv = kv
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(kv)
        self.chunked_reqs: list[Req] = []
        self.encoder = encoder
        self.arrivals = 0  # requests that have come so far
        self._worker = worker
        self._policy = policy
        self._ratio = new_token_ratio
        self._media_keys = media_keys
        self._send = send
        self._steps = 0
        self._decode_is_due = False
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
            self._send(BatchTokenOutput(outputs=(_refused(message, refusal),)))
            return
        room = self._max_req_len - len(message.input_ids)
        wanted = message.sampling_params.max_new_tokens
        req = Req(
            message,
            key_ids=radix_key(message.input_ids, message.mm_inputs, self._media_keys),
            media=ReqMedia(message.mm_inputs, self.encoder, order=self.arrivals),
            max_new_tokens=room if wanted is None else min(wanted, room),
            eos_token_ids=self._eos_token_ids,
            arrival=self.arrivals,
        )
        self.arrivals += 1
        if self._media_keys.is_large:
            self._trim_media_keys(req)
        self._prompt_tokens += req.prompt_len
        req.media.hold_from(self.kv.matched_len(req))
        self.waiting_queue.append(req)

    def _refusal(self, message: TokenizedGenerateReqInput) -> FinishReason | None:
        length, limit = len(message.input_ids), self._max_req_len
        if length == 0:
            return _error(400, "the prompt is empty")
        if length >= limit:
            return _error(
                400,
                f"the prompt has {length} tokens and there is room for {limit} tokens of prompt and answer together "
                "(settings: --max-model-len, --max-total-tokens)",
            )
        return None

    def queue_is_full(self, *, also_waiting: int = 0) -> FinishReason | None:
        """Why no more requests are taken now; None if they are. also_waiting: as for `handle`."""
        waiting = len(self.waiting_queue) + also_waiting
        if waiting < self._args.max_queued_requests:
            return None
        return _error(429, f"{waiting} requests are waiting already (setting: --max-queued-requests)")

    def _abort(self, message: AbortReq) -> None:
        req = next((req for req in self._requests() if req.rid == message.rid), None)
        if req is None:
            return
        if message.finished:
            self._take_out(req, FinishReason(type="stop"))
            self._finished += 1
        else:
            self._cut_off(req, FinishReason(type="abort"))

    def _cut_off(self, req: Req, reason: FinishReason) -> None:
        """End a request before its time, and say so."""
        self._take_out(req, reason)
        self._aborted += 1
        self._send(BatchTokenOutput(outputs=(self._output(req, (), None),)))

    def _take_out(self, req: Req, reason: FinishReason) -> None:
        """Forget a request that ends before its time, and all that it holds."""
        req.finish_reason = reason
        req.media.release()
        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
            return
        self.kv.release(req)
        self.running_batch.filter_batch()
        if req in self.chunked_reqs:
            self.chunked_reqs.remove(req)

    # ------------------------------------------------------------ steps

    def step(self, *, encoder_is_shared: bool = False) -> bool:
        """Compute one step, of the encoder, the model or both; False if there is nothing to do now. When idle, that
        comes after checking the pools; otherwise see `wait_handles`.

        encoder_is_shared: others hold embeddings, too, so that those held say nothing of requests.
        """
        encoded = self._encode()
        batch = self.get_next_batch_to_run()
        if batch is None and not encoded:
            if self.is_idle():
                self._urgent = None
                self._ratio.reset()
                if self._args.check_pools_when_idle:
                    self.check_pools(encoder_is_shared=encoder_is_shared)
                return False
            return self._resolve_stall()
        self._urgent = None
        if batch is None:
            return True
        self._steps += 1
        try:
            result = self._worker.forward(batch.get_model_worker_batch(self._steps))
        except Exception as error:
            log.exception("step %d failed; its %d requests are answered with an error", self._steps, len(batch))
            self._fail(batch, error)
            return True
        except BaseException as error:  # interrupted: nothing of the step may stay behind
            self._fail(batch, error)
            raise
        self._process(batch, result)
        return True

    def wait_handles(self) -> list[int]:
        """After `step` said False: file descriptors one of which becomes readable when it has something to do again,
        without a message. None if only a message can change that."""
        return self.encoder.wait_handles() if self.encoder.busy else []

    def step_or_wait(self) -> None:
        """`step`, for those who have no messages to attend to: if requests wait for the encoder, wait with them."""
        if not self.step() and not self.is_idle():
            wait(self.wait_handles())

    def _encode(self) -> bool:
        """Let the encoder get on; whether it did. Inline it takes time, and does not come between two decode steps
        more often than prompts do."""
        if self.encoder.inline and self._decode_is_due and self.running_batch.reqs:
            return False
        changed = self.encoder.advance(urgent=self._urgent)
        changed |= self.encoder.work(math.inf) and self.encoder.advance()
        failures = self.encoder.take_failures()
        return self._fail_unencodable(failures) or changed

    def _resolve_stall(self) -> bool:
        """When no request can be computed: the encoder is to wait for, or requests block each other. Whether another
        step may get on."""
        tried, self._urgent = self._urgent, None
        if self.encoder.working:
            return False
        # With nothing running, the first in line lacks either embeddings, for which there is no room, or KV slots.
        first = min(self.chunked_reqs, key=lambda req: req.arrival) if self.chunked_reqs else self.waiting_queue[0]
        self._urgent = first.media.first_unready()
        if self._urgent is None and self.chunked_reqs:
            self._put_back(max(self.chunked_reqs, key=lambda req: req.arrival))
        elif self._urgent is None or tried is not None:
            raise EngineError(f"{len(self.waiting_queue)} requests wait, and none can be computed")
        return True

    def _put_back(self, req: Req) -> None:
        """Let a prompt in progress wait again; what it computed stays cached."""
        self.chunked_reqs.remove(req)
        self.kv.release(req)
        self.waiting_queue.insert(0, req)

    def _fail(self, batch: ScheduleBatch, error: BaseException) -> None:
        """End the requests of a step that raised; the others go on."""
        for req in batch.reqs:
            self._cut_off(req, _error(500, f"internal error: {type(error).__name__}"))

    def _fail_unencodable(self, failures: dict[bytes, str]) -> bool:
        """End the requests that need a picture which could not be encoded; whether there are any."""
        if not failures:
            return False
        found = [(req, key) for req in self._requests() if (key := req.media.holds(failures.keys()))]
        for req, key in found:
            self._cut_off(req, _error(500, f"a picture or video could not be encoded: {failures[key]}"))
        return bool(found)

    def is_idle(self) -> bool:
        """Whether no request is waiting, being computed or decoding."""
        return not self._requests()

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Decide the next step."""
        if self._decode_is_due and self.running_batch.reqs:
            self._decode_is_due = False
            return self._decode_batch()
        batch = self._prefill_batch()
        if batch is not None:
            self._decode_is_due = not self._args.enable_mixed_chunk
            return batch
        return self._decode_batch() if self.running_batch.reqs else None

    def _prefill_batch(self) -> ScheduleBatch | None:
        if not self.waiting_queue and not self.chunked_reqs:
            return None
        running = self.running_batch
        mixed = self._args.enable_mixed_chunk and len(running) > 0
        if mixed:
            self._make_room_to_decode()
        adder = PrefillAdder(
            self.kv,
            running=running.reqs,
            new_token_ratio=self._ratio.value,
            max_prefill_tokens=self._args.max_prefill_tokens,
            chunk_size=self._args.chunked_prefill_size,
            mixed_decode_tokens=len(running) if mixed else 0,
        )
        if self._continue_chunked(adder):
            self._admit_waiting(adder)
        self.chunked_reqs = [req for req in self.chunked_reqs if req not in adder.can_run] + adder.unfinished
        if not adder.can_run:
            return None
        batch = ScheduleBatch(self.kv, adder.can_run, ForwardMode.EXTEND)
        if mixed and len(running) and running.check_decode_mem():
            batch.mix_with_running(running)
        return batch

    def _continue_chunked(self, adder: PrefillAdder) -> bool:
        """The next chunks of prompts in progress, oldest first; running requests are retracted if one has no slots
        otherwise. Whether waiting requests may follow: these have got all they can use."""
        for req in sorted(self.chunked_reqs, key=lambda req: req.arrival):
            result = adder.add_chunked_req(req)
            while result is AddReqResult.NO_TOKEN and self.running_batch.reqs:
                self._retract(self.running_batch)
                result = adder.add_chunked_req(req)
            if adder.full or result in (AddReqResult.NO_TOKEN, AddReqResult.OTHER):
                return False
        return True

    def _admit_waiting(self, adder: PrefillAdder) -> None:
        if not self.waiting_queue:
            return
        to_try = self._policy.calc_priority(self.waiting_queue)
        for req in self.waiting_queue[:to_try]:
            if adder.full or len(self.running_batch) + len(adder.can_run) >= self._args.max_running_requests:
                break
            result = adder.add_one_req(req)
            if result is AddReqResult.CONTINUE:
                self.waiting_queue.remove(req)
            elif result is not AddReqResult.NOT_READY:
                break

    def _make_room_to_decode(self) -> None:
        running = self.running_batch
        while len(running) > 1 and not running.check_decode_mem():
            self._retract(running)

    def _decode_batch(self) -> ScheduleBatch | None:
        running = self.running_batch
        self._make_room_to_decode()
        while not running.check_decode_mem():
            # a single request, and the rest of the pool held by prompts in progress: these wait again
            if not self.chunked_reqs:
                raise EngineError(f"no KV slot is left for the only running request, {running.reqs[0].rid}")
            self._put_back(max(self.chunked_reqs, key=lambda req: req.arrival))
        self._ratio.decay()
        running.prepare_for_decode()
        return ScheduleBatch(self.kv, running.reqs)

    def _retract(self, running: ScheduleBatch) -> None:
        req = running.retract_decode()
        self.waiting_queue.insert(0, req)
        self._retracted += 1
        self._ratio.raise_after_retraction(running.reqs)
        log.info("retracted %s: the KV cache is full, %d requests go on", req.rid, len(running))

    # ------------------------------------------------------------ results

    def _process(self, batch: ScheduleBatch, result: ModelWorkerResult) -> None:
        outputs: list[TokenOutput] = []
        sampled = 0
        for req in batch.reqs:
            completes = req.completes
            req.kv_len += req.extend_input_len
            req.extend_input_len = 0
            req.media.hold_from(req.kv_len)
            if not completes:
                self.kv.share(req)
                req.check()
                continue
            token = int(result.next_token_ids[sampled])
            logprobs = req.logprobs_of(
                token, result.logprobs[sampled], result.top_ids[sampled], result.top_logprobs[sampled]
            )
            sampled += 1
            prompt_done = len(req.output_ids) == 0
            req.append_output(token)
            self._generated += 1
            if req.finish_reason is not None:
                self.kv.release(req)
                self._finished += 1
            elif prompt_done:
                self._cached_tokens += req.cached_tokens
                self.kv.share(req)
            outputs.append(self._output(req, (token,), logprobs))
        # from here on a request is in exactly one of: waiting queue, chunked_reqs, running batch
        self.running_batch.merge_batch(batch)
        self.running_batch.filter_batch(gone=self.chunked_reqs)
        if outputs:
            self._send(BatchTokenOutput(outputs=tuple(outputs)))

    def _output(self, req: Req, tokens: tuple[int, ...], logprobs: TokenLogprobs | None) -> TokenOutput:
        first, req.reported = not req.reported, True
        return TokenOutput(
            rid=req.rid,
            token_ids=tokens,
            finish_reason=req.finish_reason,
            prompt_tokens=req.prompt_len,
            completion_tokens=len(req.output_ids),
            cached_tokens=req.cached_tokens,
            logprobs=None if logprobs is None else (logprobs,),
            first=first,
            stop=req.sampling_params.stop if first else (),
            skip_special_tokens=req.sampling_params.skip_special_tokens,
        )

    # ------------------------------------------------------------ state

    def _requests(self) -> list[Req]:
        """Everyone in the house, once each."""
        return [*self.waiting_queue, *self.running_batch.reqs, *self.chunked_reqs]

    def _trim_media_keys(self, newcomer: Req) -> None:
        """Forget media that neither a cached prefix nor a request holds."""
        live = self.kv.prefix_cache.live_keys()
        for req in [newcomer, *self._requests()]:
            live.update(np.unique(req.key_ids[req.key_ids < 0]).tolist())
        self._media_keys.retain(live)

    def flush_cache(self) -> None:
        """Forget every cached prefix that no request uses."""
        self.kv.prefix_cache.reset()

    def check_pools(self, *, encoder_is_shared: bool = False) -> None:
        """When idle: free + cached-and-unlocked = total, for KV slots, the request pool and, unless it is shared, the
        encoder's memory; else EngineError."""
        stats = self.stats()
        problems = []
        if stats.kv_locked_tokens:
            problems.append(f"{stats.kv_locked_tokens} KV slots are locked")
        free, cached, total = stats.kv_free_tokens, stats.kv_cached_tokens, stats.kv_total_tokens
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
            num_running_reqs=len(self.running_batch) + len(self.chunked_reqs),
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
        )


def _error(status: int, message: str) -> FinishReason:
    return FinishReason(type="error", status=status, message=message)


def _refused(message: TokenizedGenerateReqInput, reason: FinishReason) -> TokenOutput:
    return TokenOutput(
        rid=message.rid,
        token_ids=(),
        finish_reason=reason,
        prompt_tokens=len(message.input_ids),
        completion_tokens=0,
        cached_tokens=0,
        first=True,
        stop=message.sampling_params.stop,
        skip_special_tokens=message.sampling_params.skip_special_tokens,
    )
