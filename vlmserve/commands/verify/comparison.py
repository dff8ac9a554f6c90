"""The answers of both sides to a case, and their comparison."""

from __future__ import annotations

import enum
from dataclasses import dataclass

TOP = 20
"""The number of likely tokens that are kept of each step, on both sides."""
_FIRST_STEP_TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An output token and its logprob. top: the TOP most likely tokens and their logprobs, best first."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A greedy answer. steps: one for each token, with the one that ends the answer.

    prompt_tokens: with all pad tokens. cached_tokens: of the prompt, taken from the prefix cache.
    """

    prompt_tokens: int
    steps: tuple[Step, ...]
    cached_tokens: int = 0


class Verdict(enum.StrEnum):
    """The outcome of a comparison."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFinding:
    """The comparison of two answers.

    `equal_tokens` come before the first different one; `tokens` are those of the reference's answer.
    `logprob_difference` is the largest over the equal tokens, `first_step_difference` the largest over the most likely
    first tokens. `why` has the differences in words, "" for none.
    """

    case: str
    variant: str
    prompt_tokens: int
    cached_tokens: int
    equal_tokens: int
    tokens: int
    logprob_difference: float
    first_step_difference: float
    verdict: Verdict
    why: str = ""


def compare(
    case: str, variant: str, ours: Answer, theirs: Answer, *, tolerance: float, allow_near_ties: bool
) -> CaseFinding:
    """Compare an answer of ours with the reference's. tolerance: of logprobs.

    allow_near_ties: True if answers may part at two tokens whose logprobs in the reference are within the tolerance, as
    rounding in 16 bits makes them do.
    """
    pairs = list(zip(ours.steps, theirs.steps, strict=False))
    equal = next((i for i, (a, b) in enumerate(pairs) if a.token_id != b.token_id), len(pairs))
    difference = max((_distance(a.logprob, b.logprob) for a, b in pairs[:equal]), default=0.0)
    first = _first_step(*pairs[0]) if pairs else 0.0
    problems = []
    if ours.prompt_tokens != theirs.prompt_tokens:
        problems.append(f"the prompt has {ours.prompt_tokens} tokens, the reference's {theirs.prompt_tokens}")
    if not max(difference, first) <= tolerance:
        problems.append(f"logprobs differ by {max(difference, first):.2g}, the tolerance is {tolerance:g}")
    near_tie = False
    if equal < len(pairs):
        a, b = pairs[equal]
        gap = b.logprob - b.top.get(a.token_id, -float("inf"))
        near_tie = allow_near_ties and gap <= tolerance
        if not near_tie:
            beyond = f"{gap:.2g} below" if a.token_id in b.top else "not among the most likely"
            problems.append(f"token {equal} is {a.token_id}, the reference's is {b.token_id} (to it, ours is {beyond})")
    elif len(ours.steps) != len(theirs.steps):
        problems.append(f"the answer has {len(ours.steps)} tokens, the reference's {len(theirs.steps)}")
    return CaseFinding(
        case=case,
        variant=variant,
        prompt_tokens=ours.prompt_tokens,
        cached_tokens=ours.cached_tokens,
        equal_tokens=equal,
        tokens=len(theirs.steps),
        logprob_difference=difference,
        first_step_difference=first,
        verdict=Verdict.DIFFERENT if problems else Verdict.NEAR_TIE if near_tie else Verdict.EQUAL,
        why="; ".join(problems),
    )


def _first_step(ours: Step, theirs: Step) -> float:
    """Return the largest difference over the reference's most likely tokens; a token missing in ours is below all."""
    lowest = min(ours.top.values())
    likely = list(theirs.top.items())[:_FIRST_STEP_TOP]
    return max(_distance(ours.top.get(token, lowest), logprob) for token, logprob in likely)


def _distance(a: float, b: float) -> float:
    """Return the difference; infinity if either is not a number."""
    difference = abs(a - b)
    return difference if difference == difference else float("inf")
