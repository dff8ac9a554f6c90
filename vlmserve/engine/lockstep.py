"""A scheduler for each group of ranks that has requests of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from vision.encoder_pool import EncoderPool
from vlmserve.config.engine_args import EngineArgs
from vlmserve.executor.device_queue import DeviceQueue
from vlmserve.ipc.messages import SchedulerOutput
from vlmserve.ipc.routing import ReplicaRouter
from vlmserve.scheduler.lockstep import LockstepScheduler, noting_ends
from vlmserve.scheduler.rounds import Rounds, RoundWorker
from vlmserve.scheduler.scheduler import Scheduler
from vlmserve.scheduler.step import ModelWorker

EngineScheduler: TypeAlias = Scheduler | LockstepScheduler


class MakeScheduler(Protocol):
    """Of one group."""

    def __call__(
        self, *, worker: ModelWorker, device: DeviceQueue, send: Callable[[SchedulerOutput], None]
    ) -> Scheduler: ...


def in_lockstep(
    args: EngineArgs,
    make: MakeScheduler,
    worker: RoundWorker,
    device: DeviceQueue,
    encoder: Callable[[], EncoderPool],
    send: Callable[[SchedulerOutput], None],
) -> LockstepScheduler:
    """One that has `make` one for each group of `args`. encoder: of all."""
    router = ReplicaRouter(args.attention_groups, method=args.load_balance_method)
    noted = noting_ends(send, router)
    rounds = Rounds(device, worker, args.attention_groups, last=encoder().work)
    schedulers = [make(worker=lane.worker, device=lane, send=noted) for lane in rounds.lanes]
    return LockstepScheduler(schedulers, rounds, encoder(), router)
