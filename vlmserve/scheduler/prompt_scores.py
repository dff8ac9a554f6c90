"""Logprobs of a prompt's own tokens, as they come chunk by chunk."""

from __future__ import annotations

import numpy as np

from vlmserve.executor.model_worker_batch import RowLogprobs
from vlmserve.ipc.messages import PromptLogprobs, ReturnOptions


class PromptScores:
    """What is known of the tokens at positions `start` .. L-1 of a prompt; the logits of position p tell of p + 1.

    The last token of a chunk so tells of the first of the next, which the host knows: chunks need nothing of one
    another. Position 0 comes after nothing, so nothing is said of it.
    """

    def __init__(self, input_ids: np.ndarray, returns: ReturnOptions) -> None:
        assert returns.prompt_logprobs is not None
        self._ids = input_ids
        self._start = returns.logprob_start_len
        self._tops = returns.prompt_logprobs
        self._next = max(self._start, 1)  # the first position that nothing is known of
        self._parts: list[RowLogprobs] = []

    @property
    def matchable_len(self) -> int:
        """How much of the prompt may come from the prefix cache, where there are no logits."""
        return len(self._ids) if self._next >= len(self._ids) else self._next - 1

    def wanted(self, start: int, end: int) -> tuple[int, int]:
        """Positions [first, last) that tokens [start, end), computed next, tell of; they may be none."""
        first = max(start + 1, self._next)
        return first, max(first, min(end + 1, len(self._ids)))

    def take(self, first: int, rows: RowLogprobs) -> None:
        """What came of positions from `first` on. Steps come in the order in which they were launched."""
        assert first == self._next, (first, self._next)
        self._parts.append(rows)
        self._next += len(rows.logprobs)

    def message(self, num_asked: int) -> PromptLogprobs | None:
        """All of it; None as long as something is missing. num_asked: tokens asked for at each position."""
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


def _nothing(num_asked: int) -> RowLogprobs:
    """Of position 0."""
    return RowLogprobs(
        logprobs=np.full(1, np.nan, dtype=np.float32),
        ranks=np.zeros(1, dtype=np.int64),
        top_ids=np.zeros((1, 0), dtype=np.int64),
        top_logprobs=np.zeros((1, 0), dtype=np.float32),
        asked=np.full(num_asked, np.nan, dtype=np.float32),
    )
