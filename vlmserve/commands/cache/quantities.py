"""Sizes and ages as people write them."""

from __future__ import annotations

import argparse
import re

_BINARY = ("KiB", "MiB", "GiB", "TiB")
_SIZES = {
    "B": 1,
    **{unit: 1024**power for power, unit in enumerate(_BINARY, 1)},
    **{unit: 1000**power for power, unit in enumerate(("KB", "MB", "GB", "TB"), 1)},
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size(text: str) -> int:
    """Bytes of "10GiB", "1.5 MB" or "4096". Raises ArgumentTypeError."""
    return int(_value(text, _SIZES, "a size such as 500MiB or 10GiB", without_unit="B"))


def age(text: str) -> float:
    """Seconds of "90s", "30m", "12h", "7d" or "2w". Raises ArgumentTypeError."""
    return _value(text, _AGES, "an age such as 30m, 12h, 7d or 2w")


def show_size(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(count), "B"
    for larger in _BINARY:
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def _value(text: str, units: dict[str, int], expected: str, *, without_unit: str = "") -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip())
    unit = (match.group(2) or without_unit) if match else ""
    if not match or unit not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected} (units: {', '.join(units)})")
    return float(match.group(1)) * units[unit]
