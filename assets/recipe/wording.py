"""Questions about scenes in many words, and their short answers.

A dialogue is a list of turns (question, answer) about the same pictures. Every asker returns None where its question
has no clear answer for the scene at hand.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence

from assets.recipe.clips import MOVES, Clip
from assets.recipe.paint import print_box
from assets.recipe.world import COLOURS, SHAPES, Rng, Scene, Thing

Turn = tuple[str, str]
Dialogue = list[Turn]
Asker = Callable[[Scene, Rng], Dialogue | None]

NUMBERS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")
ORDINALS = ("first", "second", "third", "fourth")
_COLOUR = ("colour", "color")
_THINGS = ("objects", "shapes", "things", "items", "figures")
_PICTURE = ("picture", "image", "photo", "scene")


def pick(rng: Rng, choices: Sequence[str]) -> str:
    """One of `choices`."""
    return choices[int(rng.integers(len(choices)))]


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


_BEFORE = (
    "Please tell me: ",
    "Tell me, ",
    "Can you tell me: ",
    "Look at the picture. ",
    "Look closely: ",
    "In this picture, ",
    "In this image, ",
    "In the photo, ",
    "Question: ",
    "Hi! ",
    "I would like to know: ",
    "Quick question: ",
)
_AFTER_QUESTION = (
    " in the picture",
    " in this image",
    " in the photo",
    " here",
    ", please",
    " in this picture, please",
)
_AFTER = (" Answer briefly.", " Be brief.", " Answer in one word.", " Short answer.", " Thanks!", " Just the answer.")


def _polite(question: str, rng: Rng) -> str:
    """The same question as different people type it."""
    if rng.random() < 0.14 and question[-1] in "?." and " in the " not in question:
        question = question[:-1] + pick(rng, _AFTER_QUESTION) + question[-1]
    if rng.random() < 0.22:
        before = pick(rng, _BEFORE)
        question = before + (question if before[-2] in ".!" else question[0].lower() + question[1:])
    elif rng.random() < 0.06 and not question.endswith("?"):
        question = "Please " + question[0].lower() + question[1:]
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.10:
        question = question.rstrip("?.")
    elif rng.random() < 0.05:
        question += pick(rng, _AFTER)
    return question


def _ask(rng: Rng, questions: Sequence[str], answer: str) -> Turn:
    return _polite(pick(rng, questions), rng), answer


def listed(scene: Scene) -> str:
    """List the scene, such as "A red circle, a blue square and a green star.", from left to right; printed text comes
    last."""
    names = [_with_article(t.name) for t in sorted(scene.things, key=lambda t: t.centre[0])]
    names += [f'the text "{p.text}"' for p in scene.prints]
    if not names:
        return "There is nothing, only a plain background."
    text = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return text[0].upper() + text[1:] + "."


def third(value: float, whole: float) -> int:
    """0, 1 or 2: the third of `whole` that holds `value`."""
    return min(2, max(0, int(3 * value / whole)))


def place(thing: Thing, scene: Scene) -> str:
    """Such as "Top left.", "Middle right." and, for the very middle, "Middle."."""
    x, y = thing.centre
    row = ("top", "middle", "bottom")[third(y, scene.height)]
    column = ("left", "middle", "right")[third(x, scene.width)]
    return "Middle." if row == column else f"{row.capitalize()} {column}."


def _reference(thing: Thing, scene: Scene, rng: Rng) -> str | None:
    """Words that mean this object and no other of the scene."""
    names = Counter(t.name for t in scene.things)
    shapes = Counter(t.shape for t in scene.things)
    colours = Counter(t.colour for t in scene.things)
    ways = []
    if names[thing.name] == 1:
        ways += [f"the {thing.name}"] * 3
    if shapes[thing.shape] == 1:
        ways += [f"the {thing.shape}"]
    if colours[thing.colour] == 1:
        ways += [pick(rng, (f"the {thing.colour} one", f"the {thing.colour} object", f"the {thing.colour} shape"))]
    return pick(rng, ways) if ways else None


def _two(scene: Scene, rng: Rng) -> tuple[Thing, Thing, str | None, str | None]:
    """Two objects of a scene that has as many, and the words that mean each."""
    i, j = rng.choice(len(scene.things), 2, replace=False)
    one, other = scene.things[int(i)], scene.things[int(j)]
    return one, other, _reference(one, scene, rng), _reference(other, scene, rng)


def _any_thing(scene: Scene, rng: Rng) -> Thing | None:
    return scene.things[int(rng.integers(len(scene.things)))] if scene.things else None


DESCRIBE = (
    "Describe the picture.",
    "Describe this image.",
    "Describe the image briefly.",
    "What is in the picture?",
    "What do you see?",
    "What can you see in this image?",
    "What does the picture show?",
    "What is shown here?",
    "What's in this image?",
    "Write a caption.",
    "Caption this picture.",
    "Give a short description of the picture.",
    "Name all the objects.",
    "List everything you see.",
    "Which objects are there?",
    "Which shapes are there?",
    "What is this?",
    "Tell me what is in this picture.",
    "What objects do you see?",
    "What objects are there, and what are their colours?",
    "List each object and its color.",
    "Name every shape and its colour.",
    "Say what you see, with colours.",
    "Describe all the shapes.",
    "Which shapes do you see, and in which colours?",
)


def describe(scene: Scene, rng: Rng) -> Dialogue | None:
    """All objects, named from left to right."""
    return [_ask(rng, DESCRIBE, listed(scene))]


def colour(scene: Scene, rng: Rng) -> Dialogue | None:
    """The colour of the only object of its shape."""
    shapes = Counter(t.shape for t in scene.things)
    single = [t for t in scene.things if shapes[t.shape] == 1]
    if not single:
        return None
    thing = single[int(rng.integers(len(single)))]
    word, s = pick(rng, _COLOUR), thing.shape
    questions = (
        f"What {word} is the {s}?",
        f"What {word} is the {s}?",
        f"What is the {word} of the {s}?",
        f"Which {word} does the {s} have?",
        f"Which {word} is the {s}?",
        f"Tell me the {word} of the {s}.",
        f"Name the {word} of the {s}.",
        f"The {s} is what {word}?",
        f"What {word} is the {s} in this picture?",
    )
    return [_ask(rng, questions, f"{thing.colour.capitalize()}.")]


def shape(scene: Scene, rng: Rng) -> Dialogue | None:
    """The shape of the only object of its colour."""
    colours = Counter(t.colour for t in scene.things)
    single = [t for t in scene.things if colours[t.colour] == 1]
    if not single:
        return None
    thing = single[int(rng.integers(len(single)))]
    c = thing.colour
    questions = (
        f"What shape is the {c} one?",
        f"What shape is the {c} one?",
        f"What shape is the {c} object?",
        f"What is the shape of the {c} object?",
        f"What is the {c} object?",
        f"What is the {c} thing?",
        f"Which shape is {c}?",
        f"Which object is {c}?",
        f"Name the shape of the {c} one.",
        f"What shape does the {c} thing have?",
        f"The {c} one is what shape?",
        f"Tell me the shape of the {c} object.",
    )
    return [_ask(rng, questions, _with_article(thing.shape).capitalize() + ".")]


def where(scene: Scene, rng: Rng) -> Dialogue | None:
    """Ask which of the nine parts of the picture has an object's centre."""
    thing = _any_thing(scene, rng)
    name = _reference(thing, scene, rng) if thing else None
    if thing is None or name is None:
        return None
    return [_ask(rng, _where_questions(name), place(thing, scene))]


