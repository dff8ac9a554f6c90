"""Scenes with one printed text, sometimes beside one or two things.

They keep the promises of scenes, and more. The text lies wholly inside the picture and over nothing else. Its size is
12% to 30% of the picture's short side, which is no less than 128 pixels. It contrasts with the whole background, in
brightness too, since small strokes keep little of their colour in a file.
"""

from __future__ import annotations

from numpy.random import Generator

from assets.recipe.exam.chance import pick
from assets.recipe.exam.colours import COLOURS, sample_colour
from assets.recipe.exam.grounds import sample_ground
from assets.recipe.exam.scenes import Scene, pick_file, pick_sides, place_things
from assets.recipe.exam.texts import sample_text

SHORTEST_SIDE = 128  # pixels


def make_sign(rng: Generator, characters: str) -> Scene:
    """A random scene with `characters` on it, six at most."""
    beside, (width, height) = pick(rng, (0, 0, 0, 1, 2)), pick_sides(rng, SHORTEST_SIDE)
    while True:
        text = sample_text(rng, characters, sample_colour(rng, pick(rng, COLOURS)), width, height)
        things = place_things(rng, beside, width, height, taken=[text.box])
        if len(things) == beside:
            ground = sample_ground(rng, [thing.rgb for thing in things], legible=[text.rgb])
            if ground is not None:
                return Scene(width, height, things, ground, *pick_file(rng), text)
