"""A worker without tower or torch that lends its rows (the pixels): files stand for GPU memory.

A file is there for as long as its worker keeps the rows in it. The first pixel of a batch may be an order, as in
`fake_worker`. A file "share" in the model's folder says how sharing fails there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.vision.fake_worker import DIE
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.encoder_messages import TRIAL_ROWS, TRIAL_WIDTH, EncodeDone, LentRows, RowsHandle, encoder_channel
from vision.workers.settings import WorkerSettings
from vlmserve_common.process.child import Parent
from vlmserve_common.transport.shm import SharedArrays


class Memory:
    """Rows in a file, which is theirs alone."""

    def __init__(self, folder: Path, rows: np.ndarray) -> None:
        self.rows = rows
        folder.mkdir(exist_ok=True)
        self.path = folder / f"{os.getpid()}-{len(list(folder.iterdir()))}"
        self.path.write_bytes(rows.tobytes())

    def __del__(self) -> None:
        self.path.unlink()


def share(memory: Memory, row_counts: Sequence[int]) -> RowsHandle:
    return RowsHandle(
        row_counts=tuple(row_counts),
        width=memory.rows.shape[1],
        dtype="float32",
        device=0,
        memory=os.fsencode(memory.path),
        nbytes=memory.rows.nbytes,
        offset=0,
        counter=b"",
        counter_offset=0,
        event=b"",
        event_sync=False,
    )


def lending_worker(parent: Parent, settings: WorkerSettings, device: str) -> None:
    folder = settings.model / "lent"
    channel = encoder_channel(parent.send, parent.receive, SharedArrays(settings.shared_dir))
    lent = LentRows(channel, share)
    broken = settings.model / "share"

    def trial() -> Memory:
        if broken.exists():
            raise RuntimeError(broken.read_text())
        count = sum(TRIAL_ROWS)
        return Memory(folder, np.arange(count * TRIAL_WIDTH, dtype=np.float32).reshape(count, TRIAL_WIDTH))

    offer = lent.offer(trial)
    parent.ready({"fingerprint": "00"})
    lent.agree(offer)
    while True:
        channel.send(channel.encode(_answer(lent.receive_work(), lent, folder)))


def _answer(work: EncodeBatch, lent: LentRows, folder: Path) -> EncodeDone:
    parts = [patch.pixels for patch in work.patches]
    if parts[0][0, 0] == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    if lent.agreed:
        memory = Memory(folder, np.concatenate(parts))
        return EncodeDone(number=work.number, lent=lent.lend(work.number, memory, [len(part) for part in parts]))
    return EncodeDone(number=work.number, rows=tuple(parts), dtype="float32")
