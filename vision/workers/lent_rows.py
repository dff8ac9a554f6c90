"""The worker's side of rows that stay in its GPU's memory until they are copied from there. Needs no torch.

A worker lends the rows of a batch under its number and keeps them until it is told that they were taken. Before the
first batch it lends a few rows on trial; if those do not arrive, it lends nothing, and rows go as arrays. All that is
lent ends with the worker: whoever copies must see whether it still lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from vision.towers.temporal_patch import EncodeBatch
from vision.workers.encoder_messages import RowsAnswer, RowsHandle, RowsOffer, RowsTaken
from vlmserve_common.transport.channel import MessageChannel

_Rows = TypeVar("_Rows")

TRIAL_ROWS, TRIAL_WIDTH = (3, 1), 256
"""Rows of the two parts lent on trial, and their width: float32, counted up from 0."""
_TRIAL = -1  # a batch's number is not negative


class LentRows(Generic[_Rows]):
    """What a worker has lent. share: makes rows, and how many each temporal patch has, open to another process."""

    def __init__(self, channel: MessageChannel, share: Callable[[_Rows, Sequence[int]], RowsHandle]) -> None:
        self._channel = channel
        self._share = share
        self._kept: dict[int, _Rows] = {}
        self.agreed = False

    def __len__(self) -> int:
        return len(self._kept)

    def offer(self, make_trial: Callable[[], _Rows]) -> RowsOffer:
        """Lend rows as of `TRIAL_ROWS` and `TRIAL_WIDTH`. What goes wrong is said in the offer."""
        try:
            return RowsOffer(trial=self.lend(_TRIAL, make_trial(), TRIAL_ROWS))
        except Exception as error:
            return RowsOffer(error=f"{type(error).__name__}: {error}")

    def agree(self, offer: RowsOffer) -> None:
        """Make an offer; `agreed` is the answer. Blocks. To be called before any work is received."""
        self._channel.send(self._channel.encode(offer))
        answer: RowsAnswer = self._channel.receive()
        self.agreed = answer.lend
        self._kept.pop(_TRIAL, None)

    def lend(self, number: int, rows: _Rows, row_counts: Sequence[int]) -> RowsHandle:
        """Open a batch's rows to the other side, and keep them until they were taken."""
        handle = self._share(rows, row_counts)
        self._kept[number] = rows
        return handle

    def receive_work(self) -> EncodeBatch:
        """The next batch; blocks. Rows that were taken meanwhile are let go of."""
        while isinstance(message := self._channel.receive(), RowsTaken):
            del self._kept[message.number]
        work: EncodeBatch = message
        return work
