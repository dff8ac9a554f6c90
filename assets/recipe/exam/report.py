"""Sitting the exam, with whatever answers: a served model, or one in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from assets.recipe.exam.items import Message, Question
from assets.recipe.exam.judges import Measuring

Ask: TypeAlias = Callable[[list[Message]], str]

_BUCKETS = ("64-127", "128-255", "256-511", "512-1024")  # of the short side, in pixels


@dataclass(frozen=True)
class Outcome:
    """A question and the answer it got."""

    question: Question
    answer: str

    @property
    def is_right(self) -> bool:
        return self.question.judge.accepts(self.answer)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a report; without the files' bytes."""
        scene = self.question.scene
        return {
            "kind": self.question.kind,
            "earlier": [list(turn) for turn in self.question.earlier],
            "question": self.question.text,
            "right": self.question.judge.right,
            "got": self.answer,
            "size": [scene.width, scene.height],
            "format": scene.file_format,
            "things": list(scene.contents),
        }


@dataclass(frozen=True)
class Tally:
    """How many questions of some sort were asked and how many answers were right."""

    asked: int
    right: int

    @property
    def accuracy(self) -> float:
        return self.right / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class Mean:
    """The mean measure of the judges of one kind, over the `count` answers that could be measured."""

    measure: str
    value: float
    count: int


@dataclass(frozen=True)
class Report:
    """The result of an exam; `seconds` adds up the times of all answers."""

    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def overall(self) -> Tally:
        return _tally(self.outcomes)

    @property
    def wrong(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if not outcome.is_right)

    @property
    def answers_per_second(self) -> float:
        return len(self.outcomes) / self.seconds

    def tables(self) -> dict[str, dict[str, Tally]]:
        """Tallies by kind of question, by the printed text's face if any, by the file's short side and its format."""
        printed = [outcome for outcome in self.outcomes if outcome.question.scene.text]
        return {
            "kind": _by(self.outcomes, lambda outcome: outcome.question.kind),
            **({"face": _by(printed, _face)} if printed else {}),
            "short side": _by(self.outcomes, lambda outcome: _bucket(outcome.question.scene.short_side)),
            "format": _by(self.outcomes, lambda outcome: outcome.question.scene.file_format),
        }

    def means(self) -> dict[str, Mean]:
        """What judges measure, by kind of question: how far boxes overlap, how far off times are."""
        found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for outcome in self.outcomes:
            judge = outcome.question.judge
            if isinstance(judge, Measuring) and (value := judge.measured(outcome.answer)) is not None:
                found[outcome.question.kind, judge.measure].append(value)
        return {kind: Mean(name, sum(each) / len(each), len(each)) for (kind, name), each in sorted(found.items())}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with every wrong answer."""
        return {
            "accuracy": self.overall.accuracy,
            "asked": self.overall.asked,
            "right": self.overall.right,
            "answers_per_second": self.answers_per_second,
            "tables": {
                title: {row: {"asked": tally.asked, "right": tally.right} for row, tally in table.items()}
                for title, table in self.tables().items()
            },
            "means": {kind: asdict(mean) for kind, mean in self.means().items()},
            "wrong": [outcome.as_dict() for outcome in self.wrong],
        }

    def __str__(self) -> str:
        lines = []
        for title, table in self.tables().items():
            lines += [f"{title:<16}{'asked':>7}{'right':>7}{'accuracy':>10}"]
            lines += [_line(f"  {row}", tally) for row, tally in table.items()] + [""]
        for kind, mean in self.means().items():
            lines += [f"{kind}: mean {mean.measure} {mean.value:.3f} ({mean.count} answers)"]
        return "\n".join([*lines, _line("overall", self.overall), f"{self.answers_per_second:.1f} answers/s"])


def examine(questions: Iterable[Question], ask: Ask, concurrency: int = 1) -> Report:
    """Ask every question, `concurrency` at a time, and judge the answers.

    An error that `ask` raises ends the exam: a share of right answers among those that came would say little.
    """
    drawn = list(questions)  # drawing them is no part of the time taken
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda question: ask(question.messages()), drawn))
    seconds = time.perf_counter() - start
    return Report(tuple(Outcome(question, answer) for question, answer in zip(drawn, answers, strict=True)), seconds)


def _bucket(short_side: int) -> str:
    return next(bucket for bucket in _BUCKETS if short_side <= int(bucket.split("-")[1]))


def _face(outcome: Outcome) -> str:
    text = outcome.question.scene.text
    return text.face if text else ""


def _by(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> dict[str, Tally]:
    groups: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)
    order: Mapping[str, int] = MappingProxyType({bucket: place for place, bucket in enumerate(_BUCKETS)})
    return {name: _tally(groups[name]) for name in sorted(groups, key=lambda name: (order.get(name, 0), name))}


def _tally(outcomes: Iterable[Outcome]) -> Tally:
    verdicts = [outcome.is_right for outcome in outcomes]
    return Tally(len(verdicts), sum(verdicts))


def _line(name: str, tally: Tally) -> str:
    return f"{name:<16}{tally.asked:>7}{tally.right:>7}{tally.accuracy:>10.1%}"
