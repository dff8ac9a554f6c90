"""Guesses of the next tokens of an answer, which a step checks together (speculative decoding).

A guess changes no answer. Behind each guess a token is sampled as always. The first guess that differs from the sampled
token is dropped, with all guesses behind it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vlmserve.scheduler.req import Req


class Drafter(Protocol):
    """Guesses the next tokens of a request whose tokens are all known."""

    def propose(self, req: Req) -> tuple[int, ...]:
        """Return the guesses; -1 for each one that the worker makes."""


def make_drafter(algorithm: str, num_draft_tokens: int) -> Drafter | None:
    """Make the drafter that `--speculative-algorithm` names; None for none."""
    if algorithm == "none":
        return None
    return NGramDrafter(num_draft_tokens) if algorithm == "ngram" else WorkerDrafter(num_draft_tokens)


class WorkerDrafter:
    """Leaves guessing to the worker, which has what it takes: the model's hidden states."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._drafts = (-1,) * num_draft_tokens

    def propose(self, req: Req) -> tuple[int, ...]:
        """Return as many places as may be guessed. Penalties and grammars have to know the tokens before."""
        return () if req.is_penalised or req.grammar is not None else self._drafts


class NGramDrafter:
    """Looks up where the last tokens stood before, in the prompt or in the answer, and guesses the tokens that followed
    them there (prompt lookup).

    That helps answers that repeat themselves or their prompt: text read off a picture twice, lists, JSON.
    """

    def __init__(self, num_draft_tokens: int, *, least: int = 2, most: int = 5) -> None:
        """least: so many tokens must be the same. most: so many are compared to choose between places."""
        self._num_draft_tokens = num_draft_tokens
        self._least, self._most = least, most

    def propose(self, req: Req) -> tuple[int, ...]:
        """Return the next tokens of a request whose tokens are all known: those that followed the best place, over and
        over if they reach to the end; none if there is no good one."""
        ids = np.concatenate([req.prompt_token_ids, np.asarray(req.output_ids, dtype=np.int64)])
        places = np.arange(len(ids) - 1)  # where the last token stood before; those that go on alike
        alike = 0
        while alike < self._most:
            going_on = places[places >= alike]
            going_on = going_on[ids[going_on - alike] == ids[len(ids) - 1 - alike]]
            if not len(going_on):
                break
            places, alike = going_on, alike + 1
        if alike < self._least:
            return ()
        followed = ids[int(places[-1]) + 1 :]
        return tuple(np.resize(followed, self._num_draft_tokens).tolist())