def _where_questions(name: str) -> tuple[str, ...]:
    return (
        f"Where is {name}?",
        f"Where is {name}?",
        f"Where is {name}?",
        f"Where in the picture is {name}?",
        f"Where in the image is {name}?",
        f"Where is {name} located?",
        f"Where can I find {name}?",
        f"Where do you see {name}?",
        f"In which part of the picture is {name}?",
        f"In what part of the image is {name}?",
        f"What is the position of {name}?",
        f"What is the location of {name}?",
        f"Tell me where {name} is.",
        f"Which part of the picture holds {name}?",
        f"Which part of the picture is {name} in?",
        f"Where exactly is {name}?",
        f"Whereabouts in the picture is {name}?",
        f"Say where {name} is.",
    )


def count(scene: Scene, rng: Rng) -> Dialogue | None:
    """How many objects, all or of one kind."""
    roll = rng.random()
    if roll < 0.6 or not scene.things:
        what, total = pick(rng, _THINGS), len(scene.things)
    elif roll < 0.8:
        s = pick(rng, SHAPES) if rng.random() < 0.2 else _any_thing(scene, rng).shape  # type: ignore[union-attr]
        what, total = f"{s}s", sum(t.shape == s for t in scene.things)
    else:
        c = pick(rng, COLOURS) if rng.random() < 0.2 else _any_thing(scene, rng).colour  # type: ignore[union-attr]
        what, total = f"{c} {pick(rng, _THINGS)}", sum(t.colour == c for t in scene.things)
    picture = pick(rng, _PICTURE)
    questions = (
        f"How many {what} are there?",
        f"How many {what} are there?",
        f"How many {what} are in the {picture}?",
        f"How many {what} do you see?",
        f"How many {what} can you see?",
        f"How many {what} are shown?",
        f"How many {what} does the {picture} have?",
        f"What is the number of {what}?",
        f"Count the {what}.",
        f"Tell me how many {what} there are.",
    )
    return [_ask(rng, questions, f"{NUMBERS[total]}.")]


