"""What the encoder pool knows of one key."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from vision.towers.temporal_patch import TemporalPatch


class State(enum.Enum):
    """Where an entry is; see `vision.encoder_pool`."""

    QUEUED = enum.auto()
    LOADING = enum.auto()
    WAITING = enum.auto()
    ENCODING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


UNDER_WAY = (State.LOADING, State.ENCODING)
Order: TypeAlias = tuple[int, int]


@dataclass(eq=False)
class Entry:
    """One key that somebody holds, or that is under way.

    holders: order and place of each, sorted. last_save: its number.
    """

    key: bytes
    patch: TemporalPatch
    nbytes: int
    holders: list[Order]
    state: State = State.QUEUED
    attempts: int = 0
    last_save: int | None = None
    encoded: bool = False
    saved: bool | None = None
    error: str = ""

    @property
    def order(self) -> Order:
        """That of the first who holds it."""
        return self.holders[0]
