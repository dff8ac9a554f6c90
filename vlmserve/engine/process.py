"""The scheduler process: requests in from the API process, tokens out to the detokenizer."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, get_args

from vision.encoder_pool import EncoderPool
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.engine.adapters import admission, engine_adapters
from vlmserve.engine.build import build_loop, build_runner
from vlmserve.engine.control import EngineControl
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.profiling import Profiler
from vlmserve.engine.rank_processes import (
    LAST_WORDS_S,
    follow,
    join_ranks,
    leading_worker,
    meeting_place,
    rank_args,
    replica_args,
)
from vlmserve.engine.weights.changing import EngineWeights
from vlmserve.engine.weights.rank import RankWeights
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import FINISH_S, Ready
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    DetokenizerInput,
    RequestsLost,
    SchedulerInput,
)
from vlmserve.ipc.sockets import ControlServer, Receiver, Sender
from vlmserve.scheduler.meter import BatchLog
from vlmserve_common.process.wake_up import WakeUp

log = logging.getLogger(__name__)

_GRACE_S = 0.5
"""The seconds that the engine's thread may take to log its remaining lines. The launcher waits longer than that."""


class Ending:
    """The announced end of the process: one thread announces it, and another one has something to finish.

    patience_s: seconds for finishing, from the announcement on.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._wake_up = WakeUp()
        self._deadline: float | None = None
        self._finished = threading.Event()

    @property
    def fd(self) -> int:
        """A file descriptor that becomes readable when the end has come."""
        return self._wake_up.fd

    @property
    def has_come(self) -> bool:
        """Whether the engine's loop is to end."""
        return self._deadline is not None

    @property
    def left_s(self) -> float:
        """Seconds left for finishing, once the end has been announced."""
        assert self._deadline is not None
        return max(0.0, self._deadline - time.monotonic())

    def tell(self) -> None:
        """Announce the end. Any thread may call this."""
        self._deadline = time.monotonic() + self._patience_s
        self._wake_up.call()

    def wait(self, grace_s: float) -> bool:
        """Wait for `finish` after `tell`, for `grace_s` longer than finishing may take. Return whether it came."""
        return self._finished.wait(self.left_s + grace_s)

    def finish(self) -> NoReturn:
        """Say that all is finished. The waiting thread ends the process; this one never returns."""
        self._finished.set()
        while True:
            threading.Event().wait()


def run_scheduler(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Run the scheduler process until its parent ends it, see `vlmserve_common.process.child`.

    Between steps it takes all waiting messages and operators' requests. If there is nothing to compute, it sleeps until
    a socket is readable.
    """
    args, ranks = replica_args(args, channels.replica), None
    if args.world_size > 1:
        args = rank_args(args, 0)
        ranks = join_ranks(args, 0, meeting_place(channels.runtime_dir, args, start))
    runner, info = build_runner(args, ranks)
    to_detokenizer = Sender(channels.detokenizer, get_args(DetokenizerInput))
    worker = None
    if ranks is not None:  # the launcher sees which rank has ended, and says so
        worker = leading_worker(runner, ranks, lambda: time.sleep(LAST_WORDS_S))
    peers = None
    if args.role != "all":  # it needs ZeroMQ
        from vlmserve.engine.peers import connect_peers

        peers = connect_peers(args, runner, ranks, max_prompt=info.max_req_len, replica=channels.replica)
    batch_log = BatchLog(args.log_interval_s)
    loop = build_loop(
        args,
        runner,
        info,
        to_detokenizer.send,
        start=start,
        worker=worker,
        batch_log=batch_log,
        sender=None if peers is None else peers.sender,
        receivers=None if peers is None else peers.receivers,
    )
    receiver = Receiver(channels.scheduler, get_args(SchedulerInput), shared=channels.shared_arrays(mapped=True))
    operators = ControlServer(channels.control)
    profiler = Profiler()
    number = (channels.replica or 0) * args.world_size
    heartbeat = channels.heartbeat("scheduler")
    own = RankWeights(args, runner, number=number, write_tower=loop.encoder.write_tower, alive=heartbeat.working)
    weights = EngineWeights(loop, own)
    if worker is not None:
        tell, others = worker.tell, args.own_ranks[1:]
        profiler = Profiler(others=others, tell=lambda order: loop.device.submit(tell, order).result())
        weights = EngineWeights(loop, own, ranks=ranks, tell=tell)
    adapters = engine_adapters(args, runner, loop, worker, ranks)
    loop.admit = admission(adapters)
    control = EngineControl(
        loop,
        profiler,
        weights,
        device=info.device,
        dtype=info.dtype,
        url=peers.url if peers else "",
        adapters=adapters,
    )
    dispatch = message_dispatcher(loop, to_detokenizer.send)
    ending = Ending(FINISH_S)
    ready(
        max_model_len=info.max_req_len,
        auto_pixels=info.auto_pixels,
        before_end=partial(_finish, loop.encoder, ending, stores_kv=args.hicache_storage_dir is not None),
    )
    gc.freeze()  # the objects of now stay for good, and collecting among them would stop answers for 0.1 s
    presence = None if ranks is None else ranks.presence
    elsewhere = [] if presence is None else presence.handles
    busy = False
    while not ending.has_come:
        if busy:
            messages = receiver.drain()
        else:
            heartbeat.idle()
            # paused, the encoder's results wait with the requests
            handles = loop.wait_handles() if control.goes_on else []
            messages = receiver.drain(timeout_s=None, wake=[operators.socket, ending.fd, *handles, *elsewhere])
            if presence is not None:
                presence.check()
        heartbeat.working()
        for message in messages:
            dispatch(message)
        operators.answer_all(control.handle)
        busy = control.step()
    loop.drain()
    lost = loop.close_kv(ending.left_s)
    if peers is not None:
        peers.close()
    if lost:
        log.warning("%d tokens of cached prefixes were not on disk %g s after the end, and are lost", lost, FINISH_S)
    ending.finish()


def run_rank_process(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready, *, rank: int) -> None:
    """Run the process of any rank but the first."""
    args = replica_args(args, channels.replica)
    heartbeat = channels.heartbeat(f"rank-{rank}")
    place = meeting_place(channels.runtime_dir, args, start)
    replica = channels.replica or 0
    follow(args, rank, place, ready=ready, idle=heartbeat.idle, working=heartbeat.working, replica=replica)


def message_dispatcher(loop: EventLoop, send: Callable[[Any], None]) -> Callable[[SchedulerInput | RequestsLost], None]:
    """Return the function that takes messages to the scheduler process. send: to the detokenizer."""

    def dispatch(message: SchedulerInput | RequestsLost) -> None:
        match message:
            case BatchTokenizedGenerateReqInput():
                for request in message.requests:
                    loop.handle(request)
            case RequestsLost():
                send(message)
                for rid in message.rids:  # the request is here if the lost message was its abort
                    loop.handle(AbortReq(rid=rid))
            case _:
                loop.handle(message)

    return dispatch


def _finish(encoder: EncoderPool, ending: Ending, *, stores_kv: bool) -> None:
    """Write embeddings to disk, in the thread that is told of the end. The engine's thread writes prefixes
    meanwhile."""
    ending.tell()
    lost = encoder.flush(FINISH_S)
    if lost:
        log.warning("%d embeddings were not on disk %g s after the end, and are lost", lost, FINISH_S)
    if stores_kv and not ending.wait(_GRACE_S):
        log.warning("a step was still being computed %g s after the end: cached prefixes are lost", FINISH_S)
