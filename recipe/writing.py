"""Scenes with printed words and numbers of up to six characters."""

from __future__ import annotations

import dataclasses
import math

from recipe.paint import font, print_box
from recipe.tokenizer import EVERYDAY
from recipe.world import Print, Rng, Scene, any_colour, apart, distance, make_scene, pick_size

_WORDS = [w for w in EVERYDAY if 2 <= len(w) <= 6 and w.isalpha()]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHARE = (0.09, 0.3)  # of the short side: the font's size


def pick_text(rng: Rng) -> str:
    """A word, a row of letters, or a number."""
    roll = rng.random()
    if roll < 0.35:
        return "".join(str(rng.integers(10)) for _ in range(int(rng.integers(1, 7))))
    if roll < 0.65:
        word = _WORDS[int(rng.integers(len(_WORDS)))]
    else:
        word = "".join(_LETTERS[int(rng.integers(26))] for _ in range(int(rng.integers(1, 7)))).lower()
    case = rng.random()
    return word.upper() if case < 0.6 else word.lower() if case < 0.8 else word.capitalize()


def make_print_scene(rng: Rng) -> Scene:
    """One printed text, sometimes beside one or two objects."""
    width, height = pick_size(rng)
    while min(width, height) < 110:
        width, height = pick_size(rng)
    text, face = pick_text(rng), int(rng.integers(64))
    short = min(width, height)
    size = max(10, round(short * math.exp(rng.uniform(math.log(_SHARE[0]), math.log(_SHARE[1])))))
    while size > 9:
        x0, y0, x1, y1 = font(face, size).getbbox(text, anchor="mm")
        if x1 - x0 < 0.92 * width and y1 - y0 < 0.9 * height:
            break
        size -= 2
    scene = make_scene(rng, int(rng.choice([0, 1, 2], p=[0.7, 0.2, 0.1])), (width, height))
    for _ in range(20):
        anchor = (
            float(rng.uniform(-x0 + 0.02 * width, width - x1 - 0.02 * width)),
            float(rng.uniform(-y0 + 0.02 * height, height - y1 - 0.02 * height)),
        )
        rgb = any_colour(rng)
        while distance(rgb, scene.background) < 130:
            rgb = any_colour(rng)
        printed = Print(text=text, face=face, size=size, rgb=rgb, anchor=anchor)
        if apart(print_box(printed), scene.things, 0):
            return dataclasses.replace(scene, prints=(printed,))
    return dataclasses.replace(scene, things=(), prints=(printed,))