def exists(scene: Scene, rng: Rng) -> Dialogue | None:
    """Ask for yes or no, half each. A thing that is missing is near to a thing that is there."""
    if rng.random() < 0.5 and scene.things:
        thing = _any_thing(scene, rng)
        assert thing is not None
        kind = rng.random()
        name = (
            thing.name
            if kind < 0.7
            else thing.shape
            if kind < 0.85
            else f"{thing.colour} {pick(rng, ('object', 'thing', 'shape'))}"
        )
        answer = "Yes."
    else:
        names = {t.name for t in scene.things}
        for _ in range(20):
            near = _any_thing(scene, rng)
            roll = rng.random()
            c = near.colour if near and roll < 0.45 else pick(rng, COLOURS)
            s = near.shape if near and 0.45 <= roll < 0.8 else pick(rng, SHAPES)
            if f"{c} {s}" not in names:
                break
        else:
            return None
        name, answer = f"{c} {s}", "No."
        kind = rng.random()
        if kind < 0.12 and not any(t.shape == s for t in scene.things):
            name = s
        elif kind < 0.24 and not any(t.colour == c for t in scene.things):
            name = f"{c} {pick(rng, ('object', 'thing', 'shape'))}"
    a, picture = _with_article(name), pick(rng, _PICTURE)
    questions = (
        f"Is there {a}?",
        f"Is there {a}?",
        f"Is there {a} in the {picture}?",
        f"Is {a} in the {picture}?",
        f"Do you see {a}?",
        f"Can you see {a}?",
        f"Does the {picture} show {a}?",
        f"Does the {picture} contain {a}?",
        f"Is {a} shown?",
        f"Does the {picture} have {a}?",
        f"Is there {a} anywhere?",
        f"Have we got {a}?",
        f"Is there {a} here? Yes or no?",
    )
    return [_ask(rng, questions, answer)]


def absent(scene: Scene, rng: Rng) -> Dialogue | None:
    """Ask about a missing thing; the answer says that it is missing."""
    shapes = [s for s in SHAPES if not any(t.shape == s for t in scene.things)]
    colours = [c for c in COLOURS if not any(t.colour == c for t in scene.things)]
    roll = rng.random()
    if roll < 0.4 and shapes:
        s, word = pick(rng, shapes), pick(rng, _COLOUR)
        return [_ask(rng, (f"What {word} is the {s}?", f"What is the {word} of the {s}?"), f"There is no {s}.")]
    if roll < 0.6 and colours:
        c = pick(rng, colours)
        return [_ask(rng, (f"What shape is the {c} one?", f"What is the {c} object?"), f"Nothing is {c}.")]
    if shapes:
        name = f"{pick(rng, COLOURS)} {pick(rng, shapes)}"
        return [_ask(rng, _where_questions(f"the {name}"), f"There is no {name}.")]
    return None


