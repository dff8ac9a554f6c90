"""The fourth kinds of question: short clips, in which one thing moves, changes its colour, or stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.random import Generator

from assets.recipe.exam.chance import pick
from assets.recipe.exam.clip_judges import Direction, Instant, LaterColour, Mover, Nothing, Turning
from assets.recipe.exam.clips import WAYS, Change, Happening, Move, Play, film, make_play
from assets.recipe.exam.items import Question
from assets.recipe.exam.judges import Judge, YesNo
from assets.recipe.exam.wordings import say

STILL_SHARE = 1 / 6  # in three of five kinds: a tenth of all clips
LONG = 4.0  # seconds: in a shorter clip, its middle is as good as always right for "when"

DIRECTION = (
    "Which way does the {thing} move?",
    "Which way is the {thing} going?",
    "In which direction does the {thing} move?",
    "In what direction is the {thing} moving in this {video}?",
    "Does the {thing} move left, right, up or down?",
    "Where is the {thing} heading?",
    "Tell me the direction in which the {thing} moves.",
)
MOVER = (
    "What moves?",
    "What is moving?",
    "What moves in the {video}?",
    "What is moving in this {video}?",
    "Which object moves in this {video}?",
    "Which object is moving, and what colour is it?",
    "Name the object that moves, with its colour.",
)
TURNS = (
    "What colour does the {thing} turn?",
    "Which colour does the {thing} turn in the {video}?",
    "What colour does the {thing} become?",
    "What colour does the {thing} change to?",
    "What colour is the {shape} at the end of the {video}?",
    "Into which colour does the {thing} change?",
)
HAPPENS = (
    "What happens in the {video}?",
    "What happens?",
    "What happens in this {video}?",
    "Describe what happens in the {video}.",
    "Tell me what happens here.",
)
WHEN = (
    "When does the {thing} change colour?",
    "When does the {thing} change its colour?",
    "At what time does the {thing} change colour?",
    "After how many seconds does the {thing} change its colour?",
    "At how many seconds does the colour of the {thing} change?",
    "When in the {video} does the {thing} turn {later}?",
)
DOES_MOVE = ("Does the {thing} move?", "Does the {thing} move in this {video}?", "Is the {thing} moving?")
MOVES_SO = ("Does the {thing} move {way}?", "Is the {thing} moving {way} in the {video}?")
DOES_CHANGE = ("Does the {thing} change colour?", "Does the {thing} change its colour in the {video}?")


def direction(rng: Generator) -> Question:
    play = make_play(rng, "move")
    assert isinstance(play.event, Move)
    return _question(rng, "direction", play, DIRECTION, Direction(play.event.way))


def mover(rng: Generator) -> Question:
    play = make_play(rng, "nothing" if rng.random() < STILL_SHARE else "move")
    return _question(rng, "mover", play, MOVER, Mover(play.actor.name) if play.event else Nothing())


def change(rng: Generator) -> Question:
    play = make_play(rng, "nothing" if rng.random() < STILL_SHARE else "change")
    if not isinstance(play.event, Change):
        return _question(rng, "change", play, HAPPENS, Nothing())
    first, later = play.actor.colour, play.event.colour
    if rng.random() < 0.6:
        return _question(rng, "change", play, TURNS, LaterColour(first, later))
    return _question(rng, "change", play, HAPPENS, Turning(play.actor.shape, first, later))


def when(rng: Generator) -> Question:
    play = make_play(rng, "change", shortest=LONG)
    assert isinstance(play.event, Change)
    return _question(rng, "when", play, WHEN, Instant(play.event.seconds), later=play.event.colour)


def clip_yes_no(rng: Generator) -> Question:
    happenings: tuple[Happening, ...] = ("move", "move", "move", "change", "change", "nothing")
    happening = pick(rng, happenings)
    play = make_play(rng, happening)
    yes = happening != "nothing" and rng.random() < 0.6  # half of all
    if isinstance(play.event, Move) and rng.random() < 0.5:
        others = [way for way in WAYS if way != play.event.way]
        way = play.event.way if yes else pick(rng, others)
        return _question(rng, "clip-yes-no", play, MOVES_SO, YesNo(yes), way=way)
    of_moving = rng.random() < 0.5 if happening == "nothing" else (happening == "move") is yes
    return _question(rng, "clip-yes-no", play, DOES_MOVE if of_moving else DOES_CHANGE, YesNo(yes))


def _question(
    rng: Generator, kind: str, play: Play, wordings: Sequence[str], judge: Judge, *, later: str = "", way: str = ""
) -> Question:
    shape = play.actor.shape
    thing, video = pick(rng, (shape, play.actor.name)), pick(rng, ("video", "video", "clip"))
    text = say(rng, wordings, thing=thing, shape=shape, video=video, later=later, way=way)
    return Question(kind, (film(play),), text, judge)
