"""The detokenizer process: token ids in from the scheduler, text out to the API process. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.frontend.detokenizer import DetokenizerManager
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import Ready
from vlmserve.ipc.messages import AbortReq, BatchTokenOutput, DetokenizerInput, RequestsLost, TokenizerManagerInput
from vlmserve.ipc.sockets import Receiver, Sender
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer


def run_detokenizer(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Work for ever; the process ends with its parent (see `vlmserve_common.process.child`)."""
    manager = DetokenizerManager(load_text_tokenizer(Path(args.model)))
    receiver = Receiver(channels.detokenizer, get_args(DetokenizerInput))
    to_api = Sender(channels.api, get_args(TokenizerManagerInput))
    to_scheduler = Sender(channels.scheduler, (AbortReq,))
    heartbeat = channels.heartbeat("detokenizer")
    ready()
    while True:
        heartbeat.idle()
        message = receiver.recv()
        heartbeat.working()
        passed_on, aborts = handle(manager, message)
        # The aborts first: they free slots.
        for abort in aborts:
            to_scheduler.send(abort)
        to_api.send(passed_on)


def handle(manager: DetokenizerManager, message: DetokenizerInput) -> tuple[TokenizerManagerInput, list[AbortReq]]:
    """Return what goes on to the API process, and aborts for the scheduler."""
    if isinstance(message, BatchTokenOutput):
        return manager.process(message)
    if isinstance(message, RequestsLost):
        for rid in message.rids:
            manager.forget(rid)
    return message, []