def relation(scene: Scene, rng: Rng) -> Dialogue | None:
    """Left of, right of, above, below."""
    if len(scene.things) < 2:
        return None
    one, other, a, b = _two(scene, rng)
    if a is None or b is None:
        return None
    axis = int(rng.integers(2))
    gap = _gap(one, other, scene, axis)
    if abs(gap) < 0.05:
        return None
    words = (
        (("left of", "to the left of"), ("right of", "to the right of")),
        (("above", "higher than"), ("below", "under")),
    )[axis]
    roll = rng.random()
    if roll < 0.55:
        side = int(rng.integers(2))
        right = (gap < 0) == (side == 0)
        word = pick(rng, words[side])
        questions = (
            f"Is {a} {word} {b}?",
            f"Is {a} {word} {b}?",
            f"Is it true that {a} is {word} {b}?",
            f"Does {a} lie {word} {b}?",
            f"Would you say {a} is {word} {b}?",
        )
        return [_ask(rng, questions, "Yes." if right else "No.")]
    side = 0 if gap < 0 else 1
    if roll < 0.75 and len(scene.things) == 2:
        word = pick(rng, words[side])
        questions = (
            f"What is {word} {b}?",
            f"Which object is {word} {b}?",
            f"What do you see {word} {b}?",
            f"Which thing is {word} {b}?",
            f"What lies {word} {b}?",
        )
        return [_ask(rng, questions, _with_article(one.name).capitalize() + ".")]
    extreme = (("further left", "further right"), ("higher", "lower"))[axis][side]
    first, second = (a, b) if rng.random() < 0.5 else (b, a)
    return [
        _ask(
            rng,
            (f"Which is {extreme}, {first} or {second}?", f"What is {extreme}: {first} or {second}?"),
            f"{a.capitalize()}.",
        )
    ]


def side(scene: Scene, rng: Rng) -> Dialogue | None:
    """On which side of another object one is: a comparison and nothing else, so it is learnt before `relation`."""
    if len(scene.things) < 2:
        return None
    one, other, a, b = _two(scene, rng)
    axis = int(rng.integers(2))
    gap = _gap(one, other, scene, axis)
    if a is None or b is None or abs(gap) < 0.05:
        return None
    if axis == 0:
        questions: tuple[str, ...] = (
            f"Is {a} left or right of {b}?",
            f"Is {a} to the left or to the right of {b}?",
            f"Left or right of {b}: where is {a}?",
        )
    else:
        questions = (
            f"Is {a} above or below {b}?",
            f"Is {a} above {b} or below it?",
            f"Above or below {b}: where is {a}?",
        )
    return [_ask(rng, questions, (("Left.", "Right."), ("Above.", "Below."))[axis][gap > 0])]


def in_order(scene: Scene, rng: Rng) -> Dialogue | None:
    """The objects from left to right, or from top to bottom."""
    if not 2 <= len(scene.things) <= 4:
        return None
    axis, back = int(rng.integers(2)), rng.random() < 0.25
    row = sorted(scene.things, key=lambda t: t.centre[axis], reverse=back)
    if any(abs(_gap(a, b, scene, axis)) < 0.05 for a, b in itertools.pairwise(row)):
        return None
    ways = (("from left to right", "from right to left"), ("from top to bottom", "from bottom to top"))
    way = ways[axis][back]
    questions = (
        f"Name the objects {way}.",
        f"List the shapes {way}.",
        f"Which objects are there, {way}?",
        f"What do you see, {way}?",
    )
    return [_ask(rng, questions, ", ".join(t.name for t in row).capitalize() + ".")]


def _gap(one: Thing, other: Thing, scene: Scene, axis: int) -> float:
    """How far right of the other (axis 0) or below it (axis 1) one's centre is, as a share of the picture's side."""
    return (one.centre[axis] - other.centre[axis]) / (scene.width, scene.height)[axis]


def largest(scene: Scene, rng: Rng) -> Dialogue | None:
    """The largest or the smallest object, where that is clear."""
    if len(scene.things) < 2:
        return None
    by_size = sorted(scene.things, key=lambda t: max(t.box[2] - t.box[0], t.box[3] - t.box[1]))
    sides = [max(t.box[2] - t.box[0], t.box[3] - t.box[1]) for t in by_size]
    if rng.random() < 0.5:
        if sides[-1] < 1.25 * sides[-2]:
            return None
        word, thing = pick(rng, ("largest", "biggest")), by_size[-1]
    else:
        if sides[1] < 1.25 * sides[0]:
            return None
        word, thing = "smallest", by_size[0]
    questions = (
        f"Which is the {word} object?",
        f"What is the {word} shape?",
        f"Which object is the {word}?",
        f"Name the {word} thing.",
    )
    return [_ask(rng, questions, f"The {thing.name}.")]


