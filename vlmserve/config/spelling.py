"""Guesses at what was meant by a word that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, prefix: str = "") -> str:
    """The end of a sentence: "; did you mean x?" where one of the known words is close, else `otherwise`.

    prefix: what is shown before that word.
    """
    folded = {name.lower().replace("_", "-"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("_", "-"), folded, n=1, cutoff=0.7)
    return f"; did you mean {prefix}{folded[close[0]]}?" if close else otherwise
