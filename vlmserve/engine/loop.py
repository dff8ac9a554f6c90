"""The event loop of an engine: it launches steps and slices of encoding on the device, and waits for their results.

Each turn of the loop

1. collects embeddings from the encoder, and lets every scheduler take embeddings, grammars and prefixes,
2. asks every scheduler for its next batch, and launches these batches as one step on the device,
3. launches a slice of encoding, if the encoder works in this process,
4. waits for the oldest step, if enough steps are in flight, and hands its results to the schedulers.

This is the plain loop if one step is in flight. If there are two, a step is decided while the last one is computed.

There is one scheduler, or one for each attention group (`--enable-dp-attention`). Groups have their own requests, KV
and prefixes. They share the device and the encoder. A step holds a batch of each group, and a group without a batch
joins the collectives of the other groups. If a step fails, the requests of its batches are answered with an error.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from vision.cache.stats import LinkStats, PoolStats, TierStats
from vision.encoder_pool import EncoderPool
from vlmserve.engine.encoder_warmups import EncoderWarmups
from vlmserve.engine.step import GroupsWorker, StepHandle
from vlmserve.executor.device_queue import DeviceQueue, Work
from vlmserve.ipc.control_messages import sum_stats
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenOutput,
    EncodeReqInput,
    ExpertStats,
    FinishReason,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from vlmserve.ipc.routing import demand_of
from vlmserve.routing.replicas import ReplicaRouter
from vlmserve.scheduler.handover import Sender
from vlmserve.scheduler.meter import BatchLog
from vlmserve.scheduler.outputs import refused
from vlmserve.scheduler.schedule_batch import ScheduleBatch
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve_common.errors import DeviceLostError, EngineError

log = logging.getLogger(__name__)

_TURNS_PER_WARMUP = 16
"""Beside requests, an encoder in this process is asked for media ahead of time once in so many turns."""
_MOST_PROMPTS = 4096
"""Prompts whose group is remembered; the oldest is forgotten first."""


class EventLoop:
    """The loop over the schedulers of one engine. Single-threaded: call `handle` and `step` in turn.

    worker: computes the steps of all schedulers on `device`. encoder: shared by all schedulers, and by media that are
    encoded ahead of time. send: gets the outputs of steps, and answers about media encoded ahead of time.
    max_patches: see `EncoderWarmups`. placement: chooses a group for each request; needed for several schedulers.
    peers: other servers, whose prompts are computed here.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        *,
        worker: GroupsWorker,
        device: DeviceQueue,
        encoder: EncoderPool,
        send: Callable[[SchedulerOutput], None],
        max_patches: int,
        placement: GroupPlacement | None = None,
        peers: Sender | None = None,
        expert_stats: Callable[[], ExpertStats] = ExpertStats,
        batch_log: BatchLog | None = None,
    ) -> None:
        assert schedulers, "an engine has a scheduler"
        assert (placement is not None) == (len(schedulers) > 1), "several groups need a placement"
        self.schedulers = tuple(schedulers)
        self.worker, self.device, self.encoder = worker, device, encoder
        self._running = [scheduler.running_batch for scheduler in self.schedulers]
        self.batch_log = batch_log or BatchLog(0.0)
        self._send = send
        self._placement = placement
        self._peers = peers
        self._expert_stats = expert_stats
        self._warmups = EncoderWarmups(encoder, send=send, max_patches=max_patches)
        self._in_flight: deque[StepHandle] = deque()
        # in flight, each with the number of the step before it, and the scheduler that it takes turns with
        self._slices: deque[tuple[int, Scheduler, Work[float]]] = deque()
        self._steps = self._turns = 0
        self.admit: Callable[[TokenizedGenerateReqInput], FinishReason | None] = lambda message: None
        """Returns why a prompt of another server cannot be computed here, if it cannot."""

    # ------------------------------------------------------------ messages

    def handle(self, message: TokenizedGenerateReqInput | EncodeReqInput | AbortReq) -> None:
        """Take one message. A request that can never run is answered with an error at once."""
        if isinstance(message, EncodeReqInput):
            self._warmups.add(message)
            return
        group: int | None = 0
        if isinstance(message, AbortReq):
            if self._warmups.abort(message.rid):
                return
            if self._placement is not None:
                group = self._placement.end(message.rid)
        elif self._placement is not None:
            group = self._placement.place(message)
        if group is not None:
            self.schedulers[group].handle(message)

    # ------------------------------------------------------------ turns

    def step(self) -> bool:
        """Do one turn. False: there is nothing to do until a message comes, or one of `wait_handles` is readable."""
        if self._peers is not None:
            for message in self._peers.take():
                if not isinstance(message, AbortReq) and (reason := self.admit(message)) is not None:
                    self._send(BatchTokenOutput(outputs=(refused(message, reason),)))
                else:
                    self.handle(message)
        moved = self._take_ready()
        encoding, steps = self._encoding_group(), self._steps
        batches = self._launch_step(encoding)
        launched = self._steps > steps
        sliced = self._launch_slice(encoding, batches)
        resting = [] if moved or self._slices else self._resting(batches)
        busy = moved or launched or sliced
        if (self._in_flight or self._slices) and (not launched or len(self._in_flight) >= self._depth()):
            self._take_oldest()
            busy = True
        for scheduler in resting:
            busy |= scheduler.rest(held_bytes=self._held_bytes())
        return self._encode_ahead(busy)

    def step_or_wait(self) -> None:
        """Do one turn, for callers without a message queue. If requests wait for the encoder, wait with them."""
        if not self.step() and not self.is_idle():
            wait(self.wait_handles())

    def wait_handles(self) -> list[int]:
        """Return file descriptors to wait for after `step` returned False. One of them becomes readable when another
        turn has something to do. The list is empty if only a message can change anything."""
        handles = self.encoder.wait_handles() if self.encoder.busy else []
        handles += [handle for scheduler in self.schedulers for handle in scheduler.wait_handles]
        return handles if self._peers is None else [*handles, self._peers.fd]

    def drain(self) -> None:
        """Take the results of everything in flight, and launch nothing."""
        while self._in_flight or self._slices:
            self._take_oldest()

    def settle(self) -> None:
        """Finish all that is in flight, and what the encoder has begun; begin nothing."""
        self.drain()
        while self.encoder.working:
            if self.encoder.has_work:
                self.device.submit(self.encoder.work, math.inf).result()
            elif not self.encoder.take_results():
                wait(self.encoder.wait_handles())

    def retract_all(self) -> None:
        """Let all requests wait again, without any KV of theirs."""
        self.drain()
        for scheduler in self.schedulers:
            scheduler.retract_all()

    def weights_changed(self, epoch: str, *, tower: bool) -> None:
        """Go on with other weights, in an engine that is settled: nothing that was computed before is found again.
        Requests that wait are computed with these weights; those that are paused go on with them. tower: whether media
        become other embeddings, too."""
        if tower:
            self.encoder.change_tower(epoch.encode())
        self._warmups.begin_anew()
        if self._placement is not None:
            self._placement.forget()
        for scheduler in self.schedulers:
            scheduler.weights_changed(epoch.encode())

    def _take_ready(self) -> bool:
        """Collect embeddings, and let all schedulers take them. Returns whether any have come, or failed."""
        encoded = False
        for urgent in dict.fromkeys([scheduler.due.urgent for scheduler in self.schedulers]):
            encoded |= self.encoder.advance(urgent=urgent)
        failures = self.encoder.take_failures()
        moved = encoded
        for scheduler in self.schedulers:
            moved |= scheduler.take_ready(encoded=encoded, failures=failures)
        return moved

    def _launch_step(self, encoding: int) -> list[ScheduleBatch | None] | None:
        """Launch the next batch of each group as one step, if any group has one. Returns the batches; None if no group
        was asked, as the next step reads tokens that have not been sampled yet.

        encoding: see `_encoding_group`.
        """
        for step in self._in_flight:
            if not step.is_sampled:
                return None
        batches: list[ScheduleBatch | None] = []
        try:
            for group, scheduler in enumerate(self.schedulers):
                before = [batch for step in self._in_flight if (batch := step.batches[group]) is not None]
                batches.append(scheduler.get_next_batch_to_run(before, encodes=group == encoding))
            reqs = sum(map(len, filter(None, batches)))
            if reqs:
                self._steps += 1
                self._in_flight.append(StepHandle(self._submit(reqs), self.worker, batches, self._steps))
        except BaseException as failure:  # an interrupted launch must leave nothing of the step behind
            self._fail(batches, failure)
            raise
        return batches

    def _launch_slice(self, group: int, batches: Sequence[ScheduleBatch | None] | None) -> bool:
        """Launch a slice of encoding, if the encoder works in this process. Returns whether one was launched.

        group: see `_encoding_group`.
        """
        if not self.encoder.has_work:
            return False
        scheduler = self.schedulers[group]
        seconds = scheduler.next_slice_s(None if batches is None else batches[group])
        if seconds:
            self._slices.append((self._steps, scheduler, self._submit(self._num_decoding())(self._encode, seconds)))
        return seconds > 0

    def _encode(self, budget_s: float) -> float:
        """Encode for about so many seconds, on the device's thread. Returns how many it took."""
        began = time.perf_counter()
        self.encoder.work(budget_s)
        return time.perf_counter() - began

    def _resting(self, batches: Sequence[ScheduleBatch | None] | None) -> list[Scheduler]:
        """Return the schedulers that have nothing in flight, and had no batch when they were asked."""
        if batches is None or None not in batches:
            return []
        return [
            scheduler
            for group, scheduler in enumerate(self.schedulers)
            if batches[group] is None and all(step.batches[group] is None for step in self._in_flight)
        ]

    def _take_oldest(self) -> None:
        """Wait for the oldest step and the slices launched before it, and let the schedulers process its results."""
        step = self._in_flight[0] if self._in_flight else None
        while self._slices and (step is None or self._slices[0][0] < step.number):
            _, scheduler, work = self._slices[0]
            seconds = work.result()  # never raises: the encoder tells its failures by its results
            self._slices.popleft()
            scheduler.encoded(seconds)
        if step is None:
            return
        try:
            results = step.results()
        except Exception as failure:
            self._in_flight.popleft()
            rids = [part.req.rid for batch in step.batches if batch is not None for part in batch.reqs]
            log.exception(
                "step %d failed; its %d requests are answered with an error: %s",
                step.number,
                len(rids),
                ", ".join(rids),
            )
            self._fail(step.batches, failure)
            if isinstance(failure, DeviceLostError):
                raise
            return
        self._in_flight.popleft()  # not before: an interrupted wait leaves it to the next turn
        self._process(step, results)

    def _process(self, step: StepHandle, results: Sequence[Any]) -> None:
        outputs = []
        for scheduler, batch, result in zip(self.schedulers, step.batches, results, strict=True):
            if batch is not None:
                outputs += scheduler.process_batch_result(batch, result)
        if self._in_flight:  # the tokens that its sampling depends on have come
            self._in_flight[0].sample()
        if outputs:  # sent while the device samples
            self._send(BatchTokenOutput(outputs=tuple(outputs)))

    def _fail(self, batches: Sequence[ScheduleBatch | None], failure: BaseException) -> None:
        for scheduler, batch in zip(self.schedulers, batches, strict=False):
            if batch is not None:
                scheduler.fail_batch(batch, failure)

    def _encode_ahead(self, busy: bool) -> bool:
        """Go on with media that are encoded ahead of time, behind the requests that are there and before later ones.
        Returns whether there is anything to do now."""
        idle = self._has_no_requests()
        if len(self._warmups):
            may_ask = not self.encoder.inline or idle or self._turns % _TURNS_PER_WARMUP == 0
            order = max(scheduler.behind_all_media() for scheduler in self.schedulers) if may_ask else None
            busy |= self._warmups.advance(order=order)
        self._turns += 1
        self.batch_log.step(self.stats, idle=idle)
        if idle and not busy and len(self._warmups) and not self.encoder.busy:
            raise EngineError(f"{len(self._warmups)} requests to encode ahead of time wait, and none gets on")
        return busy

    # ------------------------------------------------------------ how much in flight

    def _num_decoding(self) -> int:
        return sum(map(len, self._running))

    def _depth(self) -> int:
        # the stages of a pipeline (depth 3 and more) have different requests, and need no request twice
        if self.device.depth == 2 and any(scheduler.guesses for scheduler in self.schedulers):
            return 1
        return self.device.depth if self._num_decoding() >= self.device.least_reqs else 1

    def _encoding_group(self) -> int:
        """Return the group whose steps take turns with slices of encoding: the one with most requests that decode. It
        knows best how long a slice may be."""
        if len(self.schedulers) == 1:
            return 0
        decoding = [len(scheduler.running_batch) for scheduler in self.schedulers]
        return decoding.index(max(decoding))

    def _submit(self, reqs: int) -> Callable[..., Work[Any]]:
        """Return how work for so many requests goes to the device."""
        overlaps = reqs >= self.device.least_reqs or self._in_flight or self._slices
        return self.device.submit if overlaps else self.device.here

    # ------------------------------------------------------------ state

    @property
    def num_waiting(self) -> int:
        """Return how many requests are not computed yet."""
        return sum(len(scheduler.waiting_queue) for scheduler in self.schedulers)

    def is_idle(self) -> bool:
        """Return True if there is no request, nothing in flight, and nothing to encode ahead of time."""
        return not len(self._warmups) and self._has_no_requests()

    def _has_no_requests(self) -> bool:
        if self._in_flight or self._slices:
            return False
        return all(scheduler.is_idle() for scheduler in self.schedulers)

    def _held_bytes(self) -> int:
        """Return the bytes of embeddings that are held by error when a group is idle; 0 if another group, or media
        encoded ahead of time, may hold some."""
        shared = len(self._warmups) or not all(scheduler.is_idle() for scheduler in self.schedulers)
        return 0 if shared else self.encoder.cache.device.held_bytes

    def check_pools(self) -> None:
        """Check an idle engine for lost memory: EngineError unless everything is free or cached."""
        for scheduler in self.schedulers:
            scheduler.check_pools(held_bytes=self._held_bytes())

    def flush_cache(self) -> int:
        """Forget every cached prefix that no request uses. Returns how many tokens they had."""
        if self._placement is not None:
            self._placement.forget()
        return sum(scheduler.flush_cache() for scheduler in self.schedulers)

    def forget_kv(self) -> None:
        """Forget every cached prefix, as its memory is gone. No request has any of it. Copies that are planned between
        tiers must not be made, or the disk would get other KV."""
        self.flush_cache()
        for scheduler in self.schedulers:
            scheduler.kv.prefix_cache.take_copy_jobs()

    def adapters_in_use(self) -> set[str]:
        """Return the digests of the adapters that requests have."""
        return {digest for scheduler in self.schedulers for digest in scheduler.adapters_in_use()}

    def stats(self) -> SchedulerStats:
        """Return figures of this moment: of all groups together and, if there are several, of each. Figures of the
        encoder and of experts are part of the first group's."""
        encoder = self.encoder.stats()
        first, *others = [scheduler.stats() for scheduler in self.schedulers]
        first = replace(first, encoder=encoder, experts=self._expert_stats(), num_warmups=len(self._warmups))
        none = TierStats()
        nothing = PoolStats(
            host=None if encoder.host is None else none,
            disk=None if encoder.disk is None else none,
            link=None if encoder.link is None else LinkStats(),
        )
        return sum_stats([first, *(replace(one, encoder=nothing) for one in others)])

    # ------------------------------------------------------------ the end

    def close_kv(self, timeout_s: float) -> int:
        """Write cached prefixes to disk for at most so many seconds. Returns how many tokens are lost."""
        ends = time.monotonic() + timeout_s
        return sum(one.kv.prefix_cache.close(max(0.0, ends - time.monotonic())) for one in self.schedulers)

    def close(self) -> None:
        """End the device's thread, the encoder's workers, and the disk's."""
        self.device.close()
        self.encoder.close()
        for scheduler in self.schedulers:
            scheduler.kv.prefix_cache.close()
            scheduler.intake.close()