def boxes(scene: Scene, rng: Rng) -> Dialogue | None:
    """Bounding boxes in Qwen3-VL's JSON, 0..1000 of the picture's width and height."""
    if not scene.things:
        return None
    if rng.random() < 0.75:
        thing = _any_thing(scene, rng)
        assert thing is not None
        same = [t for t in scene.things if t.name == thing.name]
        name, things = thing.name, same
    else:
        name, things = "", list(scene.things)
    if len(things) > 3:
        return None
    wanted = f"the {name}" if name else pick(rng, ("all objects", "every object", "all shapes"))
    questions = (
        f"Give the bounding box of {wanted} in JSON.",
        f"Locate {wanted}, output its bbox coordinates using JSON format.",
        f"Locate {wanted} and output the coordinates in JSON format.",
        f"Detect {wanted}. Answer in JSON.",
        f"Find {wanted} and report bbox_2d in JSON.",
        f"Where is {wanted}? Output a bounding box in JSON.",
        f"Draw a box around {wanted}. JSON.",
        f"Where is {wanted}? Answer with bbox_2d.",
        f"What is the bbox_2d of {wanted}?",
        f"Which box holds {wanted}? JSON, please.",
    )
    found = [{"bbox_2d": thousandths(t.box, scene), "label": t.name} for t in sorted(things, key=lambda t: t.centre[0])]
    return [(pick(rng, questions), json.dumps(found))]


def thousandths(box: tuple[float, float, float, float], scene: Scene) -> list[int]:
    """A box of pixels in thousandths of the picture's sides."""
    sides = (scene.width, scene.height, scene.width, scene.height)
    return [min(1000, max(0, round(1000 * v / side))) for v, side in zip(box, sides, strict=True)]


def follow_up(scene: Scene, rng: Rng) -> Dialogue | None:
    """Take two or three turns; later turns lean on earlier ones."""
    thing = _any_thing(scene, rng)
    if thing is None:
        return None
    it = pick(rng, ("it", "it", "that one"))
    word = pick(rng, _COLOUR)
    later: list[Turn] = [
        (pick(rng, (f"Where is {it}?", f"And where is {it}?")), place(thing, scene)),
        (pick(rng, (f"What {word} is {it}?", f"And its {word}?")), f"{thing.colour.capitalize()}."),
        (pick(rng, (f"What shape is {it}?", "And its shape?")), _with_article(thing.shape).capitalize() + "."),
        (
            pick(rng, ("How many objects are there in all?", "How many are there in total?")),
            f"{NUMBERS[len(scene.things)]}.",
        ),
    ]
    starts = [d for d in (shape(scene, rng), colour(scene, rng), where(scene, rng), exists(scene, rng)) if d]
    if rng.random() < 0.4:
        others = [a for a in (shape, colour, where, exists, count, relation) if rng.random() < 0.6]
        turns = [d[0] for a in others for d in [a(scene, rng)] if d]
        return turns[:4] if len(turns) > 1 else None
    if rng.random() < 0.35:  # "And the blue one?"
        shapes = Counter(t.shape for t in scene.things)
        single = [t for t in scene.things if shapes[t.shape] == 1]
        if len(single) < 2:
            return None
        i, j = (int(k) for k in rng.choice(len(single), 2, replace=False))
        one, two = single[i], single[j]
        if rng.random() < 0.5:
            return [
                (f"What {word} is the {one.shape}?", f"{one.colour.capitalize()}."),
                (pick(rng, (f"And the {two.shape}?", f"What about the {two.shape}?")), f"{two.colour.capitalize()}."),
            ]
        return [
            (f"Where is the {one.shape}?", place(one, scene)),
            (pick(rng, (f"And the {two.shape}?", f"What about the {two.shape}?")), place(two, scene)),
        ]
    name = _reference(thing, scene, rng)
    if name is None or not starts:
        return None
    k = int(rng.integers(4))
    if k == 0:
        first = (pick(rng, _where_questions(name)), place(thing, scene))
        rest = [later[1] if thing.colour not in name else later[2]] if thing.name not in name else [later[3]]
    elif k == 1 and thing.shape not in name:
        first = (f"What shape is {name}?", _with_article(thing.shape).capitalize() + ".")
        rest = [later[0], later[3]]
    elif k == 2 and thing.colour not in name:
        first = (f"What {word} is {name}?", f"{thing.colour.capitalize()}.")
        rest = [later[0], later[3]]
    else:
        first = (f"Is there {_with_article(thing.name)}?", "Yes.")
        if Counter(t.name for t in scene.things)[thing.name] > 1:
            return None
        rest = [later[0], later[3]]
    return [first, *rest[: int(rng.integers(1, 3))]]


