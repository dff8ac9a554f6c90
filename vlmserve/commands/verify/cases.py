"""The conversations that both sides answer, their answers, and the comparison of these.

Conversations are text, sample pictures, a clip, and the user's own files.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["text", "image", "video"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_STORY = (
    "In the morning the street was empty. A woman put a blue cup on the table next to the window, opened a book at its "
    "first page and began to read; two hours later the cup was still full, the dog had eaten half of the bread, and it "
    "had started to rain. Retell this in your own words, and say what you think happened to the other half."
)
_SAMPLES = Path(__file__).resolve().parents[1] / "demo" / "samples"
_DESCRIBE = "Describe the picture in detail."


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A conversation in OpenAI's form. Its media are {"type": "image", "image": Path}, or the same with "video"."""

    name: str
    messages: tuple[dict[str, Any], ...]


def made_cases(kinds: Collection[str]) -> list[Case]:
    """Return the cases of these kinds, in a fixed order."""
    wide, tall, still, clip = (
        _SAMPLES / name for name in ("shapes.png", "receipt.png", "two-stars.jpg", "rolling.mp4")
    )
    cases = []
    if "text" in kinds:
        brief = {"role": "system", "content": "Answer in one short sentence."}
        turns = (_user("Name three colours."), {"role": "assistant", "content": "Red, green and blue."})
        cases += [
            Case(name="text", messages=(_user(_STORY),)),
            Case(name="text, several turns", messages=(brief, *turns, _user("Which of them is the sky's?"))),
        ]
    if "image" in kinds:
        turns = (_user(_image(wide), "What is this?"), {"role": "assistant", "content": "Coloured shapes."})
        cases += [
            Case(name="image", messages=(_user(_image(wide), _DESCRIBE),)),
            Case(name="images, several turns", messages=(*turns, _user("And this?", _image(tall)))),
        ]
    if "video" in kinds:
        cases += [
            Case(name="video", messages=(_user(_video(clip), "What happens in the video?"),)),
            Case(name="image and video", messages=(_user("Compare:", _image(still), _video(clip), "What differs?"),)),
        ]
    return cases


def own_case(pictures: Sequence[Path], videos: Sequence[Path], prompt: str | None) -> Case:
    """Return a question about the user's own files, in their order."""
    text = prompt or ("Describe what you see in detail." if pictures or videos else "Hello!")
    return Case(name="own", messages=(_user(*map(_image, pictures), *map(_video, videos), text),))


def media_paths(case: Case, kind: Literal["image", "video"]) -> list[Path]:
    """Return the files of one kind, in prompt order."""
    contents = [message["content"] for message in case.messages]
    return [part[kind] for parts in contents if isinstance(parts, list) for part in parts if part["type"] == kind]


def _user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def _medium(kind: Kind, path: Path) -> dict[str, Any]:
    return {"type": kind, kind: path}


_image, _video = partial(_medium, "image"), partial(_medium, "video")


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
