"""The detokenizer process: token ids in from the scheduler, text out to the API process. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from vlmserve.engine_args import EngineArgs
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.ready import Ready, ReadyInfo
from vlmserve.ipc.sockets import Receiver, Sender
from vlmserve.messages import AbortReq, BatchTextOutput, BatchTokenOutput, SchedulerStats
from vlmserve.tokenizer.detokenizer import DetokenizerManager
from vlmserve.tokenizer.text_tokenizer import load_text_tokenizer


def run_detokenizer(args: EngineArgs, channels: Channels, ready: Ready) -> None:
    """Work for ever; the process ends with its parent (see `vlmserve.common.child`)."""
    manager = DetokenizerManager(load_text_tokenizer(Path(args.model)))
    receiver = Receiver(channels.detokenizer, (BatchTokenOutput, SchedulerStats))
    to_api = Sender(channels.api, (BatchTextOutput, SchedulerStats))
    to_scheduler = Sender(channels.scheduler, (AbortReq,))
    ready(ReadyInfo())
    while True:
        message = receiver.recv()
        if isinstance(message, SchedulerStats):
            to_api.send(message)
            continue
        texts, aborts = manager.process(message)
        # The aborts first: they free slots.
        for abort in aborts:
            to_scheduler.send(abort)
        to_api.send(texts)
