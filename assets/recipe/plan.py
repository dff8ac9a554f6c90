"""In which order, how long and how fast the network learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

WARMUP = 100
"""Steps in which a stage gets up to its learning rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of the training. chances: how often each kind of lesson comes. steps, batch: how many batches of how many
    lessons.

    rate: learning rate; it goes down to `last` of it over the last `decay` steps. hint_weight: of the hints' loss.
    budget: most tokens in a lesson; 0: no questions, so that the hints alone teach the tower. look_every: one of so
    many batches shows `looks`, twice as many lessons of the kinds there, without questions; 0: none does.
    """

    name: str
    chances: Mapping[str, float]
    steps: int
    batch: int = 24
    rate: float = 2e-3
    decay: int = 0
    last: float = 0.0
    hint_weight: float = 0.5
    budget: int = 256
    look_every: int = 0
    looks: Mapping[str, float] = field(default_factory=dict)

    def rate_at(self, step: int) -> float:
        """The learning rate of the stage's step number `step`, counted from 0."""
        fall = self.last + (1 - self.last) * (self.steps - step) / self.decay if self.decay else 1.0
        return self.rate * min(1.0, (step + 1) / WARMUP, fall)


# Answers do not teach characters, so pages of them come in between.
_MIXED = Stage(
    name="mixed",
    chances={"scene": 0.4, "print": 0.22, "album": 0.1, "clip": 0.22, "strange": 0.04, "talk": 0.02},
    steps=1500,
    decay=900,
    last=0.36,
    hint_weight=0.7,
    budget=288,
    look_every=3,
    looks={"page": 0.8, "clip": 0.2},
)
PLAN = (
    # The tower first, which takes no text and so goes twice as fast. Shapes are told apart only from step 500 on.
    Stage(
        name="look",
        chances={"scene": 0.7, "print": 0.27, "strange": 0.03},
        steps=800,
        batch=48,
        rate=3e-3,
        hint_weight=1.0,
        budget=0,
    ),
    Stage(
        name="shapes",
        chances={"scene": 0.85, "album": 0.06, "print": 0.04, "strange": 0.03, "talk": 0.02},
        steps=2650,
        decay=450,
    ),
    Stage(
        name="albums",
        chances={"scene": 0.6, "album": 0.3, "print": 0.02, "strange": 0.05, "talk": 0.03},
        steps=500,
        rate=1.5e-3,
        decay=250,
    ),
    # What characters look like, and motion: again the tower alone.
    Stage(
        name="pages",
        chances={"page": 0.6, "scene": 0.2, "clip": 0.2},
        steps=900,
        batch=48,
        hint_weight=1.0,
        budget=0,
    ),
    Stage(
        name="all",
        chances={"scene": 0.38, "print": 0.24, "album": 0.1, "clip": 0.22, "strange": 0.04, "talk": 0.02},
        steps=550,
        budget=288,
    ),
    _MIXED,
    replace(
        _MIXED,
        name="polish",
        chances={"scene": 0.42, "print": 0.26, "album": 0.08, "clip": 0.18, "strange": 0.04, "talk": 0.02},
        steps=900,
        rate=8e-4,
        decay=850,
        last=0.0,
    ),
    # The same once more, with more boxes.
    replace(
        _MIXED,
        name="again",
        chances={"scene": 0.44, "print": 0.28, "album": 0.07, "clip": 0.16, "strange": 0.03, "talk": 0.02},
        steps=400,
        rate=8e-4,
        decay=320,
        last=0.24,
    ),
    # More texts, at a higher rate again: this is what reading takes.
    replace(
        _MIXED,
        name="longer",
        chances={"scene": 0.38, "print": 0.33, "album": 0.08, "clip": 0.16, "strange": 0.02, "talk": 0.03},
        steps=2300,
        rate=1.2e-3,
        decay=1200,
        last=0.04,
        looks={"page": 0.85, "clip": 0.15},
    ),
    # What a clip shows at which time, from which "when" follows; more boxes.
    replace(
        _MIXED,
        name="times",
        chances={"scene": 0.34, "print": 0.29, "album": 0.08, "clip": 0.25, "strange": 0.02, "talk": 0.02},
        steps=1500,
        rate=1.2e-3,
        decay=900,
        last=0.04,
        looks={"page": 0.85, "clip": 0.15},
    ),
    # Clips in which nothing happens, and more ways to ask of clips.
    replace(
        _MIXED,
        name="clips",
        chances={"scene": 0.3, "print": 0.24, "album": 0.07, "clip": 0.34, "strange": 0.03, "talk": 0.02},
        steps=300,
        rate=8e-4,
        decay=200,
        last=0.04,
        looks={"page": 0.85, "clip": 0.15},
    ),
)


def stage_at(step: int, plan: tuple[Stage, ...] = PLAN) -> tuple[Stage, int]:
    """The stage of a step of the whole plan, and its first step. The last stage when the plan is done."""
    first = 0
    for stage in plan[:-1]:
        if step < first + stage.steps:
            return stage, first
        first += stage.steps
    return plan[-1], first
