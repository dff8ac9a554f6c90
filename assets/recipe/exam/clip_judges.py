"""Judges of the motions and changes in a clip."""

from __future__ import annotations

from dataclasses import dataclass

from assets.recipe.exam import clip_reading
from assets.recipe.exam.clips import Way

SECONDS_OFF = 1.0


@dataclass(frozen=True)
class Direction:
    """One way, and no other."""

    right: Way

    def accepts(self, answer: str) -> bool:
        return clip_reading.ways_in(answer) == {self.right}


@dataclass(frozen=True)
class Mover:
    """The one thing that moves, by colour and shape. Things that the answer says stay do not count."""

    name: str

    @property
    def right(self) -> str:
        return f"the {self.name}"

    def accepts(self, answer: str) -> bool:
        return clip_reading.movers_in(answer) == {self.name}


@dataclass(frozen=True)
class Nothing:
    """The answer that nothing moves or changes."""

    @property
    def right(self) -> str:
        return "nothing moves"

    def accepts(self, answer: str) -> bool:
        return clip_reading.denies_events(answer)


@dataclass(frozen=True)
class LaterColour:
    """The colour that something turns, behind the first one or alone."""

    first: str
    right: str

    def accepts(self, answer: str) -> bool:
        return clip_reading.colours_in_turn(answer) in ([self.right], [self.first, self.right])


@dataclass(frozen=True)
class Turning:
    """The answer that the thing of this shape turns from one colour to another. The first colour may go unsaid."""

    shape: str
    first: str
    later: str

    @property
    def right(self) -> str:
        return f"the {self.first} {self.shape} turns {self.later}"

    def accepts(self, answer: str) -> bool:
        right_colours = LaterColour(self.first, self.later).accepts(answer)
        return right_colours and clip_reading.changers_in(answer) == {self.shape}


@dataclass(frozen=True)
class Instant:
    """A time in seconds from the start, give or take one; of a span, both ends."""

    seconds: float

    measure = "seconds off"

    @property
    def right(self) -> str:
        return f"at about {self.seconds:.1f} seconds"

    def accepts(self, answer: str) -> bool:
        times = clip_reading.seconds_in(answer)
        return bool(times) and all(abs(time - self.seconds) <= SECONDS_OFF for time in times)

    def measured(self, answer: str) -> float | None:
        """How far off the time is (a span: its middle), in seconds; None where the answer gives none."""
        times = clip_reading.seconds_in(answer)
        return abs(sum(times) / len(times) - self.seconds) if times else None
