"""A server of the real launcher with fake insides: `python -m tests.vlmserve.fake_server MODEL_FOLDER [FLAGS]`.

GET /PROMPT answers PROMPT's bytes after a round trip through both child processes. Prompts that start with:
hang: are answered never, freeze: nor does the scheduler do anything else any more, slow: on SIGUSR1 to the scheduler,
die: kill the scheduler.
How the scheduler starts is told by $FAKE_START: ok, error, crash, exit, hang,
late: what it waits for itself is not there in time. What child processes are forks of imports $FAKE_IMPORTS.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np

from vlmserve.api import launch
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.settings import load_settings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import Ready
from vlmserve.ipc.messages import (
    BatchTextOutput,
    BatchTokenOutput,
    DetokenizerInput,
    FinishReason,
    SamplingParams,
    SchedulerInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from vlmserve.ipc.sockets import Receiver, Sender
from vlmserve_common.errors import CheckpointError, EngineError
from vlmserve_common.process.child import prepare_forks


def fake_scheduler(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    how = os.environ.get("FAKE_START", "ok")
    if how == "error":
        raise CheckpointError(f"{args.model} lacks model.norm.weight")
    if how == "crash":
        raise ZeroDivisionError("a bug")
    if how == "exit":
        os._exit(7)
    if how == "hang":
        signal.pause()
    if how == "late":
        threading.Event().wait(start.ready_by - time.monotonic())
        raise EngineError(f"no encoder after {start.startup_timeout_s:g} s, with the log at {start.log_level}")
    receiver = Receiver(channels.scheduler, get_args(SchedulerInput), shared=channels.shared_arrays())
    sender = Sender(channels.detokenizer, get_args(DetokenizerInput))
    postponed: list[BatchTokenOutput] = []
    heartbeat = channels.heartbeat("scheduler")
    signal.signal(signal.SIGUSR1, lambda *_: [sender.send(message) for message in postponed])
    meeting = os.environ.get("MEET_AT_THE_END")  # a named pipe, which two replicas must open at the same time

    def finish() -> None:
        if meeting is not None:
            os.close(os.open(meeting, os.O_WRONLY if channels.replica else os.O_RDONLY))

    ready(max_model_len=123 - (channels.replica or 0), before_end=finish)
    while True:
        message = receiver.recv()
        if not isinstance(message, TokenizedGenerateReqInput):
            continue
        text = bytes(message.input_ids.tolist()).decode()
        if text.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        answer = _tokens(message)
        if text.startswith("slow"):
            postponed.append(answer)
            print("postponed", file=sys.stderr, flush=True)
        elif text.startswith("freeze"):
            heartbeat.working()
            print("frozen", file=sys.stderr, flush=True)
            while True:
                ctypes.PyDLL(None).sleep(3600)  # native code that keeps the interpreter to itself
        elif text.startswith("hang"):
            print("hanging", file=sys.stderr, flush=True)
        else:
            sender.send(answer)


def _tokens(message: TokenizedGenerateReqInput) -> BatchTokenOutput:
    output = TokenOutput(
        rid=message.rid,
        token_ids=tuple(message.input_ids.tolist()),
        finish_reason=FinishReason(type="length"),
        prompt_tokens=len(message.input_ids),
        completion_tokens=len(message.input_ids),
        cached_tokens=0,
        first=True,
    )
    return BatchTokenOutput(outputs=(output,))


def fake_detokenizer(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    receiver = Receiver(channels.detokenizer, get_args(DetokenizerInput))
    sender = Sender(channels.api, (BatchTextOutput,))
    ready()
    while True:
        batch = receiver.recv()
        outputs = [
            TokenOutput(
                rid=output.rid,
                text=bytes(output.token_ids).decode(),
                token_ids=output.token_ids,
                finish_reason=output.finish_reason,
                prompt_tokens=output.prompt_tokens,
                completion_tokens=output.completion_tokens,
                cached_tokens=0,
            )
            for output in batch.outputs
        ]
        sender.send(BatchTextOutput(outputs=tuple(outputs)))


class FakeFrontend:
    """The API process's half: an ASGI application without a framework."""

    def __init__(self, settings: object, *, max_model_len: int, model_name: str, send: Any, **_: object) -> None:
        self.info = [max_model_len, model_name]
        self.send = send
        self.waiting: dict[str, asyncio.Future[str]] = {}
        self.failure: str | None = None
        self.suspended: str | None = None
        self.requests = 0
        self.app = self._answer

    async def start(self) -> None:
        pass

    def handle(self, message: Any) -> None:
        for output in message.outputs:
            self.waiting.pop(output.rid).set_result(output.text)

    def fail_all(self, message: str) -> None:
        self.failure = message
        for future in self.waiting.values():
            future.set_exception(RuntimeError(message))
        self.waiting.clear()

    def suspend(self, message: str | None) -> None:
        self.suspended = message

    async def close(self, patience_s: float) -> None:
        print("frontend closed", file=sys.stderr, flush=True)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        status, text = await self._reply(scope["path"][1:])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    async def _reply(self, path: str) -> tuple[int, str]:
        if self.failure or self.suspended:
            return 503, self.failure or self.suspended
        if path == "info":
            return 200, json.dumps(self.info)
        self.requests += 1
        rid = str(self.requests)
        future = self.waiting[rid] = asyncio.get_running_loop().create_future()
        ids = np.frombuffer(path.encode(), dtype=np.uint8).astype(np.int64)
        self.send(TokenizedGenerateReqInput(rid=rid, input_ids=ids, sampling_params=SamplingParams()))
        try:
            return 200, await future
        except RuntimeError as error:
            return 503, str(error)


if __name__ == "__main__":
    model, *words = sys.argv[1:]
    Path(model, "config.json").write_text('{"model_type": "qwen3_vl"}')
    flags = {
        word.removeprefix("--").replace("-", "_"): value for word, value in zip(words[::2], words[1::2], strict=True)
    }
    settings = load_settings({"model": model, **flags})
    # nobody here needs what the real one imports
    launch.prepare_processes = lambda: prepare_forks(os.environ.get("FAKE_IMPORTS", "").split())
    try:
        status = launch.launch_server(
            settings, scheduler=fake_scheduler, detokenizer=fake_detokenizer, make_frontend=FakeFrontend
        )
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)
