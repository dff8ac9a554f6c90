"""The further kinds of question: up to six things, how they lie to each other, several pictures, a second turn."""

from __future__ import annotations

from numpy.random import Generator

from assets.recipe.exam import v1
from assets.recipe.exam.chance import pick
from assets.recipe.exam.items import Question
from assets.recipe.exam.judges import AllThings, Judge, Number, OtherThing, Place, WhichPicture, Word, YesNo
from assets.recipe.exam.scenes import Scene, Thing, make_scene, take_picture
from assets.recipe.exam.wordings import say, sentence, with_article

MOST_THINGS = 6
CLEARLY_APART = 0.08  # of the picture's side on that axis

COUNT_SOME = (
    "How many {things} are there?",
    "How many {things} are in the {picture}?",
    "How many {things} do you see?",
    "Count the {things}.",
    "What is the number of {things} in this {picture}?",
)
RELATION = (
    "Is the {one} {side} the {other}?",
    "In this {picture}, is the {one} {side} the {other}?",
    "Does the {one} lie {side} the {other}?",
    "Would you say the {one} is {side} the {other}?",
)
BESIDE = (
    "What is {side} the {other}?",
    "Which object is {side} the {other}?",
    "What do you see {side} the {other}?",
    "What lies {side} the {other} in the {picture}?",
)
ALBUM = (
    "Which {picture} has {a_thing}?",
    "Which {picture} shows {a_thing}?",
    "Which of these pictures has {a_thing} in it?",
    "In which {picture} is there {a_thing}?",
    "In which of the pictures do you see {a_thing}?",
)
AND_WHERE = ("And where is it?", "Where is it?", "And where in the {picture} is it?", "Where is that one?")
AND_THAT = ("And the {thing}?", "And where is the {thing}?", "What about the {thing}?")
AND_WHICH = ("What are they?", "Which ones? Name each with its colour.", "What are they, and what colour are they?")
AND_ONE = ("What is it?", "Which shape, and what colour is it?", "And what is it?")

# Axis (0 across, 1 down), whether the first thing has the smaller coordinate, and the words for it.
_SIDES = (
    (0, True, ("left of", "to the left of")),
    (0, False, ("right of", "to the right of")),
    (1, True, ("above",)),
    (1, False, ("below", "under")),
)


def count_many(rng: Generator) -> Question:
    scene = make_scene(rng, 1, MOST_THINGS)
    thing, what = pick(rng, scene.things), rng.random()
    if what < 0.5:
        text, number = say(rng, v1.COUNT), len(scene.things)
    elif what < 0.75:
        text, number = say(rng, COUNT_SOME, things=f"{thing.shape}s"), len(scene.having(shape=thing.shape))
    else:
        noun = pick(rng, ("objects", "shapes", "things"))
        text = say(rng, COUNT_SOME, things=f"{thing.colour} {noun}")
        number = len(scene.having(colour=thing.colour))
    return Question("count-many", (take_picture(scene),), text, Number(number))


def relation(rng: Generator) -> Question | None:
    scene = make_scene(rng, 2, MOST_THINGS)
    one, other = _two(rng, scene)
    axis, smaller, words = pick(rng, _SIDES)
    names, other_names = v1.names_of(one, scene), v1.names_of(other, scene)
    if not (names and other_names and _clearly_apart(one, other, scene, axis)):
        return None
    text = say(rng, RELATION, one=pick(rng, names), other=pick(rng, other_names), side=pick(rng, words))
    return Question("relation", (take_picture(scene),), text, YesNo((one.centre[axis] < other.centre[axis]) is smaller))


def beside(rng: Generator) -> Question | None:
    scene = make_scene(rng, 2, 2)
    one, other = _two(rng, scene)
    axis, smaller, words = pick(rng, _SIDES)
    true = (one.centre[axis] < other.centre[axis]) is smaller
    if one.name == other.name or not (true and _clearly_apart(one, other, scene, axis)):
        return None
    text = say(rng, BESIDE, other=pick(rng, v1.names_of(other, scene)), side=pick(rng, words))
    return Question("beside", (take_picture(scene),), text, OtherThing(one.name, other.name))


def album(rng: Generator) -> Question | None:
    scenes = [make_scene(rng) for _ in range(int(rng.integers(2, 4)))]
    rank = int(rng.integers(len(scenes)))
    name = pick(rng, scenes[rank].things).name
    if any(thing.name == name for scene in scenes if scene is not scenes[rank] for thing in scene.things):
        return None
    text = say(rng, ALBUM, a_thing=with_article(name))
    pictures = tuple(take_picture(scene) for scene in scenes)
    return Question("album", pictures, text, WhichPicture(rank + 1, len(scenes)), about=rank)


def follow_up(rng: Generator) -> Question | None:
    scene = make_scene(rng)
    thing = pick(rng, scene.things)
    others = [other for other in scene.things if other is not thing and v1.names_of(other, scene)]
    names = v1.names_of(thing, scene)
    place: Judge = Place.of(thing, scene)
    first: Judge
    match int(rng.integers(5)):
        case 0 if len(scene.having(colour=thing.colour)) == 1:
            asked, first = say(rng, v1.SHAPE, colour=thing.colour), Word("shape", thing.shape)
            then, judge = say(rng, AND_WHERE, please=False), place
        case 1 if len(scene.having(shape=thing.shape)) == 1:
            asked, first = say(rng, v1.COLOUR, shape=thing.shape), Word("colour", thing.colour)
            then, judge = say(rng, AND_WHERE, please=False), place
        case 2 if thing.name in names:
            asked, first = say(rng, v1.IS_THERE, a_thing=with_article(thing.name)), YesNo(True)
            then, judge = say(rng, AND_WHERE, please=False), place
        case 3 if names and others:
            other = pick(rng, others)
            asked, first = say(rng, v1.WHERE, thing=pick(rng, names)), place
            then = say(rng, AND_THAT, please=False, thing=pick(rng, v1.names_of(other, scene)))
            judge = Place.of(other, scene)
        case 4:
            asked, first = say(rng, v1.COUNT), Number(len(scene.things))
            then = say(rng, AND_WHICH if len(scene.things) > 1 else AND_ONE, please=False)
            judge = AllThings(tuple(each.name for each in scene.things))
        case _:
            return None
    earlier = ((asked, sentence(first.right)),)
    return Question("follow-up", (take_picture(scene),), then, judge, earlier)


def _two(rng: Generator, scene: Scene) -> tuple[Thing, Thing]:
    one, other = rng.permutation(len(scene.things))[:2]
    return scene.things[one], scene.things[other]


def _clearly_apart(one: Thing, other: Thing, scene: Scene, axis: int) -> bool:
    side = (scene.width, scene.height)[axis]
    return abs(one.centre[axis] - other.centre[axis]) > CLEARLY_APART * side
