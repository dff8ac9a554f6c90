"""The first kinds of question: one to three things, one picture, one turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from numpy.random import Generator

from assets.recipe.exam.chance import pick
from assets.recipe.exam.colours import COLOURS
from assets.recipe.exam.figures import SHAPES
from assets.recipe.exam.items import Question
from assets.recipe.exam.judges import AllThings, Number, Place, Word, YesNo
from assets.recipe.exam.scenes import Scene, Thing, make_scene, take_picture
from assets.recipe.exam.wordings import say, with_article

DESCRIBE = (
    "What is in this {picture}?",
    "What do you see?",
    "What can you see in the {picture}?",
    "Describe this {picture}.",
    "Describe the {picture} briefly.",
    "Which objects are in the {picture}, and what colour are they?",
    "List every shape with its colour.",
    "Name the colour and the shape of each object.",
    "What does the {picture} show?",
)
COLOUR = (
    "What colour is the {shape}?",
    "What is the colour of the {shape}?",
    "Which colour does the {shape} have?",
    "What colour is the {shape} in this {picture}?",
    "Can you tell me the colour of the {shape}?",
    "Tell me what colour the {shape} is.",
)
SHAPE = (
    "What shape is the {colour} one?",
    "What shape is the {colour} object?",
    "Which shape is {colour}?",
    "What is the shape of the {colour} thing?",
    "What kind of shape is the {colour} one in the {picture}?",
    "Name the shape that is {colour}.",
)
WHERE = (
    "Where is the {thing}?",
    "Where in the {picture} is the {thing}?",
    "In which part of the {picture} is the {thing}?",
    "Which part of the {picture} is the {thing} in?",
    "Whereabouts is the {thing}?",
    "Tell me where the {thing} is.",
    "What is the position of the {thing} in the {picture}?",
)
COUNT = (
    "How many objects are there?",
    "How many shapes are there?",
    "How many shapes do you see?",
    "How many objects are in this {picture}?",
    "How many things can you see in the {picture}?",
    "Count the shapes.",
    "What is the number of objects in the {picture}?",
)
IS_THERE = (
    "Is there {a_thing}?",
    "Is there {a_thing} in the {picture}?",
    "Do you see {a_thing}?",
    "Does the {picture} have {a_thing}?",
    "Can you see {a_thing} here?",
    "Does this {picture} show {a_thing}?",
)


def describe(rng: Generator) -> Question:
    scene = make_scene(rng)
    judge = AllThings(tuple(thing.name for thing in scene.things))
    return Question("describe", (take_picture(scene),), say(rng, DESCRIBE), judge)


def colour(rng: Generator) -> Question | None:
    scene = make_scene(rng)
    thing = pick(rng, scene.things)
    if len(scene.having(shape=thing.shape)) > 1:
        return None
    text = say(rng, COLOUR, shape=thing.shape)
    return Question("colour", (take_picture(scene),), text, Word("colour", thing.colour))


def shape(rng: Generator) -> Question | None:
    scene = make_scene(rng)
    thing = pick(rng, scene.things)
    if len(scene.having(colour=thing.colour)) > 1:
        return None
    text = say(rng, SHAPE, colour=thing.colour)
    return Question("shape", (take_picture(scene),), text, Word("shape", thing.shape))


def where(rng: Generator) -> Question | None:
    scene = make_scene(rng)
    thing = pick(rng, scene.things)
    names = names_of(thing, scene)
    if not names:
        return None
    text = say(rng, WHERE, thing=pick(rng, names))
    return Question("where", (take_picture(scene),), text, Place.of(thing, scene))


def count(rng: Generator) -> Question:
    scene = make_scene(rng)
    return Question("count", (take_picture(scene),), say(rng, COUNT), Number(len(scene.things)))


def is_there(rng: Generator) -> Question:
    scene = make_scene(rng)
    yes = rng.random() < 0.5
    name = pick(rng, scene.things).name if yes else missing_name(rng, scene.things)
    text = say(rng, IS_THERE, a_thing=with_article(name))
    return Question("yes-no", (take_picture(scene),), text, YesNo(yes))


def names_of(thing: Thing, scene: Scene) -> list[str]:
    """What `thing` may be called so that no other thing of the scene is meant: "red circle", "circle", or nothing."""
    alike = Counter(other.name for other in scene.things)[thing.name]
    names = [thing.name] if alike == 1 else []
    return [*names, thing.shape] if len(scene.having(shape=thing.shape)) == 1 else names


def missing_name(rng: Generator, things: Sequence[Thing]) -> str:
    """A "COLOUR SHAPE" that is not there; mostly one whose colour is, or whose shape, or both, apart."""
    present = {thing.name for thing in things}
    while True:
        colour = pick(rng, things).colour if rng.random() < 0.7 else pick(rng, COLOURS)
        shape = pick(rng, things).shape if rng.random() < 0.7 else pick(rng, SHAPES)
        if f"{colour} {shape}" not in present:
            return f"{colour} {shape}"