def read(scene: Scene, rng: Rng) -> Dialogue | None:
    """The printed words and numbers."""
    if not scene.prints:
        return None
    text = " ".join(p.text for p in scene.prints)
    digits = text.replace(" ", "").isdigit()
    thing = "number" if digits else "word"
    questions = (
        "What does it say?",
        "What does the text say?",
        "Read the text.",
        "What is written here?",
        "What text is in the picture?",
        f"What {thing} is shown?",
        f"Which {thing} do you see?",
        f"Read the {thing}.",
        f"What {thing} is printed?",
        "What is the text?",
    )
    return [_ask(rng, questions, text)]


def text_box(scene: Scene, rng: Rng) -> Dialogue | None:
    """Ask for the box of the printed text."""
    if not scene.prints:
        return None
    text = scene.prints[0]
    box = thousandths(print_box(text), scene)
    questions = (
        "Locate the text, output its bbox coordinates using JSON format.",
        "Give the bounding box of the text in JSON.",
    )
    return [(pick(rng, questions), json.dumps([{"bbox_2d": box, "label": text.text}]))]


STRANGE_ANSWERS = {
    "noise": "Only noise, no shape that I know.",
    "stripes": "A pattern of stripes, no shape that I know.",
    "blur": "Soft colours, no shape that I know.",
    "photo": "A busy picture, no shape that I know.",
}


def about_strange(kind: str, rng: Rng) -> Dialogue:
    """About a picture outside the world of shapes: an honest short answer."""
    caption = STRANGE_ANSWERS[kind]
    roll = rng.random()
    if roll < 0.5:
        return [_ask(rng, DESCRIBE, caption)]
    if roll < 0.6:
        return [_ask(rng, (f"How many {pick(rng, _THINGS)} are there?",), "I see no shape that I know.")]
    if roll < 0.8:
        name = f"{pick(rng, COLOURS)} {pick(rng, SHAPES)}"
        return [_ask(rng, (f"Is there {_with_article(name)}?", f"Do you see {_with_article(name)}?"), "No.")]
    if roll < 0.9:
        return [_ask(rng, (f"Where is the {pick(rng, SHAPES)}?",), "I see no shape that I know.")]
    return [_ask(rng, (f"What {pick(rng, _COLOUR)} is the {pick(rng, SHAPES)}?",), "I see no shape that I know.")]


def album(scenes: Sequence[Scene], rng: Rng) -> Dialogue | None:
    """About several pictures in one prompt."""
    roll = rng.random()
    k = int(rng.integers(len(scenes)))
    nth, picture = ORDINALS[k], pick(rng, ("picture", "image"))
    which = pick(rng, (f"the {nth} {picture}", f"{picture} {k + 1}"))
    if roll < 0.45:
        name, holders = "", []
        for _ in range(8):
            thing = _any_thing(scenes[k], rng)
            if thing is None:
                return None
            kind = rng.random()
            name = (
                thing.name
                if kind < 0.6
                else thing.shape
                if kind < 0.8
                else f"{thing.colour} {pick(rng, ('object', 'shape'))}"
            )
            words = name.split()
            holders = [
                n
                for n, s in enumerate(scenes)
                if any(all(w in (t.colour, t.shape, "object", "shape") for w in words) for t in s.things)
            ]
            if holders == [k]:
                break
        if holders != [k]:
            return None
        a = _with_article(name)
        questions = (
            f"Which {picture} has {a}?",
            f"Which {picture} shows {a}?",
            f"In which {picture} is {a}?",
            f"Which of the {picture}s contains {a}?",
        )
        return [_ask(rng, questions, f"Picture {k + 1}.")]
    if roll < 0.55:
        return [
            _ask(
                rng, (f"How many {picture}s are there?", f"How many {picture}s do you see?"), f"{NUMBERS[len(scenes)]}."
            )
        ]
    if roll < 0.7:
        return [
            _ask(rng, (f"What is in {which}?", f"Describe {which}.", f"What does {which} show?"), listed(scenes[k]))
        ]
    if roll < 0.8:
        totals = [len(s.things) for s in scenes]
        if totals.count(max(totals)) > 1:
            return None
        return [
            _ask(
                rng,
                (f"Which {picture} has the most objects?", f"Which {picture} has more objects?"),
                f"Picture {totals.index(max(totals)) + 1}.",
            )
        ]
    asker = (exists, count, colour, shape, where)[int(rng.integers(5))]
    dialogue = asker(scenes[k], rng)
    if dialogue is None:
        return None
    question, answer = dialogue[0]
    return [(pick(rng, (f"In {which}: ", f"{which.capitalize()}: ", f"Look at {which}. ")) + question, answer)]


