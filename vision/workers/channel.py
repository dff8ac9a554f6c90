"""What an encoder worker and its keeper say to each other, and how. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np

from vision.towers.temporal_patch import EncodeBatch
from vlmserve_common.transport import wire
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import Frame


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsHandle:
    """Rows [sum of row_counts, width] of a batch in a GPU's memory, for CUDA IPC (`vision.workers.cuda_rows`).

    row_counts: of each temporal patch. dtype: see `compute.tensors`. device: number of the GPU. memory: handle of an
    allocation in which they take `nbytes` from `offset` on. counter, counter_offset: where torch counts who has it
    open. event, event_sync: of what computed them.
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
    """rows: of each temporal patch [n, row width], of `dtype` (`compute.tensors`). lent: where they are instead,
    until a `RowsTaken`. error: why there are none."""

    number: int
    rows: tuple[np.ndarray, ...] = ()
    dtype: str = ""
    lent: RowsHandle | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOffer:
    """A worker's first message, where rows may come by CUDA IPC: some to try it with. error: why there are none."""

    trial: RowsHandle | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsAnswer:
    """What follows: whether rows are to be lent from now on."""

    lend: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsTaken:
    """The rows of a batch were copied, or never will be: their memory is free."""

    number: int


Message: TypeAlias = EncodeBatch | EncodeDone | RowsOffer | RowsAnswer | RowsTaken


class MessageChannel(wire.MessageChannel):
    """See `vlmserve_common.transport.wire`."""

    def __init__(self, send: Callable[[Frame], None], receive: Callable[[], bytes], shared: SharedArrays) -> None:
        types = get_args(Message)
        super().__init__(send, receive, send_types=types, receive_types=types, shared=shared)
