"""The scheduler process: requests in from the API process, tokens out to the detokenizer."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import get_args

from vision.encoder_pool import EncoderPool
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.start_settings import StartSettings
from vlmserve.engine.build import build_runner, build_scheduler
from vlmserve.engine.encoder import resolve_warmup_patches
from vlmserve.engine.loop import EngineLoop
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.ready import FINISH_S, Ready
from vlmserve.ipc.sockets import Receiver, Sender
from vlmserve.messages import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    DetokenizerInput,
    GetStatsReq,
    RequestsLost,
    SchedulerInput,
)
from vlmserve.scheduler.batch_log import BatchLog

log = logging.getLogger(__name__)


def run_scheduler(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Work for ever; the process ends with its parent (see `vlmserve_common.process.child`).

    Between steps all waiting messages are taken; with nothing to compute the process sleeps on its socket.
    """
    runner, info = build_runner(args)
    to_detokenizer = Sender(channels.detokenizer, get_args(DetokenizerInput))
    scheduler = build_scheduler(args, runner, info, to_detokenizer.send, start=start)
    loop = EngineLoop(
        scheduler,
        scheduler.encoder,
        to_detokenizer.send,
        max_patches=resolve_warmup_patches(args, runner.device),
        batch_log=BatchLog(args.log_interval_s),
    )
    receiver = Receiver(channels.scheduler, get_args(SchedulerInput), shared=channels.shared_arrays(mapped=True))
    ready(max_model_len=info.max_req_len, auto_pixels=info.auto_pixels, before_end=partial(_finish, scheduler.encoder))
    gc.freeze()  # what is there by now stays: looking through it would stop answers for a tenth of a second
    busy = False
    while True:
        for message in receiver.drain(timeout_s=0.0 if busy else None, wake=scheduler.wait_handles()):
            if isinstance(message, GetStatsReq):
                to_detokenizer.send(loop.stats())
            elif isinstance(message, RequestsLost):
                to_detokenizer.send(message)
                for rid in message.rids:  # known here if the lost message was an abort
                    loop.handle(AbortReq(rid=rid))
            elif isinstance(message, BatchTokenizedGenerateReqInput):
                for request in message.requests:
                    loop.handle(request)
            else:
                loop.handle(message)
        busy = loop.step()


def _finish(encoder: EncoderPool) -> None:
    lost = encoder.flush(FINISH_S)
    if lost:
        log.warning("%d embeddings were not on disk %g s after the end, and are lost", lost, FINISH_S)
