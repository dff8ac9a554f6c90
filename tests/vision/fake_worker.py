"""An encoder worker without a tower, or torch: its rows are the pixels. What it does else, pixels and a file say.

The first pixel of a batch: DIE kills the worker, EXIT ends it, FAIL is an error, PAUSE waits for ever, and writes a
byte to the pipe `model`/paused before, if there is one.
The file `model`/`device` says how it starts, one word a start, the last one for all further ones: ok, error, die, hang.
The file `model`/fingerprint says whose weights it finds, 00 if there is none.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from vision.towers.temporal_patch import EncodeBatch
from vision.workers.encoder_messages import EncodeDone, encoder_channel
from vision.workers.settings import WorkerSettings
from vlmserve_common.errors import CheckpointError
from vlmserve_common.process.child import Parent
from vlmserve_common.transport.shm import SharedArrays

DIE, EXIT, FAIL, PAUSE = -1.0, -2.0, -3.0, -4.0


def fake_worker(parent: Parent, settings: WorkerSettings, device: str) -> None:
    with (settings.model / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    _start(settings.model / device)
    channel = encoder_channel(parent.send, parent.receive, SharedArrays(settings.shared_dir))
    fingerprint = settings.model / "fingerprint"
    parent.ready({"fingerprint": fingerprint.read_text() if fingerprint.exists() else "00"})
    while True:
        channel.send(channel.encode(_answer(channel.receive(), settings.shared_dir)))


def _start(plan: Path) -> None:
    words = plan.read_text().split() if plan.exists() else ["ok"]
    plan.write_text(" ".join(words[1:] or words))
    if words[0] == "error":
        raise CheckpointError("no tower in there")
    if words[0] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if words[0] == "hang":
        signal.pause()


def _answer(work: EncodeBatch, shared_dir: Path) -> EncodeDone:
    order = work.patches[0].pixels[0, 0]
    if order == DIE:
        SharedArrays(shared_dir).put(np.zeros(5))  # as when it dies while it answers
        os.kill(os.getpid(), signal.SIGKILL)
    if order == EXIT:
        os._exit(7)
    if order == PAUSE:
        paused = shared_dir.parent / "paused"
        if paused.exists():
            paused.write_bytes(b"p")
        signal.pause()
    if order == FAIL:
        return EncodeDone(number=work.number, error="ValueError: asked for")
    return EncodeDone(number=work.number, rows=tuple(patch.pixels for patch in work.patches), dtype="float32")
