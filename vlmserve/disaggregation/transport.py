"""How bytes of KV move: the small interface that an agent's transports have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zmq

from vlmserve.disaggregation.messages import Described, Source


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What is read from an agent at once. slots, own_slots: int64 [n]. state, own_state: -1 for none."""

    source: Source
    slots: np.ndarray
    own_slots: np.ndarray
    state: int = -1
    own_state: int = -1


class Transport(Protocol):
    """Reads other agents' KV into an own pool. One thread calls all of it."""

    def describe(self) -> Described | None:
        """Tell where others can read this agent's memory by themselves; None if they cannot."""

    def most_slots(self, cuts: np.ndarray) -> int:
        """Return how many slots of these own cuts a piece may have."""

    def read(self, ticket: int, piece: Piece) -> None:
        """Begin to read."""

    def poll(self) -> list[tuple[int, str]]:
        """Return the tickets of all that has ended, each with why it failed, or "" where own slots have it now."""

    def drop(self, ticket: int) -> None:
        """Give a read up. From now on nothing is written to own slots for it."""

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """What is readable when `poll` has something to do."""

    @property
    def wait_s(self) -> float | None:
        """The longest time until `poll` should be called in any case; None if `sockets` will do."""

    def close(self) -> None:
        """End all links."""
