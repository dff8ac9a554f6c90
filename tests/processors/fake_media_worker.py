"""A media worker with fake insides: a picture's patches are its bytes, and those of some make it die.

The folder above its shared memory holds what it notes down: "pids", "levels", of its log, and "tried", a line for each
order followed. In "plan" stands what becomes of starts, one word a start, the last one for all further ones: ok, die,
error, hang.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import numpy as np

from processors.pool.messages import ANSWER_MESSAGES, WORK_MESSAGES, PictureWork, WorkBegun, WorkFailed
from processors.pool.worker_start import MediaWorkerSettings
from processors.processed import ProcessedImage
from vlmserve_common.errors import CheckpointError
from vlmserve_common.process.child import Parent
from vlmserve_common.transport.channel import MessageChannel
from vlmserve_common.transport.shm import MAPPED_FROM_BYTES, SharedArrays

CRASH, EXIT, PAUSE, FAIL, LIE, EARLY = b"CRASH", b"EXIT", b"PAUSE", b"FAIL", b"LIE", b"EARLY"


def fake_worker(parent: Parent, settings: MediaWorkerSettings) -> None:
    folder = settings.shared_dir.parent
    _note(folder / "pids", str(os.getpid()))
    _note(folder / "levels", logging.getLevelName(logging.getLogger().level))
    _start(folder / "plan")
    shared = SharedArrays(settings.shared_dir, spare_bytes=2**30)
    channel = MessageChannel(
        parent.send,
        parent.receive,
        send_types=(*ANSWER_MESSAGES, PictureWork),
        receive_types=WORK_MESSAGES,
        shared=shared,
    )
    parent.ready({})
    while True:
        work = channel.receive()
        data = work.data.tobytes()
        if data == EARLY:
            os._exit(3)
        channel.send(channel.encode(WorkBegun()))
        if data in (CRASH, EXIT, PAUSE):
            _note(folder / "tried", data.decode())
        channel.send(channel.encode(_answer(work, data, shared)))


def _answer(work: PictureWork, data: bytes, shared: SharedArrays) -> object:
    feature = shared.empty((1, max(len(data), MAPPED_FROM_BYTES)), np.uint8)
    feature[0, : len(data)] = work.data
    if data == CRASH:
        shared.put(feature)  # as when it dies while it answers
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == EXIT:
        os._exit(7)
    if data == PAUSE:
        signal.pause()
    if data == FAIL:
        return WorkFailed(message="RuntimeError: a bug")
    if data == LIE:
        return PictureWork(data=work.data, knobs=work.knobs)
    return ProcessedImage(
        digest=data[:9],
        patch_digests=(data[:9],),
        grid_thw=(1, 2, 2),
        feature=feature,
        num_tokens=1,
        source_size=(os.getpid(), 1),
    )


def _start(plan: Path) -> None:
    words = plan.read_text().split() if plan.exists() else ["ok"]
    plan.write_text(" ".join(words[1:] or words))
    if words[0] == "error":
        raise CheckpointError("no processor in there")
    if words[0] == "hang":
        signal.pause()
    if words[0] == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def _note(file: Path, line: str) -> None:
    with file.open("a") as out:
        out.write(f"{line}\n")
