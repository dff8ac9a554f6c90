"""A server with a fake engine: `python -m vlmserve.commands.bench.fake_engine [FLAGS]`, flags as of `vlmserve serve`.

All but the scheduler process is real. The fake gives every request a token each step, the same words to all. What the
server costs then is the API's.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from vlmserve.api.launch import launch_server
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.flags import GIVEN_AS, CommandParser, add_settings
from vlmserve.config.settings import load_settings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import Ready
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    BatchTokenOutput,
    DetokenizerInput,
    FinishReason,
    SchedulerInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from vlmserve.ipc.sockets import Receiver, Sender
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer

STEP_VARIABLE = "BENCH_STEP_MS"
"""The environment variable with the milliseconds of a step."""
_TEXT = "A picture shows two boats on a lake, behind them a village and, far away, mountains under snow. "
_MAX_LEN = 32768


@dataclass(kw_only=True, slots=True)
class _Running:
    request: TokenizedGenerateReqInput
    done: int = 0


def run_fake_scheduler(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Give each request a token, once a step: the main of the scheduler process."""
    words = load_text_tokenizer(Path(args.model)).encode(_TEXT)
    step_s = float(os.environ[STEP_VARIABLE]) / 1000
    receiver = Receiver(channels.scheduler, get_args(SchedulerInput), shared=channels.shared_arrays(mapped=True))
    sender = Sender(channels.detokenizer, get_args(DetokenizerInput))
    heartbeat = channels.heartbeat("scheduler")
    running: dict[str, _Running] = {}
    due = time.monotonic()
    ready(max_model_len=_MAX_LEN)
    while True:
        heartbeat.idle()
        messages = receiver.drain(timeout_s=max(0.0, due - time.monotonic()) if running else None)
        heartbeat.working()
        for message in messages:
            if isinstance(message, BatchTokenizedGenerateReqInput):
                running.update((one.rid, _Running(request=one)) for one in message.requests)
            elif isinstance(message, TokenizedGenerateReqInput):
                running[message.rid] = _Running(request=message)
            elif isinstance(message, AbortReq):
                running.pop(message.rid, None)
        if running and time.monotonic() >= due:
            due = max(due + step_s, time.monotonic())
            sender.send(BatchTokenOutput(outputs=tuple(_outputs(running, words))))


def _outputs(running: dict[str, _Running], words: Sequence[int]) -> list[TokenOutput]:
    """Return the tokens of one step, and forget the requests that got their last one."""
    made = []
    for rid, one in list(running.items()):
        params = one.request.sampling_params
        first = one.done == 0
        one.done += 1
        ended = one.done == params.max_new_tokens
        if ended:
            del running[rid]
        made.append(
            TokenOutput(
                rid=rid,
                token_ids=(words[(one.done - 1) % len(words)],),
                finish_reason=FinishReason(type="length") if ended else None,
                prompt_tokens=len(one.request.input_ids),
                completion_tokens=one.done,
                cached_tokens=0,
                first=first,
                stop=params.stop if first else (),
            )
        )
    return made


def main(argv: Sequence[str]) -> int:
    """Serve until a signal, and return the exit status."""
    parser = CommandParser(prog="fake_engine")
    add_settings(parser)
    flags = {name: value for name, value in vars(parser.parse_args(argv)).items() if name not in ("config", GIVEN_AS)}
    return launch_server(load_settings(flags), scheduler=run_fake_scheduler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
