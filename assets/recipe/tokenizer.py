"""What the default model's tokenizer is made from."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from assets.recipe.chatml import make_tokenizer
from assets.recipe.wording import BASIC, NO_IDEA, STRANGE_ANSWERS, about_strange, album, talk
from assets.recipe.world import make_scene

VOCABULARY = 2048
"""Tokens the tokenizer has; the network has rows for more, so that a later version can learn new words."""

# So that everyday words are a few tokens, and the network meets questions it has no answer to.
_EVERYDAY = """
the be to of and a in that have it for not on with as you do at this but by from they we say or will one all would there
their what so up out if about who get which go me when make can like time no just him know take people into year your
good some could them see other than then now look only come its over think also back after use two how our work first
well way even new want because any these give day most us is are was were has had did been being does please write tell
explain show help find name list many much where why read count describe picture image photo video colour color shape
object word number text left right top bottom middle centre center above below under near far large small big little
red green blue yellow purple orange black white grey brown pink circle square triangle star line dot box cross ring
dog cat horse bird fish tree flower house car bus train boat plane road street river mountain beach sea sky cloud sun
moon rain snow man woman child boy girl family friend face hand eye hair dress hat shoe table chair bed door window wall
book paper letter page phone computer screen camera city town country school office shop market park garden kitchen
room food bread apple banana cake coffee tea water milk fruit meat rice music song film game ball sport team player
doctor teacher student capital France Paris London Germany Berlin China Japan America weather today tomorrow morning
evening night week month hour minute second money price cost answer question story poem code program python function
math sum plus minus times divided equals square root history science language English German translate summarise
animal plant building bridge person persons wearing holding standing sitting running walking doing happening feeling
January Monday hello thanks sorry yes no maybe really very quite too again always never often today every something
"""
EVERYDAY = tuple(_EVERYDAY.split())


def corpus(lines: int = 6000) -> list[str]:
    """Questions and answers as they come in training, and everyday words."""
    rng = np.random.default_rng(0)
    texts = [f" {word} {word.capitalize()}" for word in EVERYDAY for _ in range(3)]
    texts += ["system user assistant\n", NO_IDEA, *STRANGE_ANSWERS.values()] * 20
    while len(texts) < lines:
        scene = make_scene(rng, int(rng.integers(1, 5)))
        found = [asker(scene, rng) for asker, _ in BASIC]
        found += [album([scene, make_scene(rng, 2)], rng), about_strange("noise", rng), talk(rng, EVERYDAY)]
        texts += [text for dialogue in found if dialogue for turn in dialogue for text in turn]
    return texts


def make_recipe_tokenizer() -> Tokenizer:
    """The tokenizer of a new run."""
    return make_tokenizer(corpus(), VOCABULARY)