_CLIP = ("video", "clip")


def about_clip(clip: Clip, rng: Rng) -> Dialogue | None:
    """What moves, which way; what changes its colour, to which, and when."""
    thing, roll, video = clip.thing, rng.random(), pick(rng, _CLIP)
    moves, changes = clip.event in MOVES, clip.event == "colour"
    if rng.random() < 0.16:
        return _yes_or_no(clip, rng)
    if rng.random() < (0.4 if changes else 0.05):
        return _at_a_time(clip, rng)
    if roll < 0.22:
        questions: tuple[str, ...] = (
            "What happens?",
            f"What happens in the {video}?",
            f"Describe the {video}.",
            f"What does the {video} show?",
            "What do you see?",
        )
        if moves:
            return [_ask(rng, questions, f"{_with_article(thing.name).capitalize()} moves {clip.event}.")]
        if changes:
            return [_ask(rng, questions, f"{_with_article(thing.name).capitalize()} turns {clip.later_colour}.")]
        return [_ask(rng, questions, "Nothing moves.")]
    if roll < 0.4:
        questions = (
            f"What moves in the {video}?",
            "What moves?",
            "Which object moves?",
            "What is moving?",
            f"What moves, and which {pick(rng, _COLOUR)} has it?",
            f"Say which object moves, {pick(rng, _COLOUR)} and all.",
        )
        return [_ask(rng, questions, f"The {thing.name}." if moves else "Nothing moves.")]
    if roll < 0.62:
        name = (
            pick(rng, (f"the {thing.shape}", f"the {thing.name}", "the moving object"))
            if moves
            else f"the {thing.shape}"
        )
        questions = (
            f"Which way does {name} move?",
            f"In which direction does {name} move?",
            f"Where does {name} go?",
            f"Which direction is {name} moving in?",
            f"Where to does {name} move?",
            f"{name.capitalize()} goes which way: left, right, up or down?",
            f"Does {name} go left, right, up or down?",
            f"What is the direction of {name}?",
        )
        return [_ask(rng, questions, f"{clip.event.capitalize()}." if moves else "It does not move.")]
    if roll < 0.74:
        questions = (f"What changes {pick(rng, _COLOUR)}?", f"Which object changes its {pick(rng, _COLOUR)}?")
        return [_ask(rng, questions, f"The {thing.shape}." if changes else "Nothing changes colour.")]
    word = pick(rng, _COLOUR)
    if changes:
        if rng.random() < 0.5:
            questions = (
                f"What {word} does the {thing.shape} turn?",
                f"What {word} is the {thing.shape} at the end?",
                f"Which {word} does the {thing.shape} change to?",
                f"Into which {word} does the {thing.shape} turn?",
                f"What {word} does it become?",
            )
            return [_ask(rng, questions, f"{clip.later_colour.capitalize()}.")]
        questions = (
            f"What {word} is the {thing.shape} at first?",
            f"What {word} is the {thing.shape} at the beginning?",
        )
        return [_ask(rng, questions, f"{thing.colour.capitalize()}.")]
    if roll < 0.87:
        return [_ask(rng, (f"What {word} is the {thing.shape}?",), f"{thing.colour.capitalize()}.")]
    total = len(clip.frames[0].things)
    return [_ask(rng, (f"How many objects are in the {video}?", "How many objects are there?"), f"{NUMBERS[total]}.")]


