"""Names with ranges in them, as WebDataset's shards are usually written: shard-{000000..000099}.tar."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vlmserve.config.checks import SettingsError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST = 1_000_000


def has_range(word: str) -> bool:
    """Whether it stands for several names."""
    return _RANGE.search(word) is not None


def check_ranges(word: str) -> None:
    """Raises SettingsError for more names than anyone means."""
    names = 1
    for first, last in _RANGE.findall(word):
        names *= abs(int(last) - int(first)) + 1
    if names > _MOST:
        raise SettingsError(f"INPUT {word!r} stands for {names} names; the most are {_MOST}")


def expanded(word: str) -> Iterator[str]:
    """The names that it stands for; numbers are as wide as the range's first."""
    match = _RANGE.search(word)
    if match is None:
        yield word
        return
    first, last = int(match[1]), int(match[2])
    step = 1 if first <= last else -1
    for number in range(first, last + step, step):
        yield from expanded(f"{word[: match.start()]}{number:0{len(match[1])}}{word[match.end() :]}")
