"""Messages between an encoder worker and its keeper, their channel, and rows that a worker lends. Needs no torch.

A worker can lend the rows of a batch under its number: they stay in its GPU's memory until it is told that they were
taken. Before the first batch it lends a few rows on trial. If these do not arrive, it lends nothing, and rows go as
arrays. Lent rows are gone when the worker ends, so the side that copies must check that it still lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, get_args

import numpy as np

from vision.towers.temporal_patch import EncodeBatch
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import Frame, MessageChannel


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsHandle:
    """Rows [sum of row_counts, width] of a batch in a GPU's memory, for CUDA IPC (`vision.workers.cuda_rows`).

    `row_counts`: of each temporal patch. `dtype`: see `compute.tensors`. `device`: number of the GPU. `memory`: handle
    of an allocation; the rows are its `nbytes` from `offset` on. `counter`, `counter_offset`: where torch counts the
    processes that have it open. `event`, `event_sync`: the end of the computation.
    """

    row_counts: tuple[int, ...]
    width: int
    dtype: str
    device: int
    memory: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeDone:
    """A batch is encoded. `rows`: of each temporal patch [n, row width], in `dtype` (`compute.tensors`).

    `lent`: where the rows are instead, until a `RowsTaken`. `error`: why there are none.
    """

    number: int
    rows: tuple[np.ndarray, ...] = ()
    dtype: str = ""
    lent: RowsHandle | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOffer:
    """A worker's first message if rows can come by CUDA IPC: some rows for a trial. `error`: why there are none."""

    trial: RowsHandle | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsAnswer:
    """The keeper's answer: whether to lend rows from now on."""

    lend: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsTaken:
    """The rows of a batch were copied, or never will be. Their memory is free."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerChange:
    """Write other weights into the first tower, in place."""

    source: WeightSource


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerChanged:
    """The answer to a `TowerChange`. `error`: why the tower is not as it should be."""

    error: str = ""


Message: TypeAlias = EncodeBatch | EncodeDone | RowsOffer | RowsAnswer | RowsTaken | TowerChange | TowerChanged


def encoder_channel(
    send: Callable[[Frame], None], receive: Callable[[], bytes], shared: SharedArrays
) -> MessageChannel:
    """Return one side's channel for these messages."""
    types = get_args(Message)
    return MessageChannel(send, receive, send_types=types, receive_types=types, shared=shared)


_Rows = TypeVar("_Rows")

TRIAL_ROWS, TRIAL_WIDTH = (3, 1), 256
"""Rows of the two parts lent on trial, and their width: float32, counted up from 0."""
_TRIAL = -1  # a batch's number is not negative


class LentRows(Generic[_Rows]):
    """The rows that a worker has lent. `share`: opens rows, with the row counts of each temporal patch, to another
    process."""

    def __init__(self, channel: MessageChannel, share: Callable[[_Rows, Sequence[int]], RowsHandle]) -> None:
        self._channel = channel
        self._share = share
        self._kept: dict[int, _Rows] = {}
        self.agreed = False

    def __len__(self) -> int:
        return len(self._kept)

    def offer(self, make_trial: Callable[[], _Rows]) -> RowsOffer:
        """Lend rows for a trial (`TRIAL_ROWS`, `TRIAL_WIDTH`). The offer holds an error if that fails."""
        try:
            return RowsOffer(trial=self.lend(_TRIAL, make_trial(), TRIAL_ROWS))
        except Exception as error:
            return RowsOffer(error=f"{type(error).__name__}: {error}")

    def agree(self, offer: RowsOffer) -> None:
        """Send an offer and set `agreed` to the answer. Blocks. Call it before any work is received."""
        self._channel.send(self._channel.encode(offer))
        answer: RowsAnswer = self._channel.receive()
        self.agreed = answer.lend
        self._kept.pop(_TRIAL, None)

    def lend(self, number: int, rows: _Rows, row_counts: Sequence[int]) -> RowsHandle:
        """Open a batch's rows to the other side, and keep them until they are taken."""
        handle = self._share(rows, row_counts)
        self._kept[number] = rows
        return handle

    def receive_work(self) -> EncodeBatch | TowerChange:
        """Wait for the next batch, or other weights, and return it. Rows taken meanwhile are let go."""
        while isinstance(message := self._channel.receive(), RowsTaken):
            del self._kept[message.number]
        work: EncodeBatch | TowerChange = message
        return work
