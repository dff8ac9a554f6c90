"""The place of one answer in its grammar, and the tokens that may come next."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np

FITS, MISFIT = -1, -2
"""What the first row of a matcher's answer begins with: whether the tokens that have come fit."""

Proposal = tuple[Sequence[int], int]
"""Guesses of an answer's next tokens, and how many there may be of these or others."""

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
    is_over: the token that ends the answer has come. guesses: tokens that fit next, see `look_ahead`."""

    def __init__(self, grammar: CompiledGrammar, number: int, patience: Patience) -> None:
        self.grammar = grammar
        self.number = number
        self.patience = patience
        self.is_over = False
        self.fits = True
        self.guesses: tuple[int, ...] = ()
        self._masks: np.ndarray | None = None
        self._news: list[int] = []

    @property
    def failure(self) -> str:
        """Return why no more tokens make sense; empty while they do."""
        return self.grammar.failure if self.fits else _NOTHING_FITS

    def accept(self, token_id: int) -> None:
        """Go on with the answer's next token. Whether the grammar allows it, the next masks tell."""
        self._news.append(token_id)
        self._masks, self.guesses = None, ()
        self.is_over = token_id in self.grammar.stop_ids

    def take_news(self) -> list[int]:
        """Return the tokens that have come since the last call."""
        news, self._news = self._news, []
        return news

    def see(self, masks: np.ndarray, guesses: tuple[int, ...]) -> None:
        """Keep the masks of the next tokens, int32 [1 + guesses, words]: the next one's, and those behind each
        guess."""
        self._masks, self.guesses = masks, guesses

    def mask(self, ahead: int) -> np.ndarray | None:
        """Return the mask int32 [words] of the token behind so many guesses; None if it was not looked at."""
        return None if self._masks is None else self._masks[ahead]

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

    def ask(self, matchers: Mapping[Matcher, Proposal]) -> None:
        """Tell the process which tokens have come, and ask for the masks of the next ones. See `look_ahead`."""
        news = [(matcher.number, matcher.take_news(), *proposal) for matcher, proposal in matchers.items()]
        ended, self._ended = self._ended, []
        share = max(matcher.patience.share for matcher in matchers)  # one client's past fails no other client's answers
        try:
            self._pipe.send((news, ended, share))
        except OSError:  # the process has ended, or the pipe is closed
            self.close(_TOO_SLOW)

    def take_masks(self, matchers: Iterable[Matcher]) -> None:
        """Wait for the masks, and give them to the matchers. If the process has ended, its grammar has failed."""
        if self.failure:
            return
        try:
            if not self._pipe.poll(_MOST_BLOCKED_S):
                raise EOFError
            answer = np.frombuffer(self._pipe.recv_bytes(), dtype=np.int32).reshape(-1, 1 + self.words)
        except (EOFError, OSError):
            self.close(_TOO_SLOW)
            for patience in {matcher.patience for matcher in matchers}:
                patience.lose()
            return
        # a matcher's first row says whether its tokens fit; behind it is a row for each guess, with the guess
        starts = [*np.flatnonzero(answer[:, 0] < 0), len(answer)]
        for matcher, first, last in zip(matchers, starts[:-1], starts[1:], strict=True):
            matcher.fits = answer[first, 0] == FITS
            matcher.see(answer[first:last, 1:], tuple(answer[first + 1 : last, 0].tolist()))

    def close(self, why: str) -> None:
        """Let the process go: it ends by itself, at the latest when its CPU time is over. why: the failure of answers
        that still follow the grammar."""
        if not self.failure:
            self.failure = why
            self._pipe.close()
            self._closed()


def look_ahead(proposals: Mapping[Matcher, Proposal]) -> None:
    """Have all matchers know the masks of their next tokens, and guess some.

    Where a grammar leaves one text on, its tokens are the guesses. Elsewhere they are the proposals, as far as these
    fit. The processes of different grammars work at the same time.
    """
    asked: dict[CompiledGrammar, dict[Matcher, Proposal]] = defaultdict(dict)
    for matcher, proposed in proposals.items():
        if not matcher.failure and not matcher.is_over:
            asked[matcher.grammar][matcher] = proposed
    for grammar, matchers in asked.items():
        grammar.ask(matchers)
    for grammar, matchers in asked.items():
        grammar.take_masks(matchers)


def masks_of(rows: Sequence[tuple[Matcher, int]]) -> np.ndarray:
    """Return the masks int32 [rows, words] of tokens: a bit for each token of the vocabulary, the lowest first, 1 if it
    may come. All bits of a row are 1 once nothing makes sense any more: the request is about to end.

    rows: an answer's matcher, and how many guesses stand before the token.
    """
    masks = np.full((len(rows), rows[0][0].grammar.words if rows else 0), -1, dtype=np.int32)
    look_ahead({matcher: ((), 0) for matcher, _ in rows if matcher.mask(0) is None})
    for row, (matcher, ahead) in enumerate(rows):
        found = None if matcher.failure or matcher.is_over else matcher.mask(ahead)
        if found is not None:
            masks[row] = found
    return masks