class GroupPlacement:
    """Chooses an attention group for each request, and remembers it until the request ends.

    All answers to one prompt go to the same group, and a session stays with its own. method: see `ReplicaRouter`.
    """

    def __init__(self, router: ReplicaRouter) -> None:
        self._router = router
        self._of_prompt: OrderedDict[str, int] = OrderedDict()

    def place(self, message: TokenizedGenerateReqInput) -> int:
        """Return the group of a new request."""
        demand = demand_of(message)
        if demand.replica is None and message.group in self._of_prompt:
            demand = replace(demand, replica=self._of_prompt[message.group])
        group = self._router.place(demand)
        if message.group:
            self._of_prompt[message.group] = group
            if len(self._of_prompt) > _MOST_PROMPTS:
                self._of_prompt.popitem(last=False)
        return group

    def end(self, rid: str) -> int | None:
        """Forget a request that is given up. Returns its group; None if the request is unknown or has ended."""
        group = self._router.replica_of(rid)
        self._router.end(rid)
        return group

    def forget(self) -> None:
        """Forget which group has cached which prefixes, as their caches are empty."""
        self._router.forget()

    def noting(self, send: Callable[[SchedulerOutput], None]) -> Callable[[SchedulerOutput], None]:
        """Return a `send` that notes which requests have ended."""

        def send_and_note(output: SchedulerOutput) -> None:
            if isinstance(output, BatchTokenOutput):
                for one in output.outputs:
                    if one.finish_reason is not None:
                        self._router.end(one.rid)
            send(output)

        return send_and_note
