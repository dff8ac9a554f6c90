"""The third kinds of question: printed words and numbers, and bounding boxes in JSON."""

from __future__ import annotations

import string

from numpy.random import Generator

from assets.recipe.exam.chance import pick
from assets.recipe.exam.items import Question
from assets.recipe.exam.print_judges import BoxOf, Saying
from assets.recipe.exam.scenes import make_scene, take_picture
from assets.recipe.exam.signs import make_sign
from assets.recipe.exam.v1 import names_of
from assets.recipe.exam.wordings import say

LONGEST_TEXT = 6  # characters
_COMMON = """
go we us my ox hi on off bus car taxi tram ship boat bike road lane park zoo farm barn shop cafe hotel bank open
exit push pull stop slow wait gate door wall roof room floor table chair lamp desk book page pen pencil paper
map mail post phone clock watch radio music piano drum song dance game ball goal team run jump swim ski tea milk
juice water bread jam egg fish rice soup salad cake pizza apple pear plum lemon grape melon onion corn bean salt
sugar honey cat dog cow pig hen duck goose horse sheep goat mouse tiger lion bear wolf fox eagle owl frog snake
tree leaf rose grass forest river lake sea beach island hill cloud rain snow storm wind sun moon sky fire ice
spring summer autumn winter monday friday april june july night today north south east west city town street
bridge castle school doctor nurse pilot baker king queen friend mother father uncle aunt baby hand foot head eye
nose hat coat shirt shoe sock glove ring gift party happy quick quiet warm cold new old big tiny free sale hello
thanks please sorry yes no ok
"""
WORDS = tuple(_COMMON.split())
_CLEAR_LETTERS = "".join(letter for letter in string.ascii_lowercase if letter not in "ilo")  # I, l and 1; O and 0

SAYS = (
    "What does it say?",
    "What does the {picture} say?",
    "What is written here?",
    "What is written in the {picture}?",
    "Which text is printed in this {picture}?",
    "What text do you see?",
    "Read the text.",
    "Read out what is written in the {picture}.",
    "Can you read this?",
)
WORD: tuple[str, ...] = (
    "What word is shown?",
    "Which word do you see?",
    "What is the word in this {picture}?",
    "Read the word.",
)
LETTERS: tuple[str, ...] = (
    "Which letters are shown?",
    "What letters do you see in the {picture}?",
    "Read the letters.",
)
NUMBER = (
    "What number is shown?",
    "Which number do you see?",
    "What number is in the {picture}?",
    "Which number is printed in this {picture}?",
    "What is the number in this {picture}?",
    "Read the number.",
    "Tell me the number that is printed here.",
)
BOX = (
    "Locate the {thing}, output its bbox coordinates using JSON format.",
    "Locate the {thing} and output its bounding box as JSON.",
    "Output the bounding box of the {thing} in JSON.",
    "Detect the {thing} in this {picture} and return JSON with bbox_2d and label.",
    "Find the {thing} in the {picture}; report its bbox_2d coordinates in JSON.",
    "Where is the {thing}? Give its bbox_2d.",
    "Which area does the {thing} cover? Respond with JSON.",
    "Return the bbox_2d of the {thing}.",
)


def read_word(rng: Generator) -> Question:
    if rng.random() < 0.6:
        characters, asking = pick(rng, WORDS), WORD
    else:
        length = int(rng.integers(1, LONGEST_TEXT + 1))
        characters, asking = "".join(pick(rng, _CLEAR_LETTERS) for _ in range(length)), LETTERS
    characters = pick(rng, (str.upper, str.upper, str.upper, str.lower, str.capitalize))(characters)
    picture, text = take_picture(make_sign(rng, characters)), say(rng, (*SAYS, *asking))
    return Question("read-word", (picture,), text, Saying(characters))


def read_number(rng: Generator) -> Question:
    length = int(rng.integers(1, LONGEST_TEXT + 1))
    first = int(rng.integers(length > 1, 10))  # no leading zeros
    characters = "".join(map(str, [first, *rng.integers(0, 10, size=length - 1)]))
    return Question("read-number", (take_picture(make_sign(rng, characters)),), say(rng, NUMBER), Saying(characters))


def box(rng: Generator) -> Question | None:
    scene = make_scene(rng)
    thing = pick(rng, scene.things)
    names = names_of(thing, scene)
    if not names:
        return None
    name = pick(rng, names)
    text = say(rng, BOX, thing=name).replace("json", "JSON")  # typed in haste or not
    return Question("box", (take_picture(scene),), text, BoxOf.of(name, thing.box, scene.width, scene.height))
