"""The place of one answer in its grammar, and the tokens that may come next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_STEP_S = 1.0
"""The time that finding the next tokens may take, a thousand times the usual. In a longer time all other requests would
wait for one. It is wall-clock time: asking for CPU time takes as long as a token."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar, shared by the answers that have it. handle: xgrammar's."""

    handle: Any

    @property
    def num_bytes(self) -> int:
        """Return its memory, roughly."""
        return self.handle.memory_size_bytes

    def matcher(self) -> Matcher:
        """Make the matcher of an answer that has no tokens yet."""
        return Matcher(self.handle)


class Matcher:
    """One answer's way through its grammar. compiled: xgrammar's. is_over: the token that ends the answer has come.
    failure: why no more tokens make sense."""

    def __init__(self, compiled: Any) -> None:
        from xgrammar import GrammarMatcher

        self.is_over = False
        self.failure = ""
        self._matcher = GrammarMatcher(compiled)
        self._stops = frozenset(compiled.tokenizer_info.stop_token_ids)
        self.words = (compiled.tokenizer_info.vocab_size + 31) // 32

    def fill(self, masks: np.ndarray, row: int) -> None:
        """Write one row of masks int32 [rows, words]: a bit for each token, the lowest first, 1 if the token may come
        next. All bits are 1 once nothing makes sense any more: the request is about to end."""
        if self.failure or self.is_over:
            masks[row] = -1
            return
        began = time.perf_counter()
        self._matcher.fill_next_token_bitmask(masks, row)
        self._note_time(began)

    def accept(self, token_id: int) -> None:
        """Go on with the answer's next token."""
        if self.failure or self.is_over:
            return
        began = time.perf_counter()
        if self._matcher.accept_token(token_id):
            self.is_over = token_id in self._stops
        else:
            self.failure = "it leaves no token that could come next"
        self._note_time(began)

    def _note_time(self, began: float) -> None:
        if time.perf_counter() - began > MAX_STEP_S:
            self.failure = f"finding its next tokens takes more than {MAX_STEP_S:g} s"


def masks_of(matchers: Sequence[Matcher]) -> np.ndarray:
    """Return the masks int32 [rows, words] of matchers over one vocabulary; see `Matcher.fill`."""
    masks = np.empty((len(matchers), matchers[0].words if matchers else 0), dtype=np.int32)
    for row, matcher in enumerate(matchers):
        matcher.fill(masks, row)
    return masks
