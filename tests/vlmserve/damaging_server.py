"""A whole server that damages messages: `python -m tests.vlmserve.damaging_server MODEL_FOLDER`.

The file $DAMAGE names a process (api, scheduler, detokenizer) and a type: the next message of that type which leaves
that process loses the second half of its body, and the file goes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vlmserve.api import launch
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.settings import load_settings
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import Ready
from vlmserve.ipc.sockets import Sender
from vlmserve_common.transport.wire import Frame


def damage_of(process: str) -> None:
    order, send = Path(os.environ["DAMAGE"]), Sender.send_frames

    def send_frames(sender: Sender, frames: Sequence[Frame]) -> None:
        envelope, name, body, *arrays = frames
        with contextlib.suppress(FileNotFoundError):
            if order.read_text() == f"{process} {bytes(name).decode()}":
                order.unlink()
                body = bytes(body)[: len(body) // 2]
        send(sender, [envelope, name, body, *arrays])

    Sender.send_frames = send_frames


def scheduler(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    damage_of("scheduler")
    launch.run_scheduler_process(args, channels, start, ready)


def detokenizer(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    damage_of("detokenizer")
    launch.run_detokenizer_process(args, channels, start, ready)


if __name__ == "__main__":
    damage_of("api")
    settings = {
        "model": sys.argv[1],
        "port": 0,
        "num_threads": 1,
        "max_total_tokens": 4096,
        "served_model_name": "tiny",
    }
    sys.exit(launch.launch_server(load_settings(settings), scheduler=scheduler, detokenizer=detokenizer))
