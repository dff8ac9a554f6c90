"""How 8-bit levels become what a tower takes. Needs no torch: processes tell each other of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelScale:
    """(level - mean) / std in float32, each channel with its own; both counted in levels, 0 to 255.

    repeat: how many times a patch shows its frame, where it has only one (a picture's); else 1.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    repeat: int = 1
