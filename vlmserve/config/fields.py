"""The declaration of a setting: a dataclass field with a help text, a group in --help, and the allowed values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_SECONDS = 2_000_000
"""The longest time of a setting, 23 days: the system's calls take milliseconds in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """The values that a setting may have, besides None if that is the default. words: the end of "it must be ...".
    secret: no message shows the value."""

    words: str
    holds: Callable[[Any], object]
    secret: bool = False


AT_LEAST_0 = Allowed(words="0 or more", holds=lambda value: value >= 0)
AT_LEAST_1 = Allowed(words="1 or more", holds=lambda value: value >= 1)
CACHE_SIZE = Allowed(words="0 (no cache) or more", holds=lambda value: value >= 0)
ABOVE_0 = Allowed(words="above 0, and finite", holds=lambda value: 0 < value < math.inf)
SECONDS = Allowed(words=f"above 0 and at most {MOST_SECONDS}", holds=lambda value: 0 < value <= MOST_SECONDS)


def settings_of(group: str) -> Callable[..., Any]:
    """Return a function that declares the settings of a group: ``memory(16, "KV cache slots in a page", AT_LEAST_1)``.

    common: people change this setting, and --help shows it. --help-all shows the rest, too. several: the command line
    takes several words, and puts commas between them.
    """

    def declare(
        default: Any, help: str, allowed: Allowed | None = None, *, common: bool = False, several: bool = False
    ) -> Any:
        about = {"help": help, "group": group, "allowed": allowed, "common": common, "several": several}
        return dataclasses.field(default=default, metadata=about)

    return declare


def flag(name: str) -> str:
    """Return the command line's name of a setting: ``page_size`` -> ``--page-size``."""
    return "--" + name.replace("_", "-")


def problem(values: object, name: str, allowed: str) -> str:
    """Return a sentence about a wrong setting."""
    return f"{flag(name)} is {getattr(values, name)!r}; it must be {allowed}"


def range_problems(values: Any) -> list[str]:
    """Return a sentence for each setting of a dataclass with a value that is not allowed. The types must be checked
    before."""
    problems = []
    for field in dataclasses.fields(values):
        value, allowed = getattr(values, field.name), field.metadata.get("allowed")
        if allowed is not None and value is not None and not allowed.holds(value):
            words = allowed.words + (", or left out" * (field.default is None))
            what = f"{flag(field.name)} must be {words}" if allowed.secret else problem(values, field.name, words)
            problems.append(what)
    return problems