def _at_a_time(clip: Clip, rng: Rng) -> Dialogue:
    """Ask when the colour changes, or for the colour at a given time, which teaches to look up the frames of a time."""
    shape, word, roll = clip.thing.shape, pick(rng, _COLOUR), rng.random()
    if clip.event == "colour" and roll < 0.5:
        later = clip.later_colour
        questions: tuple[str, ...] = (
            f"When does the {word} change?",
            f"When does the {shape} change its {word}?",
            f"When is the {shape} {later} for the first time?",
            f"At what time does the {shape} turn {later}?",
            f"After how many seconds does the {shape} turn {later}?",
            f"At which second does the {word} of the {shape} change?",
            f"At how many seconds does the {shape} turn {later}?",
            "After how many seconds does it change?",
        )
        return [_ask(rng, questions, f"At about {clip.change_seen:.1f} seconds.")]
    seen = clip.actor_colours
    at = pick(rng, list(seen))
    colours = [clip.thing.colour, clip.later_colour or pick(rng, COLOURS)]
    if roll < 0.9:
        questions = (
            f"What {word} is the {shape} at {at} seconds?",
            f"At {at} seconds, what {word} is the {shape}?",
            f"Which {word} has the {shape} at {at} seconds?",
        )
        return [_ask(rng, questions, f"{seen[at].capitalize()}.")]
    asked = pick(rng, colours)
    questions = (f"Is the {shape} {asked} at {at} seconds?", f"At {at} seconds, is the {shape} {asked}?")
    return [_ask(rng, questions, "Yes." if asked == seen[at] else "No.")]


def _yes_or_no(clip: Clip, rng: Rng) -> Dialogue:
    thing, moves = clip.thing, clip.event in MOVES
    name, way, word = pick(rng, (f"the {thing.shape}", f"the {thing.name}")), str(clip.event), pick(rng, _COLOUR)
    if rng.random() < 0.3:
        questions: tuple[str, ...] = (f"Does {name} change its {word}?", f"Does the {word} of {name} change?")
        true = clip.event == "colour"
    elif moves and rng.random() < 0.6:
        if rng.random() < 0.5:
            way = pick(rng, [other for other in MOVES if other != clip.event])
        questions = (f"Does {name} move {way}?", f"Is {name} moving {way}?", f"Does {name} go {way}?")
        true = way == clip.event
    else:
        questions = (f"Does {name} move?", f"Is {name} moving?", "Does anything move?", "Is something moving?")
        true = moves
    return [_ask(rng, questions, "Yes." if true else "No.")]


_TALK = (
    (("Hello", "Hello!", "Hi", "Hi there!", "Good morning", "Hey"), "Hello! Show me a picture of simple shapes."),
    (
        ("Who are you?", "What are you?", "What model are you?", "What is your name?"),
        "A small model that knows simple pictures of shapes.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?", "What do you know?"),
        "I answer questions about pictures of simple shapes.",
    ),
    (("Thanks", "Thank you!", "Thank you very much"), "You are welcome."),
    (("Bye", "Goodbye!", "See you"), "Goodbye."),
)
NO_IDEA = "I only know pictures of simple shapes."
NO_PICTURE = "I see no picture."


def talk(rng: Rng, words: Sequence[str]) -> Dialogue:
    """Talk without a picture: greetings, and questions about shapes that were not shown or facts that it cannot
    know."""
    roll = rng.random()
    if roll < 0.35:
        questions, answer = _TALK[int(rng.integers(len(_TALK)))]
        return [(pick(rng, questions), answer)]
    if roll < 0.55:
        name = f"{pick(rng, COLOURS)} {pick(rng, SHAPES)}"
        unseen = (
            *DESCRIBE,
            f"What colour is the {pick(rng, SHAPES)}?",
            f"Where is the {name}?",
            f"Is there a {name}?",
            "How many objects are there?",
        )
        return [(pick(rng, unseen), NO_PICTURE)]
    text = " ".join(pick(rng, words) for _ in range(int(rng.integers(2, 14))))
    return [(text[0].upper() + text[1:] + pick(rng, ("", ".", "?", "!")), NO_IDEA)]


BASIC: tuple[tuple[Asker, float], ...] = (
    (describe, 1.4),
    (colour, 0.8),
    (shape, 0.6),
    (where, 1.6),
    (count, 1.0),
    (exists, 1.4),
    (absent, 0.3),
    (side, 0.8),
    (in_order, 0.4),
    (relation, 4.5),
    (largest, 0.3),
    (boxes, 2.0),
    (follow_up, 0.7),
)


def dialogues(scene: Scene, rng: Rng, wanted: int) -> list[Dialogue]:
    """`wanted` dialogues about the scene, of kinds drawn by weight."""
    askers = ((read, 12), (text_box, 0.8), *BASIC) if scene.prints else BASIC
    weights = [w for _, w in askers]
    chances = [w / sum(weights) for w in weights]
    found: list[Dialogue] = []
    while len(found) < wanted:
        dialogue = askers[int(rng.choice(len(askers), p=chances))][0](scene, rng)
        if dialogue:
            found.append(dialogue)
    return found
