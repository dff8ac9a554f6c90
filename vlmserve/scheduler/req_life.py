"""What happens to a request: its status, where its time goes, and the logprobs of its prompt."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import numpy as np

from vlmserve.executor.model_worker_batch import RowLogprobs
from vlmserve.ipc.messages import Pooling, PromptLogprobs, ReturnOptions, StageTimes


class ReqStatus(enum.Enum):
    """Where a request is in its life. `MOVES` says which status may follow which.

    WAITING_FOR_*: in the queue, but not tried yet. RETRACTED: in the queue again, with the tokens that it has.
    TRANSFERRING: its prompt is computed, for another server that takes its KV over.
    """

    WAITING = enum.auto()
    WAITING_FOR_ENCODER = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()
    WAITING_FOR_REMOTE_KV = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    TRANSFERRING = enum.auto()
    RETRACTED = enum.auto()
    FINISHED = enum.auto()

    @property
    def is_queued(self) -> bool:
        """Return True if a request of this status is in the waiting queue."""
        return self in _QUEUED

    @property
    def is_blocked(self) -> bool:
        """Return True if a request of this status is not tried for now."""
        return self in _BLOCKED


_BLOCKED = frozenset({ReqStatus.WAITING_FOR_ENCODER, ReqStatus.WAITING_FOR_GRAMMAR, ReqStatus.WAITING_FOR_REMOTE_KV})
_QUEUED = _BLOCKED | {ReqStatus.WAITING, ReqStatus.RETRACTED}
_ADMITTED = frozenset({ReqStatus.PREFILLING, ReqStatus.FINISHED})
MOVES: dict[ReqStatus, frozenset[ReqStatus]] = {
    ReqStatus.WAITING: _BLOCKED | _ADMITTED,
    **{status: frozenset({ReqStatus.WAITING, *_ADMITTED}) for status in _BLOCKED},
    ReqStatus.PREFILLING: frozenset({ReqStatus.DECODING, ReqStatus.RETRACTED, ReqStatus.FINISHED}),
    ReqStatus.DECODING: frozenset({ReqStatus.TRANSFERRING, ReqStatus.RETRACTED, ReqStatus.FINISHED}),
    ReqStatus.TRANSFERRING: frozenset({ReqStatus.FINISHED}),
    ReqStatus.RETRACTED: _BLOCKED | _ADMITTED,
    ReqStatus.FINISHED: frozenset(),
}


class ReqTimes:
    """Notes when things happen to a request, from its arrival at the scheduler to its last token.

        arrived     embeddings ready     first chunk     first token          last token
        |<-- encode ------>|<-- queue -->|<-- prefill -->|<-- decode ---------->|

    Encoding and waiting overlap, so the queue is the wait for nothing but the scheduler. A long prompt may begin before
    its last picture is ready: then encode and prefill overlap, and there is no queue.
    clock: in seconds, never backwards.
    """

    __slots__ = ("_arrived", "_began", "_cached", "_clock", "_encoded", "_encodes", "_first", "_retractions")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived = clock()
        self._encodes = False
        self._encoded: float | None = None
        self._cached = False
        self._began: float | None = None
        self._first: float | None = None
        self._retractions = 0

    def arrived(self, *, encodes: bool) -> None:
        """Note the arrival. encodes: it needs embeddings, as they are in no cached prefix."""
        self._arrived = self._clock()
        self._encodes = encodes

    def encoded(self, *, cached: bool) -> None:
        """Note that all its embeddings are there. cached: none of them had to be computed for it."""
        if self._encoded is None:
            self._encoded, self._cached = self._clock(), cached

    def prefill_began(self) -> None:
        """Note a chunk of its prompt in a step; the first one counts."""
        if self._began is None:
            self._began = self._clock()

    def first_token(self) -> None:
        """Note that its prompt is done. The first time counts: a prompt computed again gives no first token."""
        if self._first is None:
            self._first = self._clock()

    def retracted(self) -> None:
        """Note that its KV slots were taken back. The time until they are computed again counts for the stage it is
        in."""
        self._retractions += 1

    def so_far(self) -> StageTimes:
        """Return the stages that it has come to, the last one until now; all stages after its last token."""
        now = self._clock()
        encoded = (now if self._encoded is None else self._encoded) if self._encodes else self._arrived
        began = now if self._began is None else self._began
        first = now if self._first is None else self._first
        return StageTimes(
            queue_s=max(0.0, began - encoded),
            encode_s=encoded - self._arrived if self._encodes else None,
            encode_cached=self._cached if self._encodes else None,
            prefill_s=None if self._began is None else first - began,
            decode_s=None if self._first is None else now - first,
            total_s=now - self._arrived,
            retractions=self._retractions,
        )


class PromptScores:
    """Collects the logprobs of a prompt's own tokens at positions `start` .. L-1, chunk by chunk.

    The logits of position p score the token at p + 1. So the last token of a chunk scores the first one of the next
    chunk, which the host knows, and chunks need nothing from each other. Position 0 has no logprob.
    """

    def __init__(self, input_ids: np.ndarray, returns: ReturnOptions) -> None:
        assert returns.prompt_logprobs is not None
        self._ids = input_ids
        self._start = returns.logprob_start_len
        self._tops = returns.prompt_logprobs
        self._next = max(self._start, 1)  # the first position without a logprob
        self._parts: list[RowLogprobs] = []

    @property
    def matchable_len(self) -> int:
        """Return how many tokens of the prompt may come from the prefix cache, which has no logits."""
        return len(self._ids) if self._next >= len(self._ids) else self._next - 1

    def wanted(self, start: int, end: int) -> tuple[int, int]:
        """Return the positions [first, last) that the next tokens [start, end) score; there may be none."""
        first = max(start + 1, self._next)
        return first, max(first, min(end + 1, len(self._ids)))

    def take(self, first: int, rows: RowLogprobs) -> None:
        """Take the logprobs of positions from `first` on. Steps come in the order of their launch."""
        assert first == self._next, (first, self._next)
        self._parts.append(rows)
        self._next += len(rows.logprobs)

    def message(self, num_asked: int) -> PromptLogprobs | None:
        """Return all logprobs; None while some are missing. num_asked: token ids asked for at each position."""
        if self._next < len(self._ids):
            return None
        parts = [_nothing(num_asked)] * (self._start == 0) + self._parts
        tops = max((part.top_ids.shape[1] for part in self._parts), default=0)
        tops = min(tops, self._tops)  # the step was shared with requests that want more

        def wide(part: np.ndarray) -> np.ndarray:
            missing = ((0, 0), (0, max(tops - part.shape[1], 0)))
            fill = np.nan if part.dtype.kind == "f" else 0
            return np.pad(part, missing, constant_values=fill)[:, :tops]

        return PromptLogprobs(
            start=self._start,
            token_ids=self._ids[self._start :],
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
            top_ids=np.concatenate([wide(part.top_ids) for part in parts]),
            top_logprobs=np.concatenate([wide(part.top_logprobs) for part in parts]),
            token_ids_logprobs=np.concatenate([part.asked.reshape(len(part.ranks), num_asked) for part in parts]),
        )


class PooledStates:
    """Sums up the hidden states that a prompt's vector is made of, chunk by chunk. See `PromptScores`.

    The prefix cache has no hidden states, so a mean computes all tokens.
    """

    def __init__(self, pooling: Pooling, prompt_len: int) -> None:
        self._pooling, self._end = pooling, prompt_len
        self._next = self._start = prompt_len - 1 if pooling.how == "last" else 0
        self._sum: np.ndarray | None = None

    @property
    def matchable_len(self) -> int:
        """Return how many tokens of the prompt may come from the prefix cache."""
        return self._next

    def wanted(self, start: int, end: int) -> int:
        """Return how many of the last ones of the tokens [start, end) are to be summed up."""
        return max(0, min(end, self._end) - max(start, self._next))

    def take(self, count: int, total: np.ndarray) -> None:
        """Take the sum, float32 [1, hidden], over the next `count` tokens."""
        self._sum = total if self._sum is None else self._sum + total
        self._next += count

    def vector(self) -> np.ndarray:
        """Return the vector, float32 [1, dimensions]."""
        assert self._sum is not None, "no token has been computed"
        assert self._next == self._end, (self._next, self._end)
        found = self._sum[:, : self._pooling.dimensions] / (self._end - self._start)
        if self._pooling.normalize:
            found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found.astype(np.float32)


def _nothing(num_asked: int) -> RowLogprobs:
    return RowLogprobs(
        logprobs=np.full(1, np.nan, dtype=np.float32),
        ranks=np.zeros(1, dtype=np.int64),
        top_ids=np.zeros((1, 0), dtype=np.int64),
        top_logprobs=np.zeros((1, 0), dtype=np.float32),
        asked=np.full(num_asked, np.nan, dtype=np.float32),
    )
