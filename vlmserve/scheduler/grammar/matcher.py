"""The place of one answer in its grammar, and the tokens that may come next."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

_MOST_BLOCKED_S = 10.0
"""Wall-clock time that a grammar's process may take for a step. The kernel limits its CPU time to far less, so only a
machine that is stuck comes to this."""

_LEAST_SHARE, _FORGIVEN_S = 1 / 16, 60.0

_TOO_SLOW = "finding its next tokens takes too long or too much memory: it repeats, or can be read, in too many ways"
_NOTHING_FITS = "it leaves no token that could come next"


class Patience:
    """Decides how much of a step's time limit the grammars of one client get. Each grammar that took too long leaves a
    quarter, down to a sixteenth. A minute after the last one, the client has all of the limit again. clock: in
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._share = 1.0
        self._until = clock()

    @property
    def share(self) -> float:
        """Return the part that is left of the time for a step."""
        return self._share if self._clock() < self._until else 1.0

    def lose(self) -> None:
        """Note that a grammar took too long."""
        self._share = max(self.share / 4, _LEAST_SHARE)
        self._until = self._clock() + _FORGIVEN_S


class Matcher:
    """One answer's way through its grammar. number: its name in the grammar's process. patience: with its client.
    is_over: the token that ends the answer has come."""

    def __init__(self, grammar: CompiledGrammar, number: int, patience: Patience) -> None:
        self.grammar = grammar
        self.number = number
        self.patience = patience
        self.is_over = False
        self.fits = True
        self._news: list[int] = []

    @property
    def failure(self) -> str:
        """Return why no more tokens make sense; empty while they do."""
        return self.grammar.failure if self.fits else _NOTHING_FITS

    def accept(self, token_id: int) -> None:
        """Go on with the answer's next token. Whether the grammar allows it, the next masks tell."""
        self._news.append(token_id)
        self.is_over = token_id in self.grammar.stop_ids

    def take_news(self) -> list[int]:
        """Return the tokens that have come since the last call."""
        news, self._news = self._news, []
        return news

    def end(self) -> None:
        """Give the place up: the answer has ended."""
        self.grammar.forget(self.number)


class CompiledGrammar:
    """A grammar in a process of its own, which all answers that have it share: see `serving`.

    pipe: this end of the process's pipe. num_bytes: memory of the process. words: int32 words of a mask. stop_ids:
    tokens that end an answer where the grammar allows them. closed: called once, when the process is let go.
    """

    def __init__(
        self, pipe: Connection, *, num_bytes: int, words: int, stop_ids: frozenset[int], closed: Callable[[], None]
    ) -> None:
        self.num_bytes = num_bytes
        self.words = words
        self.stop_ids = stop_ids
        self.failure = ""  # why it is of no use any more
        self._pipe = pipe
        self._closed = closed
        self._made = 0
        self._ended: list[int] = []

    def matcher(self, patience: Patience) -> Matcher:
        """Make the matcher of an answer that has no tokens yet. patience: with its client."""
        self._made += 1
        return Matcher(self, self._made, patience)

    def forget(self, number: int) -> None:
        """Forget a matcher. The process hears of it with the next step."""
        self._ended.append(number)

    def ask(self, matchers: Sequence[Matcher]) -> None:
        """Tell the process which tokens have come, and ask for the masks of the next ones."""
        news = [(matcher.number, matcher.take_news()) for matcher in matchers]
        ended, self._ended = self._ended, []
        share = max(matcher.patience.share for matcher in matchers)  # one client's past fails no other client's answers
        try:
            self._pipe.send((news, ended, share))
        except OSError:  # the process has ended, or the pipe is closed
            self.close(_TOO_SLOW)

    def take_masks(self, matchers: Sequence[Matcher]) -> np.ndarray | None:
        """Wait for the masks, int32 [matchers, words]. None: the process has ended, and with it the grammar."""
        if self.failure:
            return None
        try:
            if not self._pipe.poll(_MOST_BLOCKED_S):
                raise EOFError
            answer = np.frombuffer(self._pipe.recv_bytes(), dtype=np.int32).reshape(len(matchers), 1 + self.words)
        except (EOFError, OSError):
            self.close(_TOO_SLOW)
            for patience in {matcher.patience for matcher in matchers}:
                patience.lose()
            return None
        for matcher, fits in zip(matchers, answer[:, 0], strict=True):
            matcher.fits = bool(fits)
        return answer[:, 1:]

    def close(self, why: str) -> None:
        """Let the process go: it ends by itself, at the latest when its CPU time is over. why: the failure of answers
        that still follow the grammar."""
        if not self.failure:
            self.failure = why
            self._pipe.close()
            self._closed()


def masks_of(matchers: Sequence[Matcher]) -> np.ndarray:
    """Return the masks int32 [rows, words] of matchers over one vocabulary: a bit for each token, the lowest first, 1
    if the token may come next. All bits of a row are 1 once nothing makes sense any more: the request is about to end.

    The processes of different grammars work at the same time.
    """
    masks = np.full((len(matchers), matchers[0].grammar.words if matchers else 0), -1, dtype=np.int32)
    rows: dict[CompiledGrammar, list[int]] = defaultdict(list)
    for row, matcher in enumerate(matchers):
        if not matcher.failure and not matcher.is_over:
            rows[matcher.grammar].append(row)
    asked = {grammar: [matchers[row] for row in its] for grammar, its in rows.items()}
    for grammar, its in asked.items():
        grammar.ask(its)
    for grammar, its in asked.items():
        found = grammar.take_masks(its)
        if found is not None:
            masks[rows[grammar]] = found
    return masks
