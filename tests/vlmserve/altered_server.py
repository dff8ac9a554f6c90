"""A whole server with a fault: `python -m tests.vlmserve.altered_server MODEL_FOLDER [SETTING=VALUE...]`.

$DAMAGE is a file that names a process (api, scheduler, detokenizer) and a type: the next message of that type which
leaves that process loses the second half of its body, and the file goes.
$STUCK: threads that count a batch's lines, or look at tokens for /detokenize, say "stuck" and never end.
$GO is a pipe: each embedding's write waits for a byte from it. The scheduler says "finishing" when it is told to end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from vlmserve.api import launch
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.settings import load_settings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import Ready
from vlmserve.ipc.sockets import Sender
from vlmserve_common.transport.wire import Frame


def damage_of(name_of_process: str) -> None:
    order, send = Path(os.environ.get("DAMAGE", "/no/such")), Sender.send_frames

    def send_frames(sender: Sender, frames: Sequence[Frame]) -> None:
        envelope, name, body, *arrays = frames
        with contextlib.suppress(FileNotFoundError):
            if order.read_text() == f"{name_of_process} {bytes(name).decode()}":
                order.unlink()
                body = bytes(body)[: len(body) // 2]
        send(sender, [envelope, name, body, *arrays])

    Sender.send_frames = send_frames


def stuck_threads() -> None:
    from vlmserve.api import tokenization
    from vlmserve.api.batches import runner

    def never_end(*_: object) -> NoReturn:
        print("stuck", file=sys.stderr, flush=True)
        while True:
            threading.Event().wait()

    tokenization.check_token = never_end
    runner.count_lines = never_end


def slow_disk() -> None:
    from vision.cache.store import EmbeddingStore  # torch is for the scheduler alone
    from vlmserve.engine import process

    put = EmbeddingStore.put

    def slow_put(*words: object, **options: object) -> bool:
        go = os.open(os.environ["GO"], os.O_RDONLY)
        os.read(go, 1)
        os.close(go)
        return put(*words, **options)

    EmbeddingStore.put = slow_put
    process.FINISH_S = float(os.environ.get("FINISH_S", process.FINISH_S))


def scheduler(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    def say_when_told(*, before_end: Callable[[], None], **facts: int | None) -> None:
        ready(
            **facts,
            before_end=lambda: (print("finishing", file=sys.stderr, flush=True), before_end()),
        )

    damage_of("scheduler")
    if "GO" in os.environ:
        slow_disk()
    launch.run_scheduler_process(args, channels, start, say_when_told)


def detokenizer(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    damage_of("detokenizer")
    launch.run_detokenizer_process(args, channels, start, ready)


if __name__ == "__main__":
    damage_of("api")
    if "STUCK" in os.environ:
        stuck_threads()
    model, *words = sys.argv[1:]
    small = {"port": 0, "num_threads": 1, "max_total_tokens": 4096, "served_model_name": "tiny"}
    settings = load_settings({"model": model, **small, **dict(word.split("=") for word in words)})
    sys.exit(launch.launch_server(settings, scheduler=scheduler, detokenizer=detokenizer))
