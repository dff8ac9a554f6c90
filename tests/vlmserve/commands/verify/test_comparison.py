"""What counts as equal, as a near tie, and as different."""

from __future__ import annotations

import math

import pytest

from vlmserve.commands.verify.answers import Answer, CaseFinding, Step, Verdict, compare


def step(token: int, **logprobs: float) -> Step:
    """logprobs: of tokens t1, t2 ..., best first."""
    top = {int(name[1:]): value for name, value in logprobs.items()}
    return Step(token_id=token, logprob=top[token], top=top)


THEIRS = (step(1, t1=-0.1, t2=-2.5), step(2, t2=-0.70, t3=-0.71, t4=-3.0), step(5, t5=-0.2, t6=-1.7))


def found(*steps: Step, theirs: tuple[Step, ...] = THEIRS, prompt: int = 9, near_ties: bool = True) -> CaseFinding:
    ours, other = Answer(prompt_tokens=prompt, steps=steps), Answer(prompt_tokens=9, steps=theirs)
    return compare("case", "run", ours, other, tolerance=0.05, allow_near_ties=near_ties)


def test_equal() -> None:
    close = (step(1, t1=-0.11, t2=-2.46), *THEIRS[1:])
    finding = found(*close)
    assert (finding.verdict, finding.why) == (Verdict.EQUAL, "")
    assert (finding.equal_tokens, finding.tokens) == (3, 3)
    assert finding.logprob_difference == pytest.approx(0.01)
    assert finding.first_step_difference == pytest.approx(0.04)


def test_a_near_tie_is_one_of_16_bits_only() -> None:
    parted = (THEIRS[0], step(3, t3=-0.70, t2=-0.71), step(9, t9=-0.1))
    assert found(*parted).verdict is Verdict.NEAR_TIE
    assert found(*parted).equal_tokens == 1
    finding = found(*parted, near_ties=False)
    assert finding.verdict is Verdict.DIFFERENT
    assert finding.why == "token 1 is 3, the reference's is 2 (to it, ours is 0.01 below)"


@pytest.mark.parametrize("token", [4, 8])
def test_parting_elsewhere_is_different(token: int) -> None:
    """Far below the reference's best, or not among its most likely at all."""
    finding = found(THEIRS[0], step(token, **{f"t{token}": -0.7}))
    assert finding.verdict is Verdict.DIFFERENT
    assert finding.equal_tokens == 1


def test_logprobs_count_up_to_where_answers_part() -> None:
    tie = step(3, t3=-0.70, t2=-0.71)
    assert found(step(1, t1=-0.16, t2=-2.5), tie).verdict is Verdict.DIFFERENT
    after = (THEIRS[0], THEIRS[1], step(5, t5=-0.3, t6=-1.7))
    assert found(*after).why == "logprobs differ by 0.1, the tolerance is 0.05"


def test_the_first_step_is_compared_beyond_the_token_chosen() -> None:
    assert found(step(1, t1=-0.1, t2=-2.4), *THEIRS[1:]).verdict is Verdict.DIFFERENT
    missing = found(step(1, t1=-0.1, t7=-2.6), *THEIRS[1:])
    assert missing.first_step_difference == pytest.approx(0.1)


def test_lengths() -> None:
    assert found(*THEIRS, prompt=8).why == "the prompt has 8 tokens, the reference's 9"
    assert found(*THEIRS[:2]).why == "the answer has 2 tokens, the reference's 3"
    assert found(*THEIRS, theirs=THEIRS[:2]).why == "the answer has 3 tokens, the reference's 2"


def test_no_number_is_a_difference() -> None:
    assert found(step(1, t1=math.nan, t2=-2.5), *THEIRS[1:]).verdict is Verdict.DIFFERENT
