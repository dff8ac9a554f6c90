"""Whether guessing pays: measured steps decide, and both kinds go on being measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.scheduler.drafts import WorkerDrafter
from vlmserve.scheduler.guessing import Guesser, Payoff
from vlmserve.scheduler.req import GuessRate


def share_of_guesses(payoff: Payoff, *, seconds: float, tokens: float, steps: int = 4000) -> float:
    """The share of steps with guesses where such a step takes so many times longer and brings so many tokens."""
    guessed = 0
    for _ in range(steps):
        now = payoff.guess
        guessed += now
        payoff.note(0.04 * (seconds if now else 1.0), tokens if now else 1.0, guessed=now)
    return guessed / steps


def test_the_better_kind_of_step_goes_on_and_a_change_is_noticed():
    payoff = Payoff()
    assert share_of_guesses(payoff, seconds=1.2, tokens=2.0) > 0.95
    assert share_of_guesses(payoff, seconds=1.5, tokens=1.1) < 0.6  # found out at the next trial
    assert share_of_guesses(payoff, seconds=1.5, tokens=1.1) < 0.03
    assert share_of_guesses(Payoff(), seconds=1.0, tokens=1.0) > 0.95  # of equals, and where nothing was guessed


def test_steps_that_bring_no_more_are_no_better_by_chance():
    payoff = Payoff()
    payoff.hopeful = False
    assert share_of_guesses(payoff, seconds=0.97, tokens=1.0) < 0.05
    assert share_of_guesses(payoff, seconds=0.97, tokens=1.2) > 0.5  # found out at the next trial


@pytest.mark.parametrize("right", [False, True])
def test_requests_whose_guesses_were_wrong_give_no_hope(right):
    guesser = Guesser(WorkerDrafter(1), most=1, adapts=True)
    payoff = guesser._payoff(1)
    for _ in range(40):
        req = cast(Any, SimpleNamespace(guess_rate=None, is_forced=False, drafts=(-1,), grammar=None))
        guesser.guesses([req])
        guesser.checked(req, int(right))
    guesser.guesses([req])
    assert payoff.hopeful is right


@pytest.mark.parametrize(("right", "worth"), [(1.0, 4), (0.8, 4), (0.4, 1), (0.0, 0)])
def test_a_request_guesses_as_many_as_are_often_right(right, worth):
    rate = GuessRate(0.7)
    for turn in range(400):  # evenly spread
        rate.note(1, int((turn + 1) * right) - int(turn * right))
    assert rate.worth(4, least_likely=0.3) == worth
    tried = sum(rate.worth(4, least_likely=0.3) > 0 for _ in range(64))
    assert tried == (64 if worth else 4)


def test_a_request_begins_as_others_fared():
    class Four:
        def propose(self, req: Any) -> tuple[int, ...]:
            return (1, 2, 3, 4)

    guesser = Guesser(Four(), most=4, adapts=True)

    def ask(right: bool) -> list[int]:
        """The numbers of guesses that a new request makes in 40 steps."""
        req: Any = SimpleNamespace(
            may_draft=True, drafts=(), remaining_new_tokens=99, grammar=None, guess_rate=None, is_forced=False
        )
        made = []
        for _ in range(40):
            req.drafts = ()
            guesser.propose([req])
            made.append(len(req.drafts))
            guesser.checked(req, made[-1] * right)
        return made

    assert ask(right=False)[0] == 3
    for _ in range(20):
        ask(right=False)
    assert sum(ask(right=False)) == 2
    assert ask(right=True)[-1] == 4
    for _ in range(20):
        ask(right=True)
    assert ask(right=True) == [4] * 40


@pytest.mark.parametrize("depth", [1, 2])
def test_many_guess_together_though_steps_overlap(depth):
    rig = Rig(Knobs(depth=depth, drafts=4, rows=8, pool=512))
    messages = [request(f"r{n}", [n, n + 1, n + 2], new=24) for n in range(8)]
    rig.run(*messages)
    rig.check_answers(*messages)
    stats = rig.loop.stats().steps
    assert stats.guesses.right > 8 * 8
    assert len(rig.worker.batches) < 24
