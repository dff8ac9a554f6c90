"""How people type: one question in many dresses."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.random import Generator

from assets.recipe.exam.chance import pick


def say(rng: Generator, templates: Sequence[str], *, please: bool = True, **fields: str) -> str:
    """One of `templates`, filled in and dressed: colour or color, a please or none, tidy or typed in haste.

    `{picture}` in a template becomes one of the words for one. `please=False` is for words that are too short to be
    polite.
    """
    text = pick(rng, templates).format(picture=pick(rng, ("picture", "picture", "image", "photo")), **fields)
    if rng.random() < 0.5:
        text = text.replace("colour", "color")
    manner = rng.random() if please else 1.0
    if manner < 0.12:
        text = f"{text[:-1]}, please{text[-1]}"
    elif manner < 0.2:
        text = f"Please tell me: {lower_first(text)}" if text.endswith("?") else f"Please {lower_first(text)}"
    haste = rng.random()
    if haste < 0.1:
        text = text.lower()
    elif haste < 0.2:
        text = text.lower().rstrip("?.")
    return text


def with_article(name: str) -> str:
    """The name with its indefinite article: "a red circle", "an orange star"."""
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def sentence(words: str) -> str:
    """`words` with a capital and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def lower_first(text: str) -> str:
    """`text` without its capital."""
    return text[0].lower() + text[1:]
