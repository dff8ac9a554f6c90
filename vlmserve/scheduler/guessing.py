"""Which tokens of the next step are guessed, and whether guessing pays."""

from __future__ import annotations

from collections.abc import Sequence

from vlmserve.scheduler.drafts import Drafter
from vlmserve.scheduler.grammar.matcher import look_ahead
from vlmserve.scheduler.req import GuessRate, Req

_LEAST_LIKELY = 0.3
"""A guess that is right less often is not made: checking it costs about so much of a token."""
_SMOOTH = 0.2
_SETTLES = 2
"""Steps after a change that are not measured: steps in flight were decided before it."""
_TRIED_STEPS, _FIRST_REST, _LONGEST_REST = 6, 64, 2048


class Guesser:
    """Chooses guesses for the requests that decode. A guess changes no answer, see `drafts`.

    Where a grammar leaves one text on, its tokens are the guesses, also without a drafter. Else the drafter guesses. A
    request with guesses must have nothing in flight, so while guessing pays, one step is in flight at a time, and all
    requests share it: two halves of a batch would read the weights twice.

    most: tokens guessed at a time. adapts: guess fewer or none where that is faster. Otherwise always `most`.
    """

    def __init__(self, drafter: Drafter | None, *, most: int, adapts: bool) -> None:
        self._drafter = drafter
        self._most = most
        self._adapts = adapts
        self._payoffs: dict[int, Payoff] = {}  # by the size of batches
        self._usual = GuessRate(0.7, smooth=0.02)  # of all requests

    def guesses(self, reqs: Sequence[Req]) -> bool:
        """Return whether the next step may have guesses, given all requests that decode."""
        if not self._most or not any(self._drafter is not None or req.grammar is not None for req in reqs):
            return False
        if not self._adapts:
            return True
        payoff = self._payoff(len(reqs))
        payoff.hopeful = any(req.grammar is not None or self._rate(req).rate >= _LEAST_LIKELY for req in reqs)
        return payoff.guess

    def propose(self, reqs: Sequence[Req]) -> None:
        """Choose `drafts` of these requests, as many as they may have. Slots are not allocated yet."""
        reqs = [req for req in reqs if req.may_draft]
        for req in reqs:
            if self._drafter is not None and (most := self._worth(self._rate(req))):
                req.drafts = self._drafter.propose(req)[: min(most, req.remaining_new_tokens - 1)]
        ruled = [(req, req.grammar, self._worth(req.forced_rate)) for req in reqs if req.grammar is not None]
        look_ahead({grammar: (req.drafts, max(most, len(req.drafts))) for req, grammar, most in ruled})
        for req, grammar, most in ruled:
            proposed, fitting = req.drafts, grammar.guesses[: req.remaining_new_tokens - 1]
            req.is_forced = fitting != proposed[: len(fitting)]
            req.drafts = fitting[:most] if req.is_forced else fitting

    def checked(self, req: Req, right: int) -> None:
        """Note that so many of a request's drafts were right."""
        for rate in [req.forced_rate] if req.is_forced else [self._rate(req), self._usual]:
            rate.note(len(req.drafts), right)

    def stepped(self, seconds: float, *, guessed: bool, reqs: int, tokens: int) -> None:
        """Note that a step in which only decoding was done came so long after one of its kind. guessed: whether it was
        decided with guesses, if it has any or not. tokens: what it brought to all requests."""
        if self._adapts and reqs:
            self._payoff(reqs).note(seconds, tokens / reqs, guessed=guessed)

    def _rate(self, req: Req) -> GuessRate:
        """Return a request's own rate. It begins as that of others, and high enough to rise by one right guess."""
        if req.guess_rate is None:
            req.guess_rate = GuessRate(max(self._usual.rate, _LEAST_LIKELY - 0.05))
        return req.guess_rate

    def _payoff(self, reqs: int) -> Payoff:
        return self._payoffs.setdefault(reqs.bit_length(), Payoff())

    def _worth(self, rate: GuessRate) -> int:
        return rate.worth(self._most, least_likely=_LEAST_LIKELY) if self._adapts else self._most


class Payoff:
    """Whether steps with guesses bring more tokens a second than steps without, for batches of about one size.

    The better kind goes on, and the other one is tried now and then, less often each time that it loses.
    guess: which kind is next. hopeful: guesses will be made as soon as there is something to make them from. If not,
    steps that bring no more tokens are no better, however fast they seem.
    """

    def __init__(self) -> None:
        self.guess = self.hopeful = True
        self._seconds: dict[bool, float] = {}
        self._tokens: dict[bool, float] = {}
        self._settling = 0
        self._left, self._rest = _TRIED_STEPS, _FIRST_REST

    def note(self, seconds: float, tokens: float, *, guessed: bool) -> None:
        """Note a step. tokens: a request's share of those it brought."""
        if guessed is not self.guess or self._settling:
            self._settling -= guessed is self.guess
            return
        for means, value in ((self._seconds, seconds), (self._tokens, tokens)):
            means[guessed] = means.get(guessed, value) + _SMOOTH * (value - means.get(guessed, value))
        self._left -= 1
        if self._left > 0:
            return
        better = self._better()
        if better is None or better is self.guess:  # now the other kind is tried
            self._turn(not self.guess, _TRIED_STEPS)
            return
        self._rest = min(2 * self._rest, _LONGEST_REST)
        self._turn(better, self._rest)

    def _turn(self, guess: bool, steps: int) -> None:
        self.guess, self._left, self._settling = guess, steps, _SETTLES

    def _better(self) -> bool | None:
        if len(self._seconds) < 2:
            return None
        if self._tokens[True] <= self._tokens[False] and not self.hopeful:
            return False
        rates = {guess: self._tokens[guess] / max(seconds, 1e-9) for guess, seconds in self._seconds.items()}
        return rates[True] >= rates[False]
