"""Messages between an encoder worker and its keeper, and their channel. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np

from vision.towers.temporal_patch import EncodeBatch
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


Message: TypeAlias = EncodeBatch | EncodeDone | RowsOffer | RowsAnswer | RowsTaken


def encoder_channel(
    send: Callable[[Frame], None], receive: Callable[[], bytes], shared: SharedArrays
) -> MessageChannel:
    """Return one side's channel for these messages."""
    types = get_args(Message)
    return MessageChannel(send, receive, send_types=types, receive_types=types, shared=shared)
