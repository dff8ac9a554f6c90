"""Guesses of the next tokens of an answer, which a step checks together (speculative decoding).

A guess changes no answer: what is sampled behind the tokens that came before it is what would have been sampled there
anyway, and a guess that is something else is dropped with all behind it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vlmserve.scheduler.req import Req


class Drafter(Protocol):
    """Guesses what comes next."""

    def propose(self, req: Req) -> tuple[int, ...]:
        """Of a request whose tokens are all known, the next ones; none if there is no good guess."""
        ...


class NGramDrafter:
    """Prompt lookup: where the last tokens stood before, in the prompt or in the answer, what followed them then.

    Answers that repeat what they were asked about gain: text read off a picture twice, lists, JSON.
    """

    def __init__(self, num_draft_tokens: int, *, least: int = 2, most: int = 5) -> None:
        """least, most: how many tokens must be the same at least, and are looked at to choose the better place."""
        self._num_draft_tokens = num_draft_tokens
        self._least, self._most = least, most

    def propose(self, req: Req) -> tuple[int, ...]:
        """See `Drafter`."""
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
        after = int(places[-1]) + 1
        return tuple(ids[after : after + self._num_draft_tokens].tolist())
