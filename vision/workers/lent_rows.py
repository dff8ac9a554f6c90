"""The worker's side of rows that stay in its GPU's memory until they are copied from there. Needs no torch.

A worker lends the rows of a batch under its number and keeps them until it is told that they were taken. Before the
first batch it lends a few rows on trial. If these do not arrive, it lends nothing, and rows go as arrays. Lent rows are
gone when the worker ends, so the side that copies must check that it still lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from vision.towers.temporal_patch import EncodeBatch
from vision.workers.encoder_messages import RowsAnswer, RowsHandle, RowsOffer, RowsTaken
from vlmserve_common.transport.wire import MessageChannel

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

    def receive_work(self) -> EncodeBatch:
        """Wait for the next batch and return it. Rows taken meanwhile are let go."""
        while isinstance(message := self._channel.receive(), RowsTaken):
            del self._kept[message.number]
        work: EncodeBatch = message
        return work
