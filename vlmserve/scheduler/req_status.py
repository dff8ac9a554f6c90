"""Where a request is in its life, and which way it may go from there."""

from __future__ import annotations

import enum


class ReqStatus(enum.Enum):
    """WAITING_FOR_*: in the queue, but not to be tried before what it waits for is there. RETRACTED: in the queue
    again, with tokens that it was given before."""

    WAITING = enum.auto()
    WAITING_FOR_ENCODER = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()
    WAITING_FOR_REMOTE_KV = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    RETRACTED = enum.auto()
    FINISHED = enum.auto()

    @property
    def is_queued(self) -> bool:
        """Whether a request of this status is in the waiting queue."""
        return self in _QUEUED

    @property
    def is_blocked(self) -> bool:
        """Whether it is not to be tried for now."""
        return self in _BLOCKED


_BLOCKED = frozenset({ReqStatus.WAITING_FOR_ENCODER, ReqStatus.WAITING_FOR_GRAMMAR, ReqStatus.WAITING_FOR_REMOTE_KV})
_QUEUED = _BLOCKED | {ReqStatus.WAITING, ReqStatus.RETRACTED}
_ADMITTED = frozenset({ReqStatus.PREFILLING, ReqStatus.FINISHED})
MOVES: dict[ReqStatus, frozenset[ReqStatus]] = {
    ReqStatus.WAITING: _BLOCKED | _ADMITTED,
    **{status: frozenset({ReqStatus.WAITING, *_ADMITTED}) for status in _BLOCKED},
    ReqStatus.PREFILLING: frozenset({ReqStatus.DECODING, ReqStatus.RETRACTED, ReqStatus.FINISHED}),
    ReqStatus.DECODING: frozenset({ReqStatus.RETRACTED, ReqStatus.FINISHED}),
    ReqStatus.RETRACTED: _BLOCKED | _ADMITTED,
    ReqStatus.FINISHED: frozenset(),
}
