"""A media worker with odd insides: a picture's patches are its bytes, and those of some make it misbehave.

The folder above its shared memory holds what it notes down: "pids", "levels", of its log, and "tried", a line for each
order followed. In "plan" stands what becomes of starts, one word a start, the last one for all further ones: ok, die,
error, hang, and early for one that dies of the first work it is given.
"""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from processors.pool import media_worker as worker
from processors.pool.maker import DirectMaker, MediaWork
from processors.pool.media_worker import MediaWorkerSettings, run_worker
from processors.pool.messages import ANSWER_MESSAGES, WorkOrder
from processors.processed import ProcessedImage
from vlmserve_common.errors import CheckpointError
from vlmserve_common.process.child import Parent
from vlmserve_common.transport.shm import MAPPED_FROM_BYTES, SharedArrays

CRASH, EXIT, PAUSE, ONCE, SPIN, EAT, FILES, FAIL, LIE, ODD = (
    b"CRASH", b"EXIT", b"PAUSE", b"ONCE", b"SPIN", b"EAT", b"FILES", b"FAIL", b"LIE", b"ODD"
)  # fmt: skip


def fake_worker(parent: Parent, settings: MediaWorkerSettings) -> None:
    folder = settings.shared_dir.parent
    _note(folder / "pids", str(os.getpid()))
    _note(folder / "levels", logging.getLevelName(logging.getLogger().level))
    _start(folder / "plan")
    worker.ANSWER_MESSAGES = (*ANSWER_MESSAGES, WorkOrder)
    run_worker(parent, settings, lambda _: _OddMaker(SharedArrays(settings.shared_dir, spare_bytes=2**30), folder))


def hurried_worker(parent: Parent, settings: MediaWorkerSettings) -> None:
    """Has a second of CPU time for a picture, or two, where its parent has more patience."""
    fake_worker(parent, replace(settings, picture_cpu_s=1.0))


def noting_worker(parent: Parent, settings: MediaWorkerSettings) -> None:
    """A real one, but for its note."""
    _note(settings.shared_dir.parent / "pids", str(os.getpid()))
    run_worker(parent, settings)


class _OddMaker(DirectMaker):
    def __init__(self, shared: SharedArrays, folder: Path) -> None:
        self._shared = shared
        self._folder = folder

    def make(self, work: MediaWork) -> object:
        data = work.files[0]
        if data.isalpha():
            _note(self._folder / "tried", data.decode())
        feature = self._shared.empty((1, max(len(data), MAPPED_FROM_BYTES)), np.uint8)
        feature[0, : len(data)] = np.frombuffer(data, np.uint8)
        if data == CRASH:
            self._shared.put(feature)  # as when it dies while it answers
            os.kill(os.getpid(), signal.SIGSEGV)
        if data == EXIT:
            os._exit(7)
        if data == PAUSE or (data == ONCE and len((self._folder / "tried").read_text().splitlines()) == 1):
            signal.pause()
        while data == SPIN:
            pass
        if data == EAT:
            return [np.empty(2**30, np.uint8) for _ in range(2**10)]
        if data == FILES:
            return [open(os.devnull) for _ in range(2**10)]
        if data == FAIL:
            raise RuntimeError("a bug")
        if data == LIE:
            return WorkOrder(data=feature[0, :9], sizes=(9,), image_knobs=None, video_knobs=None, listed=False)
        if data == ODD:
            return object()
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
    if words[0] == "early":
        worker.allow_cpu_time = lambda _: os._exit(3)


def _note(file: Path, line: str) -> None:
    with file.open("a") as out:
        out.write(f"{line}\n")
