"""The workloads that servers are compared by, and their questions, which no cache knows from before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from vlmserve.commands.bench.media import Question, jpeg

CountTokens = Callable[[str], int]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A number of requests, `at_a_time` of them under way.

    pictures: the questions show these in turn, one each; 0 for text alone. tokens_in: of the question's text.
    tokens_out: of each answer.
    """

    requests: int
    at_a_time: int
    pictures: int
    tokens_in: int
    tokens_out: int

    def scaled(self, scale: float) -> Workload:
        """Return the workload with `scale` times the requests and pictures, at least one."""
        requests, pictures = (max(1, round(many * scale)) if many else 0 for many in (self.requests, self.pictures))
        return replace(self, requests=requests, pictures=pictures)

    def __str__(self) -> str:
        seen = {0: "no picture", self.requests: "a new picture each"}.get(self.pictures, f"{self.pictures} pictures")
        return (
            f"{self.requests} requests, {self.at_a_time} at a time, {seen}, "
            f"{self.tokens_in} text tokens in, {self.tokens_out} out"
        )


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "latency": Workload(requests=8, at_a_time=1, pictures=8, tokens_in=64, tokens_out=64),
        "throughput": Workload(requests=32, at_a_time=16, pictures=32, tokens_in=64, tokens_out=64),
        "repeat": Workload(requests=16, at_a_time=4, pictures=4, tokens_in=64, tokens_out=32),
        "text": Workload(requests=16, at_a_time=8, pictures=0, tokens_in=32, tokens_out=128),
    }
)


def make_workload(work: Workload, *, side: int, salt: str, count: CountTokens | None) -> list[Question]:
    """Return the questions of a workload. Another salt gives other pixels and other words.

    side: of the square pictures, in pixels. count: counts the tokens of a text; None makes texts of about that length.
    """
    dice = random.Random(salt)
    seed = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:4])
    pictures = [jpeg(side, side, seed + number) for number in range(work.pictures)]
    return [
        Question(
            pictures=(pictures[number % len(pictures)],) if pictures else (), text=_text(dice, work.tokens_in, count)
        )
        for number in range(work.requests)
    ]


def _text(dice: random.Random, tokens: int, count: CountTokens | None) -> str:
    """Return words of no language with that many tokens."""
    if count is None:
        return " ".join(_word(dice) for _ in range(max(1, tokens // 2)))  # a word takes about two
    text = ""
    while True:
        longer = f"{text} {_word(dice)}".strip()
        length = count(longer)
        if length == tokens:
            return longer
        if length < tokens:
            text = longer


def _word(dice: random.Random) -> str:
    return "".join(dice.choices(_LETTERS, k=dice.choice((2, 3, 4))))
