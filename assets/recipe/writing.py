"""Scenes with printed words and numbers of up to six characters."""

from __future__ import annotations

import dataclasses
import math

from assets.recipe.paint import font, print_box
from assets.recipe.tokenizer import EVERYDAY
from assets.recipe.world import Print, Rng, Scene, any_colour, apart, distance, make_scene, pick_size

_WORDS = [w for w in EVERYDAY if 2 <= len(w) <= 6 and w.isalpha()]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST = 6
"""Characters of a text, at most."""
_SHARE = (0.11, 0.32)  # of the short side: the font's size
_PAGE_SHARE = (0.12, 0.5)


def pick_text(rng: Rng) -> str:
    """A word, a row of letters, or a number."""
    roll = rng.random()
    if roll < 0.35:
        return "".join(str(rng.integers(10)) for _ in range(int(rng.integers(1, LONGEST + 1))))
    if roll < 0.65:
        word = _WORDS[int(rng.integers(len(_WORDS)))]
    else:
        word = "".join(_LETTERS[int(rng.integers(26))] for _ in range(int(rng.integers(1, LONGEST + 1)))).lower()
    case = rng.random()
    return word.upper() if case < 0.6 else word.lower() if case < 0.8 else word.capitalize()


def _print(rng: Rng, text: str, scene: Scene, share: tuple[float, float]) -> Print | None:
    """The text somewhere in the scene, clear of its things and of other texts; None where no room was found."""
    width, height = scene.width, scene.height
    low, high = (math.log(part * min(width, height)) for part in share)
    face = 0 if rng.random() < 0.25 else int(rng.integers(64))  # number 0 is the face people meet most
    size = max(10, round(math.exp(rng.uniform(low, high))))
    while size > 9:
        x0, y0, x1, y1 = font(face, size).getbbox(text, anchor="mm")
        if x1 - x0 < 0.92 * width and y1 - y0 < 0.9 * height:
            break
        size -= 2
    rgb = any_colour(rng)
    while distance(rgb, scene.background) < 130:
        rgb = any_colour(rng)
    for _ in range(20):
        anchor = (
            float(rng.uniform(-x0 + 0.02 * width, width - x1 - 0.02 * width)),
            float(rng.uniform(-y0 + 0.02 * height, height - y1 - 0.02 * height)),
        )
        printed = Print(text=text, face=face, size=size, rgb=rgb, anchor=anchor)
        if apart(print_box(printed), [t.box for t in scene.things] + [print_box(p) for p in scene.prints], 1):
            return printed
    return None


def _size(rng: Rng) -> tuple[int, int]:
    width, height = pick_size(rng)
    while min(width, height) < 110:
        width, height = pick_size(rng)
    return width, height


def make_print_scene(rng: Rng) -> Scene:
    """One printed text, sometimes beside one or two objects."""
    scene, text = make_scene(rng, int(rng.choice([0, 1, 2], p=[0.7, 0.2, 0.1])), _size(rng)), pick_text(rng)
    for bare in (scene, dataclasses.replace(scene, things=())):
        printed = _print(rng, text, bare, _SHARE)
        if printed is not None:
            return dataclasses.replace(bare, prints=(printed,))
    raise AssertionError("a text finds room in an empty picture")


def make_page(rng: Rng) -> Scene:
    """Full of printed texts, to learn characters from."""
    scene = make_scene(rng, 0, _size(rng))
    for _ in range(int(rng.integers(3, 10))):
        printed = _print(rng, pick_text(rng), scene, _PAGE_SHARE)
        if printed is not None:
            scene = dataclasses.replace(scene, prints=(*scene.prints, printed))
    return scene
