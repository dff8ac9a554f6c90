"""Types for argparse: numbers within bounds."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any


def _number(kind: Callable[[str], float], good: Callable[[float], bool], allowed: str) -> Callable[[str], Any]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if good(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} must be {allowed}")

    return parse


positive = _number(int, lambda value: value >= 1, "a whole number of 1 or more")
not_negative = _number(int, lambda value: value >= 0, "a whole number of 0 or more")
above_zero = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
