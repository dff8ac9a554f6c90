"""Several schedulers as one: each has requests, KV and prefixes of its own, and all compute at the same time.

So it is where groups of ranks have tokens of their own and share everything but attention (`--enable-dp-attention`): a
group whose requests need no step joins those of the others. In each turn all schedulers decide, what they launched is
sent as one round, and then all take what has come. They have one encoder, for which one of them gives time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from vision.cache.stats import PoolStats, TierStats
from vision.encoder_pool import EncoderPool
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenOutput,
    ExpertStats,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from vlmserve.ipc.replica_sums import sum_stats
from vlmserve.ipc.routing import ReplicaRouter, demand_of
from vlmserve.scheduler.rounds import Rounds
from vlmserve.scheduler.scheduler import Scheduler

_MOST_PROMPTS = 4096


class LockstepScheduler:
    """As a `Scheduler`. schedulers: of each group, over the lanes of `rounds`; their outputs go through `note_outputs`.
    encoder: of all. router: chooses a group for each request that does not name one."""

    def __init__(
        self, schedulers: Sequence[Scheduler], rounds: Rounds, encoder: EncoderPool, router: ReplicaRouter
    ) -> None:
        self.schedulers, self.encoder = tuple(schedulers), encoder
        self._rounds, self._router = rounds, router
        self._of_prompt: OrderedDict[str, int] = OrderedDict()  # all answers to one prompt go to the same group

    # ------------------------------------------------------------ messages

    def handle(self, message: TokenizedGenerateReqInput | AbortReq) -> None:
        """See `Scheduler.handle`."""
        if isinstance(message, AbortReq):
            group = self._router.replica_of(message.rid)
            self._router.end(message.rid)
        else:
            group = self._place(message)
        if group is not None:
            self.schedulers[group].handle(message)

    def _place(self, message: TokenizedGenerateReqInput) -> int:
        demand = demand_of((message,))
        if demand.replica is None and message.group in self._of_prompt:
            demand = replace(demand, replica=self._of_prompt[message.group])
        group = self._router.place(demand)
        if message.group:
            self._of_prompt[message.group] = group
            if len(self._of_prompt) > _MOST_PROMPTS:
                self._of_prompt.popitem(last=False)
        return group

    # ------------------------------------------------------------ the loop

    def step(self, *, encoder_is_shared: bool = False) -> bool:
        """See `Scheduler.step`."""
        encoded = False
        for urgent in dict.fromkeys(scheduler.urgent for scheduler in self.schedulers):
            encoded |= self.encoder.advance(urgent=urgent)
        failures = self.encoder.take_failures()
        # who has most to lose by a slice of encoding knows best how long it may be
        encodes = max(self.schedulers, key=lambda scheduler: len(scheduler.running_batch))
        launched = [
            scheduler.launch(encoded=encoded, failures=failures, may_encode=scheduler is encodes)
            for scheduler in self.schedulers
        ]
        self._rounds.send()
        shared = encoder_is_shared or not self.is_idle()
        busy = [
            scheduler.finish(one, encoder_is_shared=shared)
            for scheduler, one in zip(self.schedulers, launched, strict=True)
        ]
        return any(busy)

    def wait_handles(self) -> list[int]:
        """See `Scheduler.wait_handles`."""
        return list(dict.fromkeys(handle for scheduler in self.schedulers for handle in scheduler.wait_handles()))

    def step_or_wait(self) -> None:
        """See `Scheduler.step_or_wait`."""
        if not self.step() and not self.is_idle():
            wait(self.wait_handles())

    @property
    def num_waiting(self) -> int:
        """See `Scheduler.num_waiting`."""
        return sum(scheduler.num_waiting for scheduler in self.schedulers)

    def is_idle(self) -> bool:
        """See `Scheduler.is_idle`."""
        return all(scheduler.is_idle() for scheduler in self.schedulers)

    def drain(self) -> None:
        """See `Scheduler.drain`."""
        for scheduler in self.schedulers:
            scheduler.drain()

    def behind_all_media(self) -> int:
        """See `Scheduler.behind_all_media`."""
        return max(scheduler.behind_all_media() for scheduler in self.schedulers)

    def close_kv(self, timeout_s: float) -> int:
        """See `Scheduler.close_kv`."""
        ends = time.monotonic() + timeout_s
        return sum(scheduler.close_kv(max(0.0, ends - time.monotonic())) for scheduler in self.schedulers)

    def close(self) -> None:
        """See `Scheduler.close`."""
        self._rounds.close()
        self.encoder.close()
        for scheduler in self.schedulers:
            scheduler.kv.close()
            scheduler.intake.close()

    # ------------------------------------------------------------ state

    def flush_cache(self) -> int:
        """See `Scheduler.flush_cache`."""
        self._router.forget()
        return sum(scheduler.flush_cache() for scheduler in self.schedulers)

    def stats(self) -> SchedulerStats:
        """Plain figures of this moment: of all groups together, and of each."""
        first, *others = [scheduler.stats() for scheduler in self.schedulers]
        # what all have in common is said of the first one
        nothing, experts = _nothing(first.encoder), ExpertStats()
        own = [replace(found, replica=group, encoder=nothing, experts=experts) for group, found in enumerate(others, 1)]
        return sum_stats([first, *own])


def noting_ends(send: Callable[[SchedulerOutput], None], router: ReplicaRouter) -> Callable[[SchedulerOutput], None]:
    """What schedulers send by, where `router` is to know which answers have ended."""

    def send_and_note(output: SchedulerOutput) -> None:
        if isinstance(output, BatchTokenOutput):
            for one in output.outputs:
                if one.finish_reason is not None:
                    router.end(one.rid)
        send(output)

    return send_and_note


def _nothing(stats: PoolStats) -> PoolStats:
    """Figures of an encoder with the same tiers that has done nothing."""
    none = TierStats()
    return PoolStats(host=None if stats.host is None else none, disk=None if stats.disk is None else none)
