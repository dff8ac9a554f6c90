"""Draws from a numpy generator that several modules make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from numpy.random import Generator

T = TypeVar("T")


def pick(rng: Generator, choices: Sequence[T]) -> T:
    """One of `choices`, each as likely."""
    return choices[int(rng.integers(len(choices)))]


def log_uniform(rng: Generator, low: float, high: float) -> float:
    """Between `low` and `high`, each doubling as likely as the next."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))
